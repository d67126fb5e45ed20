"""The walk over a model's bytes: models without their large tensors are the same models, whatever the bytes are.

BNEXPORT_FUZZ_CASES sets the number of mutated files.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import google.protobuf.message
import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

from bnexport.errors import BnexportError, MalformedModelError, UnsafeModelError
from bnexport.model_io import Limits, load, wire
from bnexport.model_io.validate import tensors
from tests.fuzz.mutations import mutate_bytes
from tests.support.onnx_text import model

_CASES = int(os.environ.get("BNEXPORT_FUZZ_CASES", "1500"))


def rich() -> onnx.ModelProto:
    """Every place where a tensor can be: initializers, Constant, lists, bodies, functions."""
    proto = model(
        """g (float[N,6,H,W] x) => (float[N,8,A,B] y) { z = Conv (x, w:8.6.3.3) t = Norm (z, p:8)
            k = Constant <value = float[4] {1.0, 2.0, 3.0, 4.0}> () y = Relu (t) }"""
    )
    tensor = onnx.numpy_helper.from_array(np.arange(300, dtype=np.float32), "c")
    body = onnx.helper.make_graph([], "b", [], [onnx.helper.make_tensor_value_info("c", 1, [300])], [tensor])
    proto.graph.node.append(onnx.helper.make_node("If", ["x"], ["o"], then_branch=body, else_branch=body))
    constant = onnx.helper.make_node("Constant", [], ["c"], value=tensor)
    opsets = [onnx.helper.make_opsetid("", 17)]
    proto.functions.append(onnx.helper.make_function("local", "f", [], ["c"], [constant], opsets))
    return proto


def put_back(cut: wire.Cut, data: bytes) -> onnx.ModelProto:
    """The model with the tensors that were left out."""
    proto = onnx.ModelProto.FromString(cut.data)
    left_out = [each for each in tensors(proto) if each.external_data and each.external_data[-1].value in cut.places]
    for tensor in left_out:
        offset, length = cut.places[tensor.external_data[-1].value]
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        tensor.raw_data = data[offset : offset + length]
    assert len(left_out) == len(cut.places)
    return proto


def cut_file(path: Path, data: bytes, smallest: int, **options: int) -> wire.Cut:
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return wire.cut(descriptor, len(data), Limits(), smallest, **options)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("smallest", [1, 8, 100, 1000, 1 << 20])
def test_nothing_but_numbers_is_left_out(tmp_path: Path, smallest: int) -> None:
    data = rich().SerializeToString()
    cut = cut_file(tmp_path / "m", data, smallest)
    expected = rich()
    for tensor in tensors(expected):
        if len(packed := np.array(tensor.float_data, "<f4").tobytes()) >= smallest:
            tensor.ClearField("float_data")
            tensor.raw_data = packed
    assert put_back(cut, data) == expected
    sizes = [len(tensor.raw_data) for tensor in tensors(expected)]
    assert len(cut.places) == sum(size >= smallest for size in sizes)


@pytest.mark.parametrize("window", [10, 11, 17, 64])
def test_windows_of_any_size(tmp_path: Path, window: int) -> None:
    data = rich().SerializeToString()
    assert put_back(cut_file(tmp_path / "m", data, 64, window=window), data) == rich()


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**31, 2**63, 2**64 - 1])
def test_varint(tmp_path: Path, value: int) -> None:
    """A number in front of the graph is skipped whole, as protobuf skips a field that it does not know."""
    data = wire.varint(1000 << 3) + wire.varint(value) + rich().SerializeToString()
    cut = cut_file(tmp_path / "m", data, 64)
    known = onnx.ModelProto.FromString(data)
    assert put_back(cut, data) == known


def test_mutations_agree_with_protobuf(tmp_path: Path) -> None:
    """What is accepted is what protobuf reads; what protobuf refuses is refused."""
    generator, data = random.Random(7), rich().SerializeToString()
    accepted = refused = merged = 0
    for _ in range(_CASES):
        bad = mutate_bytes(data, generator)
        try:
            known = onnx.ModelProto.FromString(bad)
        except google.protobuf.message.DecodeError:
            known = None
        try:
            cut = cut_file(tmp_path / "m", bad, 64)
            own = onnx.ModelProto.FromString(cut.data)
        except (MalformedModelError, google.protobuf.message.DecodeError):
            refused += 1
            continue
        assert known is not None
        if any(sum(entry.key == "location" for entry in tensor.external_data) > 1 for tensor in tensors(own)):
            merged += 1  # A tensor in two pieces, which protobuf joins; refused by the check of its entries.
            continue
        assert put_back(cut, bad).SerializeToString(deterministic=True) == known.SerializeToString(deterministic=True)
        accepted += 1
    assert min(accepted, refused) > _CASES // 20
    assert merged < _CASES // 20


def test_cut_at_every_byte(tmp_path: Path) -> None:
    """Every prefix is refused in one line, or is a whole model."""
    data = rich().SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    for length in range(len(data) - 1, -1, -1):
        os.truncate(path, length)
        try:
            loaded = load(path)
        except BnexportError as error:
            assert "\n" not in str(error)
            continue
        assert len(loaded.graph) <= 6


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
