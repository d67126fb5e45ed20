"""Traps in numbers: what is rounded once, what cancels, and dead channels."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from bnexport import tolerances
from bnexport.folding import fold
from bnexport.runtime.engine import Serialised
from bnexport.verification.oracle import PreciseModel
from tests.support.onnx_text import assert_refused, batch_norm, make_inputs, model, operators_of, parameters

EPSILON = np.float64(np.float32(1e-5))


def tensors(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


@pytest.mark.parametrize(
    ("kind", "dtype", "statistics"),
    [
        ("float", np.float32, np.float32),
        ("bfloat16", ml_dtypes.bfloat16, ml_dtypes.bfloat16),  # nothing runs it here
        ("float16", np.float16, np.float32),
        ("double", np.float64, np.float64),  # ONNX Runtime has no such Conv
    ],
)
def test_one_rounding(kind: str, dtype: type, statistics: type) -> None:
    """Three maps in a row: each weight and bias is the nearest to the exact one, in the type that it had."""
    body = f"""g ({kind}[N,6,H,W] x) => ({kind}[N,8,A,B] y) {{ t = Conv (x, w, c) u = Norm (t, p:8) v = Norm (u, q)
        y = Mul (v, d) }}"""
    shapes = {"w": (8, 6, 1, 1), "c": (8,), "d": (8, 1, 1), **batch_norm("p", 8), **batch_norm("q", 8)}
    values = {
        name: value.astype(statistics if name[0] in "pq" else dtype) for name, value in parameters(shapes).items()
    }
    result = fold(model(body, values=values, opset=22 if kind == "bfloat16" else 17))
    assert operators_of(result) == ["Conv"]
    assert kind != "double" or result.report.verification.engine.startswith("onnx.reference ")
    wide = {name: value.astype(np.float64) for name, value in values.items()}
    scale, bias = np.ones(8), wide["c"]
    for norm in "pq":
        k = wide[f"{norm}_s"] / np.sqrt(wide[f"{norm}_v"] + EPSILON)
        scale, bias = scale * k, (bias - wide[f"{norm}_m"]) * k + wide[f"{norm}_b"]
    scale, bias = scale * wide["d"].reshape(8), bias * wide["d"].reshape(8)
    got = tensors(result.model)
    assert {array.dtype for array in got.values()} == {np.dtype(dtype)}
    for name, expected in (("w", wide["w"] * scale.reshape(8, 1, 1, 1)), ("c", bias)):
        rounded = expected.astype(dtype).astype(np.float64)
        np.testing.assert_allclose(got[name].astype(np.float64), rounded, rtol=1e-13 * (kind == "double"), atol=0)


def test_large_mean_does_not_cancel() -> None:
    """b' = (b - mean) k + beta, exact to one rounding where b and mean agree to many digits."""
    numbers = {"c": 12345.678, "p_m": 12345.67, "p_s": 1.0, "p_b": 1e-3, "p_v": 3.0}
    values = {name: np.full(1, number, np.float32) for name, number in numbers.items()}
    proto = model(
        "g (float[N,6,H,W] x) => (float[N,1,A,B] y) { z = Conv (x, w:1.6.1.1, c) y = Norm (z, p) }", values=values
    )
    # The bound of `verify` is made for networks; this one's rounding errors are those of its mean.
    c, mean, scale, beta, var = (np.float64(value[0]) for value in values.values())
    expected = (c - mean) / np.sqrt(var + EPSILON) * scale + beta
    assert tensors(fold(proto, verify=False).model)["c"] == np.float32(expected)


# Layers with 16 outputs; the sizes of x, and of w.
LAYERS = {
    "conv": ("z = Conv <pads = [1, 1, 1, 1]> (x, w)", "N,32,5,5", (16, 32, 3, 3)),
    "transposed-conv": ("z = ConvTranspose (x, w)", "N,32,5,5", (32, 16, 3, 3)),
    "gemm": ("z = Gemm (x, w)", "N,32", (32, 16)),
    "gemm-alpha": ("z = Gemm <transB = 1, alpha = 4.0> (x, w)", "N,32", (16, 32)),
    "large": ("z = Conv <dilations = [5, 5], pads = [5, 5, 5, 5]> (x, w)", "N,512,5,5", (16, 512, 3, 3)),
}


def with_dead_channels(layer: str, *, scale: float = 1e-6, shift: float = -0.2) -> onnx.ModelProto:
    """A half network whose training left channels 3 and 11 with scales near 0: their output is their shift."""
    text, sizes, shape = LAYERS[layer]
    generator = np.random.default_rng(5)
    values = {"w": generator.standard_normal(shape) * 0.02, "p_m": generator.standard_normal(16) * 0.1}
    values |= {"p_s": generator.uniform(0.5, 2, 16), "p_b": generator.standard_normal(16)}
    values["p_v"] = generator.uniform(0.5, 2, 16)
    values["p_s"][[3, 11]], values["p_b"][[3, 11]] = scale, shift
    body = f"g (float16[{sizes}] x) => (float16[N,16{',A,B' * (len(shape) == 4)}] y) {{ {text} y = Norm (z, p) }}"
    return model(body, values={name: value.astype(np.float16) for name, value in values.items()})


@pytest.mark.parametrize("layer", LAYERS)
def test_dead_channels_fold(layer: str, tmp_path: Path) -> None:
    """Some weights become zero; what they made is below the rounding error of the output."""
    proto = with_dead_channels(layer)
    result = fold(proto, tmp_path / "out.onnx")
    assert [site.outcome for site in result.report.sites] == ["folded"]
    assert result.report.verification.passed
    wide = {"x": np.float64(np.float16(tolerances.ACTIVATION)) * np.sign(make_inputs(proto)["x"]).astype(np.float64)}
    before, after = (
        PreciseModel(Serialised(each.SerializeToString()), 30.0).run([wide], ["y"])[0][0]
        for each in (proto, result.model)
    )
    # One rounding of the bias, and what the inputs' bound gives the weights' errors.
    assert 0 < np.abs(after - before)[:, [3, 11]].max() <= 2 * 2.0**-11 * 0.2


@pytest.mark.parametrize("shift", [0.0, 1e-3])
def test_dead_channels_stay_where_an_output_would_show(shift: float) -> None:
    assert_refused(with_dead_channels("conv", shift=shift), "underflow")


def test_dead_channels_stay_when_they_are_inputs() -> None:
    """A scale that goes forward meets every output, whose shifts say nothing about it."""
    numbers = {"p_b": 0, "p_m": 0, "p_v": 1, "p_s": np.where(np.arange(16) == 3, 1e-6, 1)}
    values = {name: np.broadcast_to(number, 16).astype(np.float16) for name, number in numbers.items()}
    values["w"] = np.full((4, 16, 3, 3), 0.02, np.float16)
    body = "g (float16[N,16,5,5] x) => (float16[N,4,A,B] y) { t = Norm (x, p) y = Conv (t, w) }"
    assert_refused(model(body, values=values), "underflow")
