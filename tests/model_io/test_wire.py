"""The walk over a model's bytes, field by field; whole models and hostile ones are in tests/malicious."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

from bnexport.errors import MalformedModelError, UnsafeModelError
from bnexport.model_io import Limits, load, wire

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
NUMBERS = {"float": np.frombuffer(LIKE_TAGS, "<f4")[0], "double": np.frombuffer(LIKE_TAGS, "<f8")[0]}


@pytest.mark.parametrize("kind", ["float", "double", "int32", "int64", "uint64"])
def test_numbers_count_as_no_texts(kind: str) -> None:
    """Whatever their bytes look like."""
    tensor = onnx.TensorProto(name="t", dims=[5000], data_type=onnx.TensorProto.DataType.Value(kind.upper()))
    getattr(tensor, f"{kind}_data").extend([NUMBERS.get(kind, LIKE_TAGS[0])] * 5000)
    data = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [tensor])).SerializeToString()
    assert wire.whole(data, Limits(elements=100)).data == data


@pytest.mark.parametrize("kind", [onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE])
def test_packed_floats_stay_in_the_file_as_raw_data_does(kind: int, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(5000)
    tensor = onnx.helper.make_tensor("t", kind, [50, 100], values)
    assert not tensor.HasField("raw_data")
    path = tmp_path / "model.onnx"
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [tensor]), ir_version=8), path)
    with path.open("rb") as file:
        cut = wire.cut(file.fileno(), path.stat().st_size, Limits(structure_bytes=1000))
        ((offset, length),) = cut.places.values()
        file.seek(offset)
        assert file.read(length) == onnx.numpy_helper.to_array(tensor).tobytes()
    read = load(path).graph.initializers["t"].const_value
    assert read is not None
    assert np.array_equal(read.numpy(), onnx.numpy_helper.to_array(tensor))


def test_packed_floats_of_another_type_are_copied(tmp_path: Path) -> None:
    """Complex numbers are pairs of floats; a type that follows its numbers is not known in time."""
    numbers = wire.field(4, np.zeros(5000, "<f4").tobytes())
    name, dims = wire.field(8, b"t"), wire.varint(1 << 3) + wire.varint(5000)
    for kind, tensor in (
        ("complex", wire.varint(2 << 3) + wire.varint(14) + numbers),
        ("late", numbers + wire.varint(2 << 3) + wire.varint(1)),
    ):
        path = tmp_path / kind
        path.write_bytes(PLAIN + wire.field(7, wire.field(5, dims + name + tensor)))
        with path.open("rb") as file:
            cut = wire.cut(file.fileno(), path.stat().st_size, Limits())
        assert (cut.data, cut.places) == (path.read_bytes(), {})


@pytest.mark.parametrize("more", ["packed", "single", "raw_data", "type"])
def test_packed_floats_come_once(more: str, tmp_path: Path) -> None:
    kind = wire.varint(2 << 3) + wire.varint(1)
    pieces = {
        "packed": wire.field(4, bytes(8)),
        "single": wire.varint(4 << 3 | 5) + bytes(4),
        "raw_data": wire.field(9, bytes(8)),
        "type": wire.varint(2 << 3) + wire.varint(14),
    }
    tensor = wire.field(8, b"t") + kind + wire.field(4, bytes(20000)) + pieces[more]
    path = tmp_path / "model.onnx"
    path.write_bytes(PLAIN + wire.field(7, wire.field(5, tensor)))
    with path.open("rb") as file, pytest.raises(MalformedModelError, match=r"raw_data twice|in several pieces"):
        wire.cut(file.fileno(), path.stat().st_size, Limits())


def test_texts_at_their_limit() -> None:
    proto = onnx.ModelProto.FromString(PLAIN)
    proto.doc_string = "\0" * 1000
    data = proto.SerializeToString()
    tags = sum(byte & 7 == 2 for byte in data)
    assert wire.whole(data, Limits(elements=tags)).data == data
    with pytest.raises(UnsafeModelError, match=f"more than {tags - 1} texts and messages"):
        wire.whole(data, Limits(elements=tags - 1))
