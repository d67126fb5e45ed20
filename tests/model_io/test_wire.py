"""The walk over a model's bytes, field by field; whole models and hostile ones are in tests/malicious."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

from bnexport.errors import MalformedModelError, UnsafeModelError
from bnexport.model_io import Limits, wire

PLAIN = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [])).SerializeToString()


def test_fields_of_every_type_are_walked() -> None:
    """A number, 8 bytes, a text and 4 bytes, with numbers that no message of ONNX has."""
    known = wire.field(99, b"text")
    for wire_type, value in ((0, b"\x96\x01"), (1, bytes(8)), (5, bytes(4))):
        data = PLAIN + wire.varint(98 << 3 | wire_type) + value + known
        assert wire.whole(data, Limits()).data == data
        with pytest.raises(MalformedModelError, match=r"longer than what it stands in|ends inside"):
            wire.whole(data[: -len(known) - 1], Limits())
    for wire_type in (3, 4, 6, 7):
        with pytest.raises(MalformedModelError, match=f"byte {len(PLAIN)} is no field of a protobuf message"):
            wire.whole(PLAIN + wire.varint(98 << 3 | wire_type) + bytes(8), Limits())


def test_raw_data_comes_once() -> None:
    tensor = onnx.numpy_helper.from_array(np.arange(600.0), "t").SerializeToString()  # long enough to be entered
    for more in (b"", wire.field(9, bytes(24))):
        data = PLAIN + wire.field(7, wire.field(5, tensor + more))
        if not more:
            assert wire.whole(data, Limits()).data == data
            continue
        with pytest.raises(MalformedModelError, match="a tensor has raw_data twice, again at byte"):
            wire.whole(data, Limits())


LIKE_TAGS = b"\x12" * 8
NUMBERS = {
    "float_data": (onnx.TensorProto.FLOAT, np.frombuffer(LIKE_TAGS, "<f4")[0]),
    "double_data": (onnx.TensorProto.DOUBLE, np.frombuffer(LIKE_TAGS, "<f8")[0]),
    "int32_data": (onnx.TensorProto.INT32, LIKE_TAGS[0]),
    "int64_data": (onnx.TensorProto.INT64, LIKE_TAGS[0]),
    "uint64_data": (onnx.TensorProto.UINT64, LIKE_TAGS[0]),
}


@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_count_as_no_texts(field: str) -> None:
    """Whatever their bytes look like."""
    kind, value = NUMBERS[field]
    tensor = onnx.TensorProto(name="t", dims=[5000], data_type=kind)
    getattr(tensor, field).extend([value] * 5000)
    data = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [tensor])).SerializeToString()
    assert wire.whole(data, Limits(elements=100)).data == data


def test_texts_at_their_limit() -> None:
    proto = onnx.ModelProto.FromString(PLAIN)
    proto.doc_string = "\0" * 1000
    data = proto.SerializeToString()
    tags = sum(byte & 7 == 2 for byte in data)
    assert wire.whole(data, Limits(elements=tags)).data == data
    with pytest.raises(UnsafeModelError, match=f"more than {tags - 1} texts and messages"):
        wire.whole(data, Limits(elements=tags - 1))
