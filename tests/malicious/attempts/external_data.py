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
    HANDLED,
    WEIGHT,
    add_functions,
    attempt,
    data,
    example,
    external,
    on_location,
    outside,
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
    add_functions(proto, {"a": "b"})
    proto.functions[0].attribute_proto.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(tensor)
    return write(folder, proto)


@attempt(133, "in-a-sparse-tensor", UnsupportedModelError)
def in_a_sparseweight_of(folder: Path) -> Path:
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


@attempt(222, "large-data-inside-and-outside", MalformedModelError)
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
