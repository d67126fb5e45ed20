"""Weights scaled in blocks: one rounding, what a type can hold, and how much memory it takes."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path

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
    "rows": ((7, 5, 3), (7, 1, 1)),
    "columns": ((7, 5, 3), (1, 5, 1)),
    "one-group": ((1, 7, 15), (1, 7, 1)),
    "groups-and-columns": ((3, 4, 2, 5), (3, 1, 2, 1)),
    "scalar": ((1,), (1,)),
    "empty": ((0, 5), (1, 5)),
    "long-rows": ((3, 1000), (3, 1)),
}


def scaled(weight: np.ndarray, factor: np.ndarray) -> np.ndarray:
    return ScaledTensor(ir.tensor(weight), factor, weight.shape).numpy()


@pytest.fixture(params=[16, 1 << 18])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(scaled_tensor, "_BLOCK", request.param)
    return int(request.param)


def external(tmp_path: Path, weight: np.ndarray) -> ContainedTensor:
    """The array as a tensor in a data file, behind another one."""
    values = [
        ir.Value(name=name, const_value=ir.tensor(array, name=name), type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
                 shape=ir.Shape(array.shape))
        for name, array in (("other", np.arange(999.0)), ("w", weight))
    ]  # fmt: skip
    graph = ir.Graph([], [], nodes=[], initializers=values, opset_imports={"": 17}, name="g")
    save(ir.Model(graph, ir_version=8), tmp_path / "m.onnx", external_data=True)
    tensor = load(tmp_path / "m.onnx").graph.initializers["w"].const_value
    return tensor


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("case", VIEWS)
@pytest.mark.parametrize("name", FLOAT_TYPES)
def test_one_rounding(name: str, case: str) -> None:
    view, broad = VIEWS[case]
    generator = np.random.default_rng(0)
    weight = generator.standard_normal(view).astype(FLOAT_TYPES[name])
    factor = generator.standard_normal(broad)
    expected = (weight.astype(np.float64) * factor).astype(FLOAT_TYPES[name])
    tensor = ScaledTensor(ir.tensor(weight), factor, view)
    assert (tensor.dtype, tuple(tensor.shape), tensor.nbytes) == (
        ir.DataType.from_numpy(weight.dtype),
        view,
        weight.nbytes,
    )
    np.testing.assert_array_equal(tensor.numpy().view(np.uint8), expected.view(np.uint8))
    assert tensor.tobytes() == expected.tobytes()
    file = io.BytesIO()
    tensor.tofile(file)
    assert file.getvalue() == expected.tobytes()
    small = scale_small(ir.tensor(weight), factor, view)
    assert (small.dtype, small.shape, small.tobytes()) == (weight.dtype, weight.shape, expected.tobytes())


def test_a_file_that_becomes_shorter_while_it_is_read() -> None:
    with pytest.raises(MalformedModelError, match="'w': its file ends 5 bytes too early"):
        scaled_tensor._read_into(io.BytesIO(b"abc"), memoryview(bytearray(8)), "w")


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("name", FLOAT_TYPES)
def test_out_of_a_file(name: str, tmp_path: Path) -> None:
    weight = np.random.default_rng(1).standard_normal((40, 30)).astype(FLOAT_TYPES[name])
    base = external(tmp_path, weight)
    assert isinstance(base, ContainedTensor)
    factor = np.linspace(-2, 2, 30).reshape(1, 30)
    expected = (weight.astype(np.float64) * factor).astype(weight.dtype)
    assert ScaledTensor(base, factor, (40, 30)).tobytes() == expected.tobytes()


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


def test_memory_stays_small(tmp_path: Path) -> None:
    """Scanning, summing and writing 64 MiB from a file takes a few blocks."""
    base = external(tmp_path, np.ones((4096, 4096), np.float32))
    factor = np.linspace(1, 2, 4096)
    tensor = ScaledTensor(base, factor.reshape(-1, 1), (4096, 4096))
    tracemalloc.start()
    check_scaled(base, factor.reshape(-1, 1), (4096, 4096))
    weighted_sums(base, factor.reshape(1, -1), (4096, 4096), (0,))
    with open(tmp_path / "out", "wb") as file:
        tensor.tofile(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20
    assert (tmp_path / "out").stat().st_size == 64 << 20


@pytest.mark.parametrize(
    ("name", "value", "factor", "code"),
    [
        ("float16", 60000.0, 2.0, "overflow"),
        ("bfloat16", 3e38, 2.0, "overflow"),
        ("float32", 3e38, 2.0, "overflow"),
        ("float16", 6.2e-5, 0.5, "underflow"),
        ("float32", 1.2e-38, 0.5, "underflow"),
        ("float32", np.inf, 0.5, "not-finite"),
        ("float16", 60000.0, 1.0, None),
        ("float16", 6.2e-5, 1.0, None),
        ("float16", 0.0, 1e-30, None),
        ("float16", 1.0, 0.0, None),
    ],
)
def test_what_a_type_can_hold(name: str, value: float, factor: float, code: str | None) -> None:
    """Found by a pass of its own, or while the elements are scaled."""
    weight, factors = np.full((2, 2), value).astype(FLOAT_TYPES[name]), np.full((2, 1), factor)
    tensor = ScaledTensor(ir.tensor(weight), factors, weight.shape, checked=False)
    for found in (
        lambda: check_scaled(weight, factors, weight.shape),
        lambda: scale_small(ir.tensor(weight), factors, weight.shape),
        tensor.tobytes,
        lambda: tensor.tofile(io.BytesIO()),
    ):
        if code is None:
            found()
            continue
        with pytest.raises(Refused) as caught:
            found()
        assert caught.value.code == code


def test_small_elements_beside_a_large_one() -> None:
    """A tiny element of a slice may round to zero: its error is below that of the largest one."""
    weight = np.array([[1.0, 6e-8]], np.float16)
    factor = np.array([[0.1]])
    check_scaled(weight, factor, weight.shape)
    error = np.abs(scaled(weight, factor).astype(np.float64) - weight.astype(np.float64) * factor)
    assert error.max() <= 2.0**-11 * 0.1


def test_dead_channels_of_float32() -> None:
    """A channel at 1e-78 beside one at 1 is nothing; alone it would be the whole layer."""
    factor = np.array([[1.0], [1e-40]])
    check_scaled(np.array([[1.0], [1e-38]], np.float32), factor, (2, 1))
    for weight, dtype in (([[1e-38], [1e-38]], np.float32), ([[1.0], [1.0]], np.float16)):
        with pytest.raises(Refused):
            check_scaled(np.array(weight, dtype), np.array([[1e-20], [1e-40]]), (2, 1))


@pytest.mark.parametrize("direction", ["backward", "forward"])
def test_memory_of_a_whole_fold(direction: str, tmp_path: Path) -> None:
    """A model with 64 MiB of external weights goes through `fold` in a fraction of that."""
    norm = "BatchNormalization ({}, p_s, p_b, p_m, p_v)"
    nodes = {
        "backward": f"z = Gemm (x, w)\n y = {norm.format('z')}",
        "forward": f"z = {norm.format('x')}\n y = Gemm (z, w)",
    }[direction]
    proto = model(
        f"g (float[N,4096] x) => (float[N,4096] y) {{ {nodes} }}",
        batch_norm("p", 4096),
        values={"w": np.ones((4096, 4096), np.float32)},
    )
    save(ir.from_proto(proto), tmp_path / "source.onnx", external_data=True)
    del proto
    tracemalloc.start()
    result = fold(tmp_path / "source.onnx", tmp_path / "target.onnx", verify=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result.report.folded
    assert peak < 24 << 20, f"{peak >> 20} MiB"
    weight = load(tmp_path / "target.onnx").graph.initializers["w"].const_value.numpy()
    parameters_of = parameters(batch_norm("p", 4096))
    scale = parameters_of["p_s"] / np.sqrt(parameters_of["p_v"].astype(np.float64) + np.float64(np.float32(1e-5)))
    expected = scale.reshape(1, -1) if direction == "backward" else scale.reshape(-1, 1)
    np.testing.assert_array_equal(weight, np.broadcast_to(expected.astype(np.float32), weight.shape))


def two_gemms(tmp_path: Path, largest: float) -> Path:
    """Two Gemms with batch norms, 128 KiB of external weights each; the first weight holds `largest`."""
    weights = {name: np.ones((256, 128), np.float32) for name in "wv"}
    weights["w"][200, 100] = largest
    norm = "BatchNormalization <epsilon: float = 0.0>"
    proto = model(
        f"""g (float[N,256] x) => (float[N,128] y, float[N,128] z) {{
            a = Gemm (x, w)
            y = {norm} (a, four, b, m, one)
            c = Gemm (x, v)
            z = {norm} (c, four, b, m, one)
        }}""",
        {"b": (128,), "m": (128,)},
        values={**weights, "four": np.full(128, 4, np.float32), "one": np.ones(128, np.float32)},
    )
    save(ir.from_proto(proto), tmp_path / "source.onnx", external_data=True)
    return tmp_path / "source.onnx"


def test_a_weight_that_turns_out_too_large_while_it_is_written(tmp_path: Path) -> None:
    """The fold is done again without this site, and what was written is gone."""
    source = two_gemms(tmp_path, 3e38)
    result = fold(source, tmp_path / "target.onnx")
    assert result.report.verification is not None and result.report.verification.passed
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
    monkeypatch.setattr(
        scaled_tensor,
        "_read_into",
        lambda file, buffer, name: (read.append((name, len(buffer))), real(file, buffer, name)),
    )
    assert len(fold(source, tmp_path / "target.onnx", verify=False).report.folded) == 2
    assert sorted(read) == [("v", 256 * 128 * 4), ("w", 256 * 128 * 4)]
