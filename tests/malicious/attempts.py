"""Attempts on a tool that opens model files, numbered, each with its verdict.

An attempt writes files into a folder of its own, `victim/`, and returns the model to open. Beside that
folder lies `secret`, which no attempt may read. The verdict is the class of the refusal, or HANDLED where
the file is odd and harmless. A number is never used twice; a new finding becomes a new attempt. What is refused
for one rule of a model's structure is in tests/model_io/test_validate.py and test_mending.py.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper as make
import onnx.numpy_helper
from onnx import TensorProto

from bnexport.errors import (
    BnexportError,
    MalformedModelError,
    MissingFileError,
    UnsafeModelError,
    UnsupportedModelError,
)
from bnexport.model_io.wire import field, varint
from tests.support.onnx_text import model

SECRET = b"the secret" * 1024
WEIGHT = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
# The weight has the size of the secret's first bytes, so that reading it would succeed.
assert len(SECRET) > WEIGHT.nbytes
Verdict = type[BnexportError] | None
HANDLED: Verdict = None
Build = Callable[[Path], Path]


@dataclasses.dataclass(frozen=True)
class Attempt:
    number: int
    name: str
    verdict: Verdict
    build: Build
    source: str = ""

    @property
    def id(self) -> str:
        return f"{self.number:03d}-{self.name}"


ATTEMPTS: list[Attempt] = []


def example() -> onnx.ModelProto:
    return model("g (float[N,64] x) => (float[N,32] y) { y = Gemm (x, w) }", values={"w": WEIGHT})


def write(folder: Path, proto: onnx.ModelProto | bytes) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(proto if isinstance(proto, bytes) else proto.SerializeToString())
    return path


def data(folder: Path, name: str = "data") -> Path:
    path = folder / name
    path.write_bytes(WEIGHT.tobytes())
    return path


def external(folder: Path, location: str = "data", **entries: str | None) -> Path:
    """The example with its weight outside."""
    proto = example()
    outside(weight_of(proto), location, **entries)
    return write(folder, proto)


def outside(tensor: TensorProto, location: str, **entries: str | None) -> None:
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": "0", "length": str(WEIGHT.nbytes), **entries}.items():
        if value is not None:
            tensor.external_data.add(key=key, value=value)


def weight_of(proto: onnx.ModelProto) -> TensorProto:
    return proto.graph.initializer[0]


def attempt(number: int, name: str, verdict: Verdict, source: str = "") -> Callable[[Build], Build]:
    def register(build: Build) -> Build:
        ATTEMPTS.append(Attempt(number, name, verdict, build, source))
        return build

    return register


def on_proto(number: int, name: str, verdict: Verdict, change: Callable[[Any], object], source: str = "") -> None:
    """An attempt that is a change of the example."""

    def build(folder: Path) -> Path:
        proto = example()
        change(proto)
        return write(folder, proto)

    attempt(number, name, verdict, source)(build)


def on_location(number: int, name: str, location: str, source: str = "", **entries: str) -> None:
    """An attempt that is a location, or other entries, of external data."""

    def build(folder: Path) -> Path:
        data(folder)
        (folder / "sub").mkdir()
        return external(folder, location, **entries)

    attempt(number, name, UnsafeModelError, source)(build)


# 1xx: where external data lies
on_location(101, "parent", "../secret", "CVE-2022-25882")
on_location(102, "parent-behind-a-folder", "sub/../../secret", "CVE-2024-27318")
on_location(103, "parent-of-a-file", "data/../../secret", "CVE-2024-27318")
on_location(104, "absolute", "/etc/passwd", "CVE-2022-25882")
on_location(105, "empty", "")
on_location(106, "the-folder-itself", ".")
on_location(107, "drive-letter", "C:\\secret")
on_location(108, "backslashes", "sub\\..\\..\\secret")
on_location(109, "zero-byte", "data\0.txt")
on_location(110, "line-break", "data\n/etc/passwd")
on_location(111, "memory-address", "*/_ORT_MEM_ADDR_/*", "ONNX Runtime's marker")
on_location(112, "memory-address-with-offset", "*/_ORT_MEM_ADDR_/*", "ONNX Runtime's marker", offset="94226518425600")
on_location(113, "double-slashes", "//etc//passwd")
on_location(114, "folder-as-data", "sub")
on_location(115, "last-control-character", "data\x1f")


def _link(number: int, name: str, links: dict[str, str], location: str = "data", source: str = "") -> None:
    """An attempt of symbolic links by name; .. is the folder that holds the secret."""

    def build(folder: Path) -> Path:
        data(folder, "real")
        for link, target in links.items():
            (folder / link).symlink_to(target)
        return external(folder, location)

    attempt(number, name, UnsafeModelError, source)(build)


_link(120, "symbolic-link", {"data": "../secret"}, source="CVE-2026-34447")
_link(121, "symbolic-link-inside", {"data": "real"}, source="CVE-2026-34447")
_link(122, "symbolic-link-as-parent", {"sub": ".."}, "sub/secret", "CVE-2026-27489")
_link(123, "chain-of-symbolic-links", {"one": "two", "two": ".."}, "one/secret", "CVE-2026-27489")
_link(124, "circle-of-symbolic-links", {"data": "other", "other": "data"})
_link(127, "device", {"data": "/dev/zero"})
attempt(128, "missing", MalformedModelError)(external)


@attempt(125, "hard-link", UnsafeModelError, "CVE-2026-34446")
def hard_link(folder: Path) -> Path:
    os.link(folder.parent / "secret", folder / "data")
    return external(folder)


@attempt(126, "pipe", UnsafeModelError)
def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "data")
    return external(folder)


def _secret() -> TensorProto:
    """A tensor whose data are the secret's."""
    tensor = onnx.numpy_helper.from_array(WEIGHT, "k")
    outside(tensor, "../secret")
    return tensor


def _function(proto: onnx.ModelProto) -> onnx.FunctionProto:
    proto.functions.append(make.make_function("local", "f", ["i"], ["o"], [make.make_node("Relu", ["i"], ["o"])], []))
    return proto.functions[0]


def _body(proto: onnx.ModelProto) -> None:
    body = make.make_graph([], "body", [], [make.make_tensor_value_info("k", 1, None)], [_secret()])
    proto.graph.node.append(make.make_node("If", ["x"], ["o"], then_branch=body, else_branch=body))


PLACES = {
    (129, "in-a-constant"): lambda p: p.graph.node.append(make.make_node("Constant", [], ["k"], value=_secret())),
    (130, "in-a-function"): lambda p: _function(p).node.append(make.make_node("Constant", [], ["k"], value=_secret())),
    (131, "in-a-body"): _body,
    (132, "in-a-list-of-tensors"): lambda p: p.graph.node[0].attribute.add(name="m", type=9, tensors=[_secret()]),
    # What a call takes over where it gives no value of its own.
    (134, "in-a-default-of-a-function"): lambda p: _function(p).attribute_proto.add(name="v", type=4, t=_secret()),
}
for (_number, _name), _change in PLACES.items():
    on_proto(_number, _name, UnsafeModelError, _change, "CVE-2024-27318")
on_proto(133, "in-a-sparse-tensor", UnsupportedModelError,
    lambda p: p.graph.sparse_initializer.add(dims=[64, 32]).values.CopyFrom(_secret()))  # fmt: skip

# 2xx: what is said about external data
ENTRIES = {
    "negative-offset": {"offset": "-1"},
    "offset-past-the-end": {"offset": "4"},
    "offset-of-twenty-digits": {"offset": "99999999999999999999"},
    "offset-in-base-16": {"offset": "0x10"},
    "offset-with-a-sign": {"offset": "+0"},
    "offset-in-other-digits": {"offset": "\u0663"},
    "short-length": {"length": "4"},
    "length-past-the-end": {"length": str(WEIGHT.nbytes + 1)},
    "length-in-float": {"length": "1e3"},
    "petabyte": {"length": str(2**50)},
    "negative-length": {"length": "-8192"},
    "another-folder": {"base_dir": "/"},
    "an-attribute-of-the-object": {"__class__": "x"},
    "methods-of-the-object": {"numpy": "x"},
}
for _index, (_name, _fields) in enumerate(ENTRIES.items()):
    on_location(201 + _index, _name, "data", "CVE-2026-34445", **_fields)


def _also(number: int, name: str, verdict: Verdict, change: Callable[[Any], object], source: str = "") -> None:
    """A change of the example whose weight is outside."""

    def build(folder: Path) -> Path:
        data(folder)
        proto = example()
        outside(weight_of(proto), "data")
        change(proto)
        return write(folder, proto)

    attempt(number, name, verdict, source)(build)


def _again(proto: onnx.ModelProto) -> None:
    """Two tensors may share bytes: each is read whole, and written on its own."""
    proto.graph.initializer.append(weight_of(proto))
    proto.graph.initializer[1].name = "again"


def _elsewhere(proto: onnx.ModelProto) -> None:
    outside(weight_of(proto), "../secret")
    weight_of(proto).raw_data = WEIGHT.tobytes()


_also(220, "location-twice", UnsafeModelError,
    lambda p: weight_of(p).external_data.add(key="location", value="../secret"), "CVE-2026-34445")  # fmt: skip
_also(221, "data-inside-and-outside", MalformedModelError, lambda p: setattr(weight_of(p), "raw_data", bytes(100)))
_also(222, "large-data-inside-and-outside", MalformedModelError, _elsewhere)
_also(225, "overlapping-data", HANDLED, _again)
# A location that looks like those of tensors left in the model file; the secret part cannot be guessed.
attempt(226, "a-marker-of-ours", MalformedModelError)(
    functools.partial(external, location="0" * 32 + ":0", offset=None, length="")
)


@attempt(223, "file-cut-off", UnsafeModelError, "CVE-2024-27319")
def file_cut_off(folder: Path) -> Path:
    os.truncate(data(folder), 100)
    return external(folder)


# 3xx: tensors inside the model
def _bomb(*dims: int) -> Callable[[onnx.ModelProto], None]:
    """A terabyte that the file does not carry."""

    def change(proto: onnx.ModelProto) -> None:
        del weight_of(proto).dims[:]
        weight_of(proto).dims.extend(dims)
        weight_of(proto).ClearField("raw_data")

    return change


on_proto(304, "dimensions-that-overflow", UnsafeModelError, lambda p: weight_of(p).dims.extend([2**40, 2**40]))
on_proto(305, "dimensions-that-wrap-to-nothing", UnsafeModelError, lambda p: weight_of(p).dims.extend([2**32, 2**32]))
on_proto(313, "bomb-of-zeros", UnsafeModelError, _bomb(2**31, 2**31))
on_proto(314, "bomb-below-the-limit", MalformedModelError, _bomb(2**19, 2**18))
on_proto(317, "size-of-six-thousand-digits", UnsupportedModelError, lambda p: weight_of(p).dims.extend([2**62] * 300))


def _graph(number: int, name: str, text: str) -> None:
    """A harmless graph whose nodes would cost too much."""
    graph = f"g (float[N,4,H,W] x) => (float[N,4,H,W] y) {{ {text} }}"
    attempt(number, name, HANDLED)(lambda folder: write(folder, model(graph)))


def _doubled(count: int) -> str:
    return " ".join(f"a{i + 1} = Add (a{i}, a{i})" for i in range(count))


# Constant nodes that would make a terabyte when folded: left for the runtime.
_graph(315, "bomb-of-expansion", """size = Constant <value_ints = [1048576, 1048576]> () huge = ConstantOfShape (size)
    one = ReduceMax <keepdims = 0> (huge) y = Mul (x, one)""")  # fmt: skip
# A walk that follows every path would not end.
_graph(424, "one-body-shared-many-times-over", f"a0 = Add (x, x) {_doubled(40)} y = Relu (a40)")
_graph(425, "constants-shared-many-times-over", f"a0 = Constant <value_float=1.0> () {_doubled(60)} y = Mul (x, a60)")


# 4xx: graphs
def _attribute(number: int, name: str, key: str, value: object) -> None:
    on_proto(number, name, HANDLED, lambda p: p.graph.node[0].attribute.append(make.make_attribute(key, value)))


def _constant(name: str, **fields: object) -> Callable[[onnx.ModelProto], None]:
    """Scales the output by a Constant whose attribute is not what its name says, in front of a Gemm's bias."""

    def change(proto: onnx.ModelProto) -> None:
        proto.graph.node[0].output[0] = "z"
        proto.graph.node.add(op_type="Constant", output=["k"]).attribute.add(name=name, **fields)
        proto.graph.node.add(op_type="Mul", input=["z", "k"], output=["s"])
        proto.graph.node.add(op_type="Add", input=["s", "k"], output=["y"])

    return change


def _sync(outputs: list[str], **attributes: object) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        node = make.make_node("MMCVSyncBatchNorm", ["x", *"abcd"], outputs, domain="mmcv", **attributes)
        proto.graph.node.append(node)
        proto.opset_import.add(domain="mmcv", version=1)
        ones = np.ones(64, np.float32)
        proto.graph.initializer.extend(onnx.numpy_helper.from_array(ones, name) for name in "abcd")

    return change


ESCAPE = "\x1b]0;owned\x07\x1b[2J"
on_proto(414, "terminal-commands-in-a-name", MalformedModelError, lambda p: p.graph.node[0].input.append(ESCAPE))
_attribute(415, "attribute-not-a-number", "alpha", float("nan"))
_attribute(416, "attribute-infinite", "beta", float("inf"))
_attribute(417, "huge-attribute-string", "note", "n" * 10**7)
_attribute(418, "attribute-of-another-type", "transB", "yes")
# Found by fuzzing, each once with another exception than ours, or more than one line.
on_proto(426, "constant-that-is-no-tensor", HANDLED, _constant("value", type=2, i=1))
on_proto(427, "constant-of-another-type", HANDLED, _constant("value_ints", type=2, i=1))
on_proto(428, "group-that-is-a-list", HANDLED, _sync(["o"], group=[1, 2], group_size=[2]))
on_proto(429, "sync-batch-norm-without-outputs", HANDLED, _sync([], training_mode=0))
on_proto(432, "terminal-commands-for-onnxruntime-to-repeat", HANDLED,
    lambda p: p.graph.node.add(op_type=ESCAPE, name="\r\n\x1b[2J", input=["x"], output=["o"]))  # fmt: skip


def _deep(levels: int, graph: bytes) -> bytes:
    """Wrapped from the inside out: protobuf could not write this."""
    for _ in range(levels):
        graph = field(1, field(4, b"If") + field(5, field(6, graph)))
    return graph


def _type(levels: int) -> bytes:
    """Sequences of sequences of sequences."""
    kind = b""
    for _ in range(levels):
        kind = field(4, field(1, kind))
    return field(11, field(1, b"x") + field(2, kind))


# Every level of the second is long enough to be searched for tensors; two bytes a node of the last.
GRAPHS = {
    (420, "subgraphs-ten-thousand-deep", UnsafeModelError, "CVE-2025-4565"): lambda: _deep(10_000, b""),
    (421, "subgraphs-deep-and-long", UnsafeModelError, "CVE-2025-4565"): lambda: _deep(1000, field(2, b"g" * 10_000)),
    (422, "types-in-types", MalformedModelError, "CVE-2025-4565, CVE-2026-0994"): lambda: _type(10_000),
    (423, "many-empty-nodes", UnsafeModelError, ""): lambda: field(1, b"") * 300_000,
}
for (_number, _name, _verdict, _source), _build in GRAPHS.items():
    attempt(_number, _name, _verdict, _source)(
        lambda folder, build=_build: write(folder, b"\x08\x08" + field(8, b"\x10\x11") + field(7, build()))
    )

# 5xx: bytes that are no model, or hardly one
MALFORMED: dict[tuple[int, str], bytes] = {
    (501, "name-that-is-no-text"): example().SerializeToString().replace(b"Gemm", b"\xff\xfe\xfd\xfc"),
    (502, "empty"): b"",
    (503, "text"): b"this is not a model",
    (505, "length-of-eleven-digits"): b"\x08\x08\x3a" + b"\xff" * 10 + b"\x01",
    (506, "length-past-the-end"): b"\x08\x08\x3a" + varint(2**62) + b"abc",
    (507, "length-that-wraps"): b"\x08\x08\x3a" + varint(2**64 - 2) + b"abc" * 10_000,
    (508, "tensor-longer-than-its-graph"): b"\x08\x08" + field(7, b"\x2a" + varint(2**20) + bytes(10_000)),
    (510, "graph-twice"): example().SerializeToString() + field(7, example().graph.SerializeToString()),
    (511, "group-fields"): b"\x0b" * 20_000 + b"\x0c" * 20_000,
    (518, "bytes-behind-the-model"): example().SerializeToString() + struct.pack("<Q", 7),
}
for (_number, _name), _content in MALFORMED.items():
    attempt(_number, _name, MalformedModelError)(functools.partial(write, proto=_content))


@attempt(504, "zip-archive", MalformedModelError, "CVE-2024-5187")
def archive(folder: Path) -> Path:
    """Nothing is ever unpacked."""
    with zipfile.ZipFile(folder / "model.onnx", "w") as file:
        file.writestr("../../secret", "overwritten")
    return folder / "model.onnx"


def _as_model(number: int, name: str, verdict: Verdict, make_file: Callable[[Path], object]) -> None:
    def build(folder: Path) -> Path:
        make_file(folder / "model.onnx")
        return folder / "model.onnx"

    attempt(number, name, verdict)(build)


_as_model(512, "pipe-as-model", UnsafeModelError, os.mkfifo)
_as_model(513, "device-as-model", UnsafeModelError, lambda path: path.symlink_to("/dev/zero"))
_as_model(514, "folder-as-model", MalformedModelError, Path.mkdir)
_as_model(515, "missing-model", MissingFileError, lambda path: None)


@attempt(516, "endless-hole", UnsafeModelError)
def hole(folder: Path) -> Path:
    """A terabyte that takes no room on the disk."""
    path = write(folder, example())
    os.truncate(path, 2**40)
    return path


@attempt(517, "hole-in-the-data", HANDLED)
def hole_in_the_data(folder: Path) -> Path:
    """Zeros that take no room are data as any other."""
    (folder / "data").touch()
    os.truncate(folder / "data", WEIGHT.nbytes)
    return external(folder)
