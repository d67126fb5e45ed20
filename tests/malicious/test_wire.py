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
from bnexport.folding import fold
from bnexport.model_io import Limits, load, save, to_proto, wire
from tests.fuzz.mutations import mutate_bytes
from tests.support.onnx_text import batch_norm, model

_CASES = int(os.environ.get("BNEXPORT_FUZZ_CASES", "1500"))


def rich() -> onnx.ModelProto:
    """Every place where a tensor can be: initializers, Constant, lists, bodies, functions."""
    proto = model(
        """g (float[N,6,H,W] x) => (float[N,8,A,B] y) {
            z = Conv (x, w)
            t = BatchNormalization (z, p_s, p_b, p_m, p_v)
            k = Constant <value = float[4] {1.0, 2.0, 3.0, 4.0}> ()
            y = Relu (t) }""",
        {"w": (8, 6, 3, 3), **batch_norm("p", 8)},
    )
    tensor = onnx.numpy_helper.from_array(np.arange(300, dtype=np.float32), "c")
    body = onnx.helper.make_graph([], "b", [], [onnx.helper.make_tensor_value_info("c", 1, [300])], [tensor])
    proto.graph.node.append(onnx.helper.make_node("If", ["x"], ["o"], then_branch=body, else_branch=body))
    function = proto.functions.add(name="f", domain="local")
    function.output.append("c")
    function.opset_import.add(domain="", version=17)
    function.node.append(onnx.helper.make_node("Constant", [], ["c"], value=tensor))
    return proto


def put_back(cut: wire.Cut, data: bytes) -> onnx.ModelProto:
    """The model with the tensors that were left out."""
    proto = onnx.ModelProto.FromString(cut.data)
    found = 0
    for tensor in _tensors(proto):
        location = tensor.external_data[-1].value if tensor.external_data else ""
        if location in cut.places:
            offset, length = cut.places[location]
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = data[offset : offset + length]
            found += 1
    assert found == len(cut.places)
    return proto


def _tensors(proto: onnx.ModelProto) -> list[onnx.TensorProto]:
    found: list[onnx.TensorProto] = []

    def nodes(several: object) -> None:
        for node in several:  # type: ignore[attr-defined]
            for attribute in node.attribute:
                found.extend([attribute.t] if attribute.HasField("t") else [])
                found.extend(attribute.tensors)
                for graph in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                    found.extend(graph.initializer)
                    nodes(graph.node)

    found.extend(proto.graph.initializer)
    nodes(proto.graph.node)
    for function in proto.functions:
        nodes(function.node)
    return found


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
    for tensor in _tensors(expected):
        if len(packed := np.array(tensor.float_data, "<f4").tobytes()) >= smallest:
            tensor.ClearField("float_data")
            tensor.raw_data = packed
    assert put_back(cut, data) == expected
    sizes = [len(tensor.raw_data) for tensor in _tensors(expected)]
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
        if any(sum(entry.key == "location" for entry in tensor.external_data) > 1 for tensor in _tensors(own)):
            merged += 1  # A tensor in two pieces, which protobuf joins; refused by the check of its entries.
            continue
        assert put_back(cut, bad).SerializeToString(deterministic=True) == known.SerializeToString(deterministic=True)
        accepted += 1
    assert min(accepted, refused) > _CASES // 20
    assert merged < _CASES // 20


def test_mutations_are_refused_or_folded(tmp_path: Path) -> None:
    """Through the door and the engine: one error of ours, or a model that loads again."""
    generator, data = random.Random(11), rich().SerializeToString()
    outcomes = {"folded": 0, "refused": 0}
    for _ in range(_CASES // 5):
        (tmp_path / "m.onnx").write_bytes(mutate_bytes(data, generator))
        try:
            fold(tmp_path / "m.onnx", tmp_path / "out.onnx", verify=False, overwrite=True)
        except BnexportError as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
            continue
        load(tmp_path / "out.onnx")
        outcomes["folded"] += 1
    assert min(outcomes.values()) > _CASES // 100


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


def test_large_tensors_stay_in_the_file(tmp_path: Path) -> None:
    """Read when they are asked for, written from where they are, and gone when the file changes."""
    proto = model("g (float[N,64] x) => (float[N,64] y) { y = MatMul (x, w) }", {"w": (64, 64)})
    onnx.save(proto, tmp_path / "m.onnx")
    loaded = load(tmp_path / "m.onnx")
    assert to_proto(loaded) == to_proto(load(tmp_path / "m.onnx"))
    save(loaded, tmp_path / "copy.onnx")
    assert sorted(os.listdir(tmp_path)) == ["copy.onnx", "m.onnx"]
    kept = onnx.numpy_helper.to_array(onnx.load(tmp_path / "copy.onnx").graph.initializer[0])
    np.testing.assert_array_equal(kept, onnx.numpy_helper.to_array(proto.graph.initializer[0]))
    (tmp_path / "m.onnx").write_bytes(b"another")
    with pytest.raises(BnexportError, match="changed since"):
        loaded.graph.initializers["w"].const_value.numpy()  # type: ignore[union-attr]
