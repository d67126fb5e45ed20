"""Attempts 5xx: bytes that are no model, or hardly one."""

from __future__ import annotations

import functools
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
    import zipfile

    with zipfile.ZipFile(folder / "model.onnx", "w") as file:
        file.writestr("../../secret", "overwritten")
    return folder / "model.onnx"


@attempt(509, "raw-data-twice", MalformedModelError)
def raw_twice(folder: Path) -> Path:
    tensor = example().graph.initializer[0].SerializeToString() + field(9, bytes(8))
    proto = example()
    del proto.graph.initializer[:]
    graph = proto.graph.SerializeToString() + field(5, tensor)
    proto.ClearField("graph")
    return write(folder, proto.SerializeToString() + field(7, graph))


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
