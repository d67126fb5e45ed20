"""Attempts 5xx: bytes that are no model, or hardly one."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import onnx
import onnx.helper
import onnx.numpy_helper

from bnexport.errors import MalformedModelError, MissingFileError, UnsafeModelError
from bnexport.model_io.wire import field, varint
from tests.malicious.attempts.base import (
    ATTEMPTS,
    HANDLED,
    WEIGHT,
    Attempt,
    attempt,
    data,
    example,
    external,
    outside,
    write,
)


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
