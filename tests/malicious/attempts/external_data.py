"""Attempts 1xx and 2xx: where external data lies, and what is said about it."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx.helper
import onnx.numpy_helper
from onnx import TensorProto

from bnexport.errors import MalformedModelError, UnsafeModelError, UnsupportedModelError
from tests.malicious.attempts.base import (
    ATTEMPTS,
    HANDLED,
    WEIGHT,
    Attempt,
    add_functions,
    attempt,
    data,
    example,
    external,
    on_location,
    on_proto,
    outside,
    weight_of,
    write,
)

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

    ATTEMPTS.append(Attempt(number, name, UnsafeModelError, build, source))


_link(120, "symbolic-link", {"data": "../secret"}, source="CVE-2026-34447")
_link(121, "symbolic-link-inside", {"data": "real"}, source="CVE-2026-34447")
_link(122, "symbolic-link-as-parent", {"sub": ".."}, "sub/secret", "CVE-2026-27489")
_link(123, "chain-of-symbolic-links", {"one": "two", "two": ".."}, "one/secret", "CVE-2026-27489")
_link(124, "circle-of-symbolic-links", {"data": "other", "other": "data"})
_link(127, "device", {"data": "/dev/zero"})


@attempt(125, "hard-link", UnsafeModelError, "CVE-2026-34446")
def hard_link(folder: Path) -> Path:
    os.link(folder.parent / "secret", folder / "data")
    return external(folder)


@attempt(126, "pipe", UnsafeModelError)
def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "data")
    return external(folder)


attempt(128, "missing", MalformedModelError)(external)


def _secret() -> TensorProto:
    """A tensor whose data are the secret's."""
    tensor = onnx.numpy_helper.from_array(WEIGHT, "k")
    outside(tensor, "../secret")
    return tensor


def _function(proto: onnx.ModelProto) -> None:
    add_functions(proto, {"f": "g"})
    proto.functions[0].node.append(onnx.helper.make_node("Constant", [], ["k"], value=_secret()))


def _body(proto: onnx.ModelProto) -> None:
    body = onnx.helper.make_graph([], "body", [], [onnx.helper.make_tensor_value_info("k", 1, None)], [_secret()])
    proto.graph.node.append(onnx.helper.make_node("If", ["x"], ["o"], then_branch=body, else_branch=body))


def _default(proto: onnx.ModelProto) -> None:
    """What a call takes over where it gives no value of its own."""
    add_functions(proto, {"a": "b"})
    proto.functions[0].attribute_proto.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(_secret())


PLACES = {
    (129, "in-a-constant"): lambda p: p.graph.node.append(
        onnx.helper.make_node("Constant", [], ["k"], value=_secret())
    ),
    (130, "in-a-function"): _function,
    (131, "in-a-body"): _body,
    (132, "in-a-list-of-tensors"): lambda p: p.graph.node[0].attribute.add(
        name="more", type=onnx.AttributeProto.TENSORS, tensors=[_secret()]
    ),
    (134, "in-a-default-of-a-function"): _default,
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


@attempt(220, "location-twice", UnsafeModelError, "CVE-2026-34445")
def location_twice(folder: Path) -> Path:
    data(folder)
    proto = example()
    outside(weight_of(proto), "data")
    weight_of(proto).external_data.add(key="location", value="../secret")
    return write(folder, proto)


def _inside_and_outside(number: int, name: str, location: str, size: int | None) -> None:
    def build(folder: Path) -> Path:
        data(folder)
        proto = example()
        outside(weight_of(proto), location)
        weight_of(proto).raw_data = WEIGHT.tobytes()[:size]
        return write(folder, proto)

    ATTEMPTS.append(Attempt(number, name, MalformedModelError, build))


_inside_and_outside(221, "data-inside-and-outside", "data", 100)
_inside_and_outside(222, "large-data-inside-and-outside", "../secret", None)


@attempt(223, "file-cut-off", UnsafeModelError, "CVE-2024-27319")
def file_cut_off(folder: Path) -> Path:
    os.truncate(data(folder), 100)
    return external(folder)


@attempt(225, "overlapping-data", HANDLED)
def overlapping(folder: Path) -> Path:
    """Two tensors may share bytes: each is read whole, and written on its own."""
    data(folder)
    proto = example()
    outside(weight_of(proto), "data")
    more = proto.graph.initializer.add()
    more.CopyFrom(weight_of(proto))
    more.name = "again"
    return write(folder, proto)


@attempt(226, "a-marker-of-ours", MalformedModelError)
def guessed_marker(folder: Path) -> Path:
    """A location that looks like those of tensors left in the model file; the secret part cannot be guessed."""
    return external(folder, "0" * 32 + ":0", offset=None, length="")
