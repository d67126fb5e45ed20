"""Attempts on a tool that opens model files, numbered, each with its verdict.

An attempt writes files into a folder of its own, `victim/`, and returns the model to open. Beside that
folder lies `secret`, which no attempt may read. The verdict is the class of the refusal, or HANDLED where
the file is odd and harmless. A number is never used twice; a new finding becomes a new attempt.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
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


@dataclasses.dataclass(frozen=True)
class Attempt:
    number: int
    name: str
    verdict: Verdict
    build: Callable[[Path], Path]
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


def external(
    folder: Path, location: str = "data", offset: str | None = "0", length: str | None = None, **more: str
) -> Path:
    """The example with its weight outside."""
    proto = example()
    outside(proto.graph.initializer[0], location, offset, str(WEIGHT.nbytes) if length is None else length, **more)
    return write(folder, proto)


def outside(
    tensor: TensorProto, location: str, offset: str | None = "0", length: str | None = None, **more: str
) -> None:
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": offset, "length": length, **more}.items():
        if value is not None:
            tensor.external_data.add(key=key, value=value)


def data(folder: Path, name: str = "data") -> Path:
    path = folder / name
    path.write_bytes(WEIGHT.tobytes())
    return path


def attempt(
    number: int, name: str, verdict: Verdict, source: str = ""
) -> Callable[[Callable[[Path], Path]], Callable[[Path], Path]]:
    def register(build: Callable[[Path], Path]) -> Callable[[Path], Path]:
        ATTEMPTS.append(Attempt(number, name, verdict, build, source))
        return build

    return register


def on_proto(
    number: int, name: str, verdict: Verdict, change: Callable[[onnx.ModelProto], object], source: str = ""
) -> None:
    """An attempt that is a change of the example."""

    def build(folder: Path) -> Path:
        proto = example()
        change(proto)
        return write(folder, proto)

    ATTEMPTS.append(Attempt(number, name, verdict, build, source))


def on_location(number: int, name: str, location: str, source: str = "", **fields: str) -> None:
    """An attempt that is a location, or other entries, of external data."""

    def build(folder: Path) -> Path:
        data(folder)
        (folder / "sub").mkdir()
        return external(folder, location, **fields)

    ATTEMPTS.append(Attempt(number, name, UnsafeModelError, build, source))


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


@attempt(120, "symbolic-link", UnsafeModelError, "CVE-2026-34447")
def symbolic_link(folder: Path) -> Path:
    (folder / "data").symlink_to(folder.parent / "secret")
    return external(folder)


@attempt(121, "symbolic-link-inside", UnsafeModelError, "CVE-2026-34447")
def symbolic_link_inside(folder: Path) -> Path:
    data(folder, "real")
    (folder / "data").symlink_to("real")
    return external(folder)


@attempt(122, "symbolic-link-as-parent", UnsafeModelError, "CVE-2026-27489")
def symbolic_parent(folder: Path) -> Path:
    (folder / "sub").symlink_to(folder.parent)
    return external(folder, "sub/secret")


@attempt(123, "chain-of-symbolic-links", UnsafeModelError, "CVE-2026-27489")
def symbolic_chain(folder: Path) -> Path:
    (folder / "one").symlink_to("two")
    (folder / "two").symlink_to(folder.parent)
    return external(folder, "one/secret")


@attempt(124, "circle-of-symbolic-links", UnsafeModelError)
def symbolic_circle(folder: Path) -> Path:
    (folder / "data").symlink_to("other")
    (folder / "other").symlink_to("data")
    return external(folder)


@attempt(125, "hard-link", UnsafeModelError, "CVE-2026-34446")
def hard_link(folder: Path) -> Path:
    os.link(folder.parent / "secret", folder / "data")
    return external(folder)


@attempt(126, "pipe", UnsafeModelError)
def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "data")
    return external(folder)


@attempt(127, "device", UnsafeModelError)
def device(folder: Path) -> Path:
    (folder / "data").symlink_to("/dev/zero")
    return external(folder)


@attempt(128, "missing", MalformedModelError)
def missing(folder: Path) -> Path:
    return external(folder)


@attempt(129, "in-a-constant", UnsafeModelError, "CVE-2024-27318")
def in_a_constant(folder: Path) -> Path:
    proto = example()
    tensor = onnx.numpy_helper.from_array(WEIGHT, "k")
    outside(tensor, "../secret")
    proto.graph.node.append(onnx.helper.make_node("Constant", [], ["k"], value=tensor))
    return write(folder, proto)


@attempt(130, "in-a-function", UnsafeModelError)
def in_a_function(folder: Path) -> Path:
    proto = example()
    tensor = onnx.numpy_helper.from_array(WEIGHT, "k")
    outside(tensor, "../secret")
    function = proto.functions.add(name="f", domain="local")
    function.output.append("k")
    function.opset_import.add(domain="", version=17)
    function.node.append(onnx.helper.make_node("Constant", [], ["k"], value=tensor))
    return write(folder, proto)


@attempt(131, "in-a-body", UnsafeModelError)
def in_a_body(folder: Path) -> Path:
    proto = example()
    tensor = onnx.numpy_helper.from_array(WEIGHT, "k")
    outside(tensor, "../secret")
    body = onnx.helper.make_graph([], "body", [], [onnx.helper.make_tensor_value_info("k", 1, None)], [tensor])
    proto.graph.node.append(onnx.helper.make_node("If", ["x"], ["o"], then_branch=body, else_branch=body))
    return write(folder, proto)


@attempt(132, "in-a-list-of-tensors", UnsafeModelError)
def in_a_list(folder: Path) -> Path:
    proto = example()
    tensor = onnx.numpy_helper.from_array(WEIGHT, "k")
    outside(tensor, "../secret")
    proto.graph.node[0].attribute.add(name="more", type=onnx.AttributeProto.TENSORS, tensors=[tensor])
    return write(folder, proto)


@attempt(134, "in-a-default-of-a-function", UnsafeModelError)
def in_a_default(folder: Path) -> Path:
    """What a call takes over where it gives no value of its own."""
    proto = example()
    tensor = onnx.numpy_helper.from_array(WEIGHT, "k")
    outside(tensor, "../secret")
    _functions(proto, {"a": "b"})
    proto.functions[0].attribute_proto.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(tensor)
    return write(folder, proto)


@attempt(133, "in-a-sparse-tensor", UnsupportedModelError)
def in_a_sparse_tensor(folder: Path) -> Path:
    proto = example()
    sparse = proto.graph.sparse_initializer.add(dims=[64, 32])
    sparse.values.CopyFrom(onnx.numpy_helper.from_array(WEIGHT, "k"))
    outside(sparse.values, "../secret")
    return write(folder, proto)


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


@attempt(220, "location-twice", UnsafeModelError, "CVE-2026-34445")
def location_twice(folder: Path) -> Path:
    data(folder)
    proto = example()
    outside(proto.graph.initializer[0], "data")
    proto.graph.initializer[0].external_data.add(key="location", value="../secret")
    return write(folder, proto)


@attempt(221, "data-inside-and-outside", MalformedModelError)
def inside_and_outside(folder: Path) -> Path:
    data(folder)
    proto = example()
    raw = proto.graph.initializer[0].raw_data
    outside(proto.graph.initializer[0], "data")
    proto.graph.initializer[0].raw_data = raw[:100]
    return write(folder, proto)


@attempt(222, "large-data-inside-and-outside", UnsafeModelError)
def large_inside_and_outside(folder: Path) -> Path:
    proto = example()
    raw = proto.graph.initializer[0].raw_data
    outside(proto.graph.initializer[0], "../secret")
    proto.graph.initializer[0].raw_data = raw
    return write(folder, proto)


@attempt(223, "file-cut-off", UnsafeModelError, "CVE-2024-27319")
def file_cut_off(folder: Path) -> Path:
    os.truncate(data(folder), 100)
    return external(folder)


@attempt(224, "strings-outside", UnsafeModelError)
def strings_outside(folder: Path) -> Path:
    data(folder)
    proto = example()
    proto.graph.initializer[0].data_type = TensorProto.STRING
    outside(proto.graph.initializer[0], "data")
    return write(folder, proto)


@attempt(225, "overlapping-data", HANDLED)
def overlapping(folder: Path) -> Path:
    """Two tensors may share bytes: each is read whole, and written on its own."""
    data(folder)
    proto = example()
    outside(proto.graph.initializer[0], "data")
    more = proto.graph.initializer.add()
    more.CopyFrom(proto.graph.initializer[0])
    more.name = "again"
    return write(folder, proto)


@attempt(226, "a-marker-of-ours", MalformedModelError)
def guessed_marker(folder: Path) -> Path:
    """A location that looks like those of tensors left in the model file; the secret part cannot be guessed."""
    return external(folder, "0" * 32 + ":0", offset=None, length="")


# 3xx: tensors inside the model
def _tensor(proto: onnx.ModelProto) -> TensorProto:
    return proto.graph.initializer[0]


on_proto(
    301, "too-little-data", MalformedModelError, lambda p: setattr(_tensor(p), "raw_data", b"1234"), "CVE-2024-27319"
)
on_proto(302, "too-much-data", MalformedModelError, lambda p: setattr(_tensor(p), "raw_data", bytes(WEIGHT.nbytes + 4)))
on_proto(303, "no-data", MalformedModelError, lambda p: _tensor(p).ClearField("raw_data"))
on_proto(304, "dimensions-that-overflow", UnsafeModelError, lambda p: _tensor(p).dims.extend([2**40, 2**40]))
on_proto(305, "dimensions-that-wrap-to-nothing", UnsafeModelError, lambda p: _tensor(p).dims.extend([2**32, 2**32]))
on_proto(306, "negative-dimension", MalformedModelError, lambda p: _tensor(p).dims.append(-1))
on_proto(307, "two-negative-dimensions", MalformedModelError, lambda p: _tensor(p).dims.extend([-1, -1]))
on_proto(308, "unknown-type", MalformedModelError, lambda p: setattr(_tensor(p), "data_type", 99))
on_proto(309, "no-type", MalformedModelError, lambda p: setattr(_tensor(p), "data_type", 0))
on_proto(310, "segment", UnsupportedModelError, lambda p: setattr(_tensor(p).segment, "end", 4))
on_proto(311, "floats-as-integers", MalformedModelError, lambda p: setattr(_tensor(p), "data_type", TensorProto.INT64))
on_proto(312, "sparse-initializer", UnsupportedModelError, lambda p: p.graph.sparse_initializer.add())
on_proto(313, "bomb-of-zeros", UnsafeModelError, lambda p: _bomb(p, [2**31, 2**31]))
on_proto(314, "bomb-below-the-limit", MalformedModelError, lambda p: _bomb(p, [2**19, 2**18]))


def _bomb(proto: onnx.ModelProto, dims: list[int]) -> None:
    """A terabyte that the file does not carry."""
    del _tensor(proto).dims[:]
    _tensor(proto).dims.extend(dims)
    _tensor(proto).ClearField("raw_data")


# Found by fuzzing.
on_proto(316, "more-dimensions-than-numpy", UnsupportedModelError, lambda p: _tensor(p).dims.extend([1] * 31))
on_proto(317, "size-of-six-thousand-digits", UnsupportedModelError, lambda p: _tensor(p).dims.extend([2**62] * 300))


@attempt(315, "bomb-of-expansion", HANDLED)
def expansion(folder: Path) -> Path:
    """Constant nodes that would make a terabyte when folded: left for the runtime."""
    proto = model(
        """g (float[N,4,H,W] x) => (float[N,4,H,W] y) {
            size = Constant <value_ints = [1048576, 1048576]> ()
            huge = ConstantOfShape (size)
            one = ReduceMax <keepdims = 0> (huge)
            y = Mul (x, one) }"""
    )
    return write(folder, proto)


# 4xx: graphs
def _cycle(proto: onnx.ModelProto) -> None:
    proto.graph.node.extend(
        [onnx.helper.make_node("Add", ["b", "x"], ["a"]), onnx.helper.make_node("Relu", ["a"], ["b"])]
    )


def _functions(proto: onnx.ModelProto, calls: dict[str, str]) -> None:
    for name, callee in calls.items():
        function = proto.functions.add(name=name, domain="local")
        function.input.append("i")
        function.output.append("o")
        function.opset_import.add(domain="local", version=1)
        function.node.add(op_type=callee, domain="local", input=["i"], output=["o"])


on_proto(401, "cycle", MalformedModelError, _cycle)
on_proto(402, "function-that-calls-itself", UnsafeModelError, lambda p: _functions(p, {"a": "a"}))
on_proto(403, "functions-in-a-circle", UnsafeModelError, lambda p: _functions(p, {"a": "b", "b": "c", "c": "a"}))
on_proto(
    404, "same-function-twice", MalformedModelError, lambda p: (_functions(p, {"a": "b"}), _functions(p, {"a": "b"}))
)
on_proto(405, "name-defined-twice", MalformedModelError, lambda p: p.graph.node.append(p.graph.node[0]))
on_proto(406, "initializer-twice", MalformedModelError, lambda p: p.graph.initializer.append(_tensor(p)))
on_proto(407, "undefined-input", MalformedModelError, lambda p: p.graph.node[0].input.append("nothing"))
on_proto(408, "undefined-output", MalformedModelError, lambda p: setattr(p.graph.output[0], "name", "nothing"))
on_proto(409, "no-opset", MalformedModelError, lambda p: p.ClearField("opset_import"))
on_proto(410, "training-info", UnsupportedModelError, lambda p: p.training_info.add())
on_proto(
    411,
    "attribute-twice",
    MalformedModelError,
    lambda p: p.graph.node[0].attribute.extend([onnx.helper.make_attribute("alpha", 1.0)] * 2),
)
on_proto(412, "endless-name", UnsafeModelError, lambda p: setattr(p.graph.node[0], "name", "n" * 10**6))
on_proto(413, "endless-operator", UnsafeModelError, lambda p: setattr(p.graph.node[0], "op_type", "n" * 10**6))
on_proto(
    414,
    "terminal-commands-in-a-name",
    MalformedModelError,
    lambda p: p.graph.node[0].input.append("\x1b]0;owned\x07\x1b[2J"),
)
on_proto(
    415,
    "attribute-not-a-number",
    HANDLED,
    lambda p: p.graph.node[0].attribute.append(onnx.helper.make_attribute("alpha", float("nan"))),
)
on_proto(
    416,
    "attribute-infinite",
    HANDLED,
    lambda p: p.graph.node[0].attribute.append(onnx.helper.make_attribute("beta", float("inf"))),
)
on_proto(
    417,
    "huge-attribute-string",
    HANDLED,
    lambda p: p.graph.node[0].attribute.append(onnx.helper.make_attribute("note", "n" * 10**7)),
)
on_proto(
    418,
    "attribute-of-another-type",
    HANDLED,
    lambda p: p.graph.node[0].attribute.append(onnx.helper.make_attribute("transB", "yes")),
)


# Found by fuzzing, each once with another exception than ours, or more than one line.
def _constant(proto: onnx.ModelProto, name: str, **fields: object) -> None:
    """Scales the output by a Constant whose attribute is not what its name says, in front of a Gemm's bias."""
    proto.graph.node[0].output[0] = "z"
    proto.graph.node.add(op_type="Constant", output=["k"]).attribute.add(name=name, **fields)
    proto.graph.node.add(op_type="Mul", input=["z", "k"], output=["s"])
    proto.graph.node.add(op_type="Add", input=["s", "k"], output=["y"])


def _sync(proto: onnx.ModelProto, outputs: list[str], **attributes: object) -> None:
    node = onnx.helper.make_node("MMCVSyncBatchNorm", ["x", *"abcd"], outputs, domain="mmcv", **attributes)
    proto.graph.node.append(node)
    proto.opset_import.add(domain="mmcv", version=1)
    for name in "abcd":
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(64, np.float32), name))


def _without_opset(proto: onnx.ModelProto) -> None:
    proto.ir_version = 1
    proto.ClearField("opset_import")


on_proto(426, "constant-that-is-no-tensor", HANDLED, lambda p: _constant(p, "value", type=2, i=1))
on_proto(427, "constant-of-another-type", HANDLED, lambda p: _constant(p, "value_ints", type=2, i=1))
on_proto(428, "group-that-is-a-list", HANDLED, lambda p: _sync(p, ["o"], group=[1, 2], group_size=[2]))
on_proto(429, "sync-batch-norm-without-outputs", HANDLED, lambda p: _sync(p, [], training_mode=0))
on_proto(430, "node-without-outputs", MalformedModelError, lambda p: p.graph.node.add(op_type="Relu", input=["x"]))
on_proto(431, "old-model-without-opset", MalformedModelError, _without_opset)
on_proto(
    432,
    "terminal-commands-for-onnxruntime-to-repeat",
    HANDLED,
    lambda p: p.graph.node.add(op_type="\x1b]0;owned\x07\x1b[2J", name="\r\n\x1b[2J", input=["x"], output=["o"]),
)


@attempt(420, "subgraphs-ten-thousand-deep", UnsafeModelError, "CVE-2025-4565")
def deep(folder: Path) -> Path:
    """Wrapped from the inside out: protobuf could not write this."""
    graph = b""
    for _ in range(10_000):
        graph = field(1, field(4, b"If") + field(5, field(6, graph)))
    return write(folder, b"\x08\x08" + field(7, graph))


@attempt(421, "subgraphs-deep-and-long", UnsafeModelError, "CVE-2025-4565")
def deep_and_long(folder: Path) -> Path:
    """Every level is long enough to be searched for tensors."""
    graph = field(2, b"g" * 10_000)
    for _ in range(1_000):
        graph = field(1, field(4, b"If") + field(5, field(6, graph)))
    return write(folder, b"\x08\x08" + field(7, graph))


@attempt(422, "types-in-types", MalformedModelError, "CVE-2025-4565, CVE-2026-0994")
def deep_types(folder: Path) -> Path:
    """Sequences of sequences of sequences."""
    kind = b""
    for _ in range(10_000):
        kind = field(4, field(1, kind))
    return write(folder, b"\x08\x08" + field(7, field(11, field(1, b"x") + field(2, kind))))


@attempt(423, "many-empty-nodes", UnsafeModelError)
def empty_nodes(folder: Path) -> Path:
    """Two bytes a node."""
    graph = field(1, b"") * 300_000
    return write(folder, b"\x08\x08" + field(8, b"\x10\x11") + field(7, graph))


@attempt(424, "one-body-shared-many-times-over", HANDLED)
def doubling(folder: Path) -> Path:
    """Add of a value to itself, forty times: a walk that follows every path would not end."""
    proto = model(
        "g (float[N,4] x) => (float[N,4] y) { a0 = Add (x, x)\n"
        + "\n".join(f"a{i + 1} = Add (a{i}, a{i})" for i in range(40))
        + "\ny = Relu (a40) }"
    )
    return write(folder, proto)


@attempt(425, "constants-shared-many-times-over", HANDLED)
def constant_doubling(folder: Path) -> Path:
    proto = model(
        "g (float[N,4] x) => (float[N,4] y) { a0 = Constant <value_float = 1.0> ()\n"
        + "\n".join(f"a{i + 1} = Add (a{i}, a{i})" for i in range(60))
        + "\ny = Mul (x, a60) }"
    )
    return write(folder, proto)


# 5xx: bytes


@attempt(501, "name-that-is-no-text", MalformedModelError)
def no_text(folder: Path) -> Path:
    return write(folder, example().SerializeToString().replace(b"Gemm", b"\xff\xfe\xfd\xfc"))


@attempt(502, "empty", MalformedModelError)
def empty(folder: Path) -> Path:
    return write(folder, b"")


@attempt(503, "text", MalformedModelError)
def text(folder: Path) -> Path:
    return write(folder, b"this is not a model")


@attempt(504, "zip-archive", MalformedModelError, "CVE-2024-5187")
def archive(folder: Path) -> Path:
    """Nothing is ever unpacked."""
    import zipfile

    with zipfile.ZipFile(folder / "model.onnx", "w") as file:
        file.writestr("../../secret", "overwritten")
    return folder / "model.onnx"


@attempt(505, "length-of-eleven-digits", MalformedModelError)
def eleven_digits(folder: Path) -> Path:
    return write(folder, b"\x08\x08\x3a" + b"\xff" * 10 + b"\x01")


@attempt(506, "length-past-the-end", MalformedModelError)
def length_past_the_end(folder: Path) -> Path:
    return write(folder, b"\x08\x08\x3a" + varint(2**62) + b"abc")


@attempt(507, "length-that-wraps", MalformedModelError)
def length_that_wraps(folder: Path) -> Path:
    return write(folder, b"\x08\x08\x3a" + varint(2**64 - 2) + b"abc" * 10_000)


@attempt(508, "tensor-longer-than-its-graph", MalformedModelError)
def tensor_too_long(folder: Path) -> Path:
    tensor = b"\x2a" + varint(2**20) + bytes(10_000)
    return write(folder, b"\x08\x08" + field(7, tensor))


@attempt(509, "raw-data-twice", MalformedModelError)
def raw_twice(folder: Path) -> Path:
    tensor = example().graph.initializer[0].SerializeToString() + field(9, bytes(8))
    proto = example()
    del proto.graph.initializer[:]
    graph = proto.graph.SerializeToString() + field(5, tensor)
    proto.ClearField("graph")
    return write(folder, proto.SerializeToString() + field(7, graph))


@attempt(510, "graph-twice", MalformedModelError)
def graph_twice(folder: Path) -> Path:
    proto = example()
    return write(folder, proto.SerializeToString() + field(7, proto.graph.SerializeToString()))


@attempt(511, "group-fields", MalformedModelError)
def groups(folder: Path) -> Path:
    return write(folder, b"\x0b" * 20_000 + b"\x0c" * 20_000)


@attempt(512, "pipe-as-model", UnsafeModelError)
def pipe_as_model(folder: Path) -> Path:
    os.mkfifo(folder / "model.onnx")
    return folder / "model.onnx"


@attempt(513, "device-as-model", UnsafeModelError)
def device_as_model(folder: Path) -> Path:
    (folder / "model.onnx").symlink_to("/dev/zero")
    return folder / "model.onnx"


@attempt(514, "folder-as-model", MalformedModelError)
def folder_as_model(folder: Path) -> Path:
    (folder / "model.onnx").mkdir()
    return folder / "model.onnx"


@attempt(515, "missing-model", MissingFileError)
def missing_model(folder: Path) -> Path:
    return folder / "model.onnx"


@attempt(516, "endless-hole", UnsafeModelError)
def hole(folder: Path) -> Path:
    """A terabyte that takes no room on the disk."""
    path = write(folder, example())
    os.truncate(path, 2**40)
    return path


@attempt(517, "hole-in-the-data", HANDLED)
def hole_in_the_data(folder: Path) -> Path:
    """Zeros that take no room are data as any other."""
    with open(folder / "data", "wb") as file:
        file.truncate(WEIGHT.nbytes)
    return external(folder)


@attempt(518, "bytes-behind-the-model", MalformedModelError)
def bytes_behind(folder: Path) -> Path:
    return write(folder, example().SerializeToString() + struct.pack("<Q", 7))


def _no_text(number: int, name: str, before: bytes) -> None:
    """A text of the example replaced by bytes that are no UTF-8; the parser does not mind."""

    def build(folder: Path) -> Path:
        proto = example()
        proto.producer_name, proto.producer_version, proto.doc_string = "PRODUCER", "VERSIONS", "DOCUMENT"
        proto.graph.doc_string, proto.graph.node[0].doc_string = "GRAPHDOC", "NODE_DOC"
        proto.graph.initializer[0].doc_string = "TENSORDC"
        proto.metadata_props.add(key="KEY_TEXT", value="VAL_TEXT")
        proto.graph.node[0].attribute.append(onnx.helper.make_attribute("alpha", 1.0, "ATTR_DOC"))
        outside(proto.graph.initializer[0], "LOCATION", length=str(WEIGHT.nbytes))
        data(folder, "LOCATION")
        content = proto.SerializeToString()
        assert content.count(before) == 1
        return write(folder, content.replace(before, b"\xff\xfe" + before[2:]))

    ATTEMPTS.append(Attempt(number, name, MalformedModelError, build))


for _index, _text in enumerate(
    (
        *("PRODUCER", "VERSIONS", "DOCUMENT", "GRAPHDOC", "NODE_DOC"),
        *("TENSORDC", "KEY_TEXT", "VAL_TEXT", "ATTR_DOC", "LOCATION"),
    )
):
    _no_text(520 + _index, f"no-text-in-{_text.lower()}", _text.encode())
