"""Weights scaled in blocks: one rounding, what a type can hold, and how much memory it takes."""

from __future__ import annotations

import contextlib
import io
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from bnexport.errors import MalformedModelError
from bnexport.folding import fold, scaled_tensor
from bnexport.folding.scaled_tensor import ScaledTensor, blocks, check_scaled, scale_small, weighted_sums
from bnexport.graph.nodes import FLOAT_TYPES, Refused
from bnexport.model_io import ContainedTensor, load, save
from tests.support.onnx_text import batch_norm, model, parameters

VIEWS = {
    "rows": ((7, 5, 3), (7, 1, 1)), "columns": ((7, 5, 3), (1, 5, 1)), "one-group": ((1, 7, 15), (1, 7, 1)),
    "groups-and-columns": ((3, 4, 2, 5), (3, 1, 2, 1)), "scalar": ((1,), (1,)), "empty": ((0, 5), (1, 5)),
    "long-rows": ((3, 1000), (3, 1)),
}  # fmt: skip


@pytest.fixture(params=[16, 1 << 18])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(scaled_tensor, "_BLOCK", request.param)
    return int(request.param)


def external(tmp_path: Path, weight: np.ndarray) -> ContainedTensor:
    """The array as a tensor in a data file, behind another one."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 17}, name="g")
    for name, array in (("other", np.arange(999.0)), ("w", weight)):
        graph.register_initializer(ir.Value(name=name, const_value=ir.tensor(array, name=name)))
    save(ir.Model(graph, ir_version=8), tmp_path / "m.onnx", external_data=True)
    tensor = load(tmp_path / "m.onnx").graph.initializers["w"].const_value
    assert isinstance(tensor, ContainedTensor) or weight.nbytes < 2048  # smaller ones are in the model
    return tensor


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("case", VIEWS)
@pytest.mark.parametrize("name", FLOAT_TYPES)
def test_one_rounding(name: str, case: str, tmp_path: Path) -> None:
    view, broad = VIEWS[case]
    generator = np.random.default_rng(0)
    weight = generator.standard_normal(view).astype(FLOAT_TYPES[name])
    factor = generator.standard_normal(broad)
    expected = (weight.astype(np.float64) * factor).astype(FLOAT_TYPES[name])
    for base in (ir.tensor(weight), external(tmp_path, weight)):
        tensor, file = ScaledTensor(base, factor, view), io.BytesIO()
        assert (tensor.dtype, tuple(tensor.shape)) == (ir.DataType.from_numpy(weight.dtype), view)
        tensor.tofile(file)
        small = scale_small(base, factor, view)
        assert (small.dtype, small.shape, tensor.nbytes) == (weight.dtype, weight.shape, weight.nbytes)
        for got in (tensor.numpy().tobytes(), tensor.tobytes(), file.getvalue(), small.tobytes()):
            assert got == expected.tobytes()


@pytest.mark.parametrize("case", VIEWS)
def test_blocks_cover_everything_in_order(case: str, block: int) -> None:
    view, _ = VIEWS[case]
    weight = np.arange(float(np.prod(view))).reshape(view)
    pieces = list(blocks(weight, view))
    assert all(piece.size <= block for _, piece in pieces)
    np.testing.assert_array_equal(np.concatenate([piece.reshape(-1) for _, piece in pieces]), weight.reshape(-1))
    for index, piece in pieces:
        np.testing.assert_array_equal(weight[index], piece)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("kept", [(0,), (1,), (0, 2), ()])
def test_weighted_sums(kept: tuple[int, ...]) -> None:
    generator = np.random.default_rng(2)
    weight, factor = generator.standard_normal((6, 5, 7)).astype(np.float32), generator.standard_normal((6, 1, 7))
    others = tuple(axis for axis in range(3) if axis not in kept)
    terms = weight.astype(np.float64) * factor
    total, magnitude = weighted_sums(weight, factor, weight.shape, kept)
    np.testing.assert_allclose(total, terms.sum(axis=others), rtol=0, atol=1e-13)
    np.testing.assert_allclose(magnitude, np.abs(terms).sum(axis=others), rtol=1e-13)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("place", [(0, 0), (39, 29), (17, 11)])
def test_one_bad_element_of_a_file(place: tuple[int, int], tmp_path: Path) -> None:
    """It is found wherever it lies, block by block."""
    weight = np.ones((40, 30), np.float16)
    weight[place] = 60000.0
    base = external(tmp_path, weight)
    check_scaled(base, np.full((40, 1), 1.0), (40, 30))
    with pytest.raises(Refused) as caught:
        check_scaled(base, np.full((40, 1), 2.0), (40, 30))
    assert caught.value.code == "overflow"


def test_a_file_that_becomes_shorter_while_it_is_read() -> None:
    with pytest.raises(MalformedModelError, match="'w': its file ends 5 bytes too early"):
        scaled_tensor._read_into(io.BytesIO(b"abc"), memoryview(bytearray(8)), "w")


ROUNDED = np.array([[1.0], [1e-40]])
TINY = np.array([[1e-20], [1e-40]])


@pytest.mark.parametrize(
    ("name", "value", "factor", "code"),
    [
        ("float16", 60000.0, 2.0, "overflow"), ("bfloat16", 3e38, 2.0, "overflow"), ("float32", 3e38, 2.0, "overflow"),
        ("float16", 6.2e-5, 0.5, "underflow"), ("float32", 1.2e-38, 0.5, "underflow"), ("float32", np.inf, 0.5, "not-finite"),
        ("float16", 60000.0, 1.0, None), ("float16", 6.2e-5, 1.0, None), ("float16", 0.0, 1e-30, None), ("float16", 1.0, 0.0, None),
        # A tiny element of a slice may round to zero: its error is below that of the largest one.
        ("float16", [[1.0, 6e-8]] * 2, 0.1, None),
        # A channel at 1e-78 beside one at 1 is nothing; alone it would be the whole layer.
        ("float32", [[1.0], [1e-38]], ROUNDED, None),
        ("float32", [[1e-38], [1e-38]], TINY, "underflow"),
        ("float16", [[1.0], [1.0]], TINY, "underflow"),
    ],
)  # fmt: skip
def test_what_a_type_can_hold(name: str, value: Any, factor: Any, code: str | None) -> None:
    """Found by a pass of its own, or while the elements are scaled."""
    weight = np.asarray(value if isinstance(value, list) else np.full((2, 2), value)).astype(FLOAT_TYPES[name])
    factors = np.broadcast_to(factor, (2, 1))
    tensor = ScaledTensor(ir.tensor(weight), factors, weight.shape, checked=False)
    for found in (
        lambda: check_scaled(weight, factors, weight.shape),
        lambda: scale_small(ir.tensor(weight), factors, weight.shape),
        tensor.tobytes,
        lambda: tensor.tofile(io.BytesIO()),
    ):
        with pytest.raises(Refused) if code else contextlib.nullcontext() as caught:
            found()
        assert code is None or caught.value.code == code


@pytest.mark.parametrize("direction", ["backward", "forward"])
def test_memory_of_a_whole_fold(direction: str, tmp_path: Path) -> None:
    """A model with 64 MiB of external weights goes through `fold` in a fraction of that."""
    nodes = {"backward": "z = Gemm (x, w) y = Norm (z, p:4096)", "forward": "z = Norm (x, p:4096) y = Gemm (z, w)"}[
        direction
    ]
    weights = {"w": np.ones((4096, 4096), np.float32)}
    source = ir.from_proto(model(f"g (float[N,4096] x) => (float[N,4096] y) {{ {nodes} }}", values=weights))
    save(source, tmp_path / "source.onnx", external_data=True)
    del source, weights
    tracemalloc.start()
    result = fold(tmp_path / "source.onnx", tmp_path / "target.onnx", verify=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result.report.folded
    assert peak < 24 << 20, f"{peak >> 20} MiB"
    weight = load(tmp_path / "target.onnx").graph.initializers["w"].const_value.numpy()
    of = parameters(batch_norm("p", 4096))
    scale = (of["p_s"] / np.sqrt(of["p_v"].astype(np.float64) + np.float64(np.float32(1e-5)))).astype(np.float32)
    expected = scale.reshape(1, -1) if direction == "backward" else scale.reshape(-1, 1)
    np.testing.assert_array_equal(weight, np.broadcast_to(expected, weight.shape))


def two_gemms(tmp_path: Path, largest: float) -> Path:
    """Two Gemms with batch norms, 128 KiB of external weights each; the first weight holds `largest`."""
    values = {name: np.ones((256, 128), np.float32) for name in "wv"}
    values["w"][200, 100] = largest
    values |= {"four": np.full(128, 4, np.float32), "one": np.ones(128, np.float32)}
    norm = "BatchNormalization <epsilon = 0.0>"
    nodes = f"a = Gemm (x, w) y = {norm} (a, four, b:128, m:128, one) c = Gemm (x, v) z = {norm} (c, four, b, m, one)"
    text = f"g (float[N,256] x) => (float[N,128] y, float[N,128] z) {{ {nodes} }}"
    save(ir.from_proto(model(text, values=values)), tmp_path / "source.onnx", external_data=True)
    return tmp_path / "source.onnx"


def test_a_weight_that_turns_out_too_large_while_it_is_written(tmp_path: Path) -> None:
    """The fold is done again without this site, and what was written is gone."""
    source = two_gemms(tmp_path, 3e38)
    result = fold(source, tmp_path / "target.onnx")
    assert result.report.verification.passed
    assert [site.outcome for site in result.report.sites] == ["kept", "folded"]
    assert {refusal.code for refusal in result.report.sites[0].refusals} >= {"overflow"}
    assert result.report.sites == fold(source).report.sites
    folded = load(tmp_path / "target.onnx").graph.initializers
    assert folded["w"].const_value.numpy().max() == np.float32(3e38)
    assert (folded["v"].const_value.numpy() == 4).all()
    names = {"source.onnx", "source.onnx.data", "target.onnx", "target.onnx.data"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_each_weight_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, read = two_gemms(tmp_path, 1.0), []
    real = scaled_tensor._read_into

    def counted(file, buffer, name):
        read.append((name, len(buffer)))
        real(file, buffer, name)

    monkeypatch.setattr(scaled_tensor, "_read_into", counted)
    assert len(fold(source, tmp_path / "target.onnx", verify=False).report.folded) == 2
    assert sorted(read) == [("v", 256 * 128 * 4), ("w", 256 * 128 * 4)]
