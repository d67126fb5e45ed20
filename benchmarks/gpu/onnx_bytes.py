"""Small ONNX models as bytes, without the onnx package: the few messages of onnx.proto that they need."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

TYPES = {"float32": 1, "float16": 10, "float64": 11}  # TensorProto.DataType
_FLOAT, _INT, _STRING = 1, 2, 3  # AttributeProto.AttributeType


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _block(field: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def tensor(name: str, values: np.ndarray) -> bytes:
    dims = b"".join(_integer(1, size) for size in values.shape)
    return dims + _integer(2, TYPES[str(values.dtype)]) + _block(8, name) + _block(9, values.tobytes())


def value(name: str, dtype: str, shape: Sequence[int]) -> bytes:
    dims = b"".join(_block(1, _integer(1, size)) for size in shape)
    return _block(1, name) + _block(2, _block(1, _integer(1, TYPES[dtype]) + _block(2, dims)))


def _attribute(name: str, value: Any) -> bytes:
    if isinstance(value, float):
        return _block(1, name) + _varint(2 << 3 | 5) + struct.pack("<f", value) + _integer(20, _FLOAT)
    if isinstance(value, int):
        return _block(1, name) + _integer(3, value) + _integer(20, _INT)
    return _block(1, name) + _block(4, value) + _integer(20, _STRING)


def node(
    op: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Mapping[str, Any], domain: str = ""
) -> bytes:
    fields = b"".join(_block(1, name) for name in inputs) + b"".join(_block(2, name) for name in outputs)
    fields += _block(3, f"{op} {outputs[0]}") + _block(4, op)
    return fields + b"".join(_block(5, _attribute(*item)) for item in attributes.items()) + _block(7, domain)


def model(
    nodes: Sequence[bytes], inputs: Sequence[bytes], outputs: Sequence[bytes], initializers: Sequence[bytes] = ()
) -> bytes:
    """A ModelProto of IR version 9 with opset 17 and version 1 of the domain mmcv."""
    graph = b"".join(_block(1, one) for one in nodes) + _block(2, "kit")
    for field, values in ((5, initializers), (11, inputs), (12, outputs)):
        graph += b"".join(_block(field, one) for one in values)
    opsets = b"".join(
        _block(8, _block(1, domain) + _integer(2, version)) for domain, version in (("", 17), ("mmcv", 1))
    )
    return _integer(1, 9) + _block(7, graph) + opsets
