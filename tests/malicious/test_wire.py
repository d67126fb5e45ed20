"""Models without their large tensors: the same model as protobuf reads, whatever the bytes are.

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

from bnexport.errors import BnexportError, MalformedModelError
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
