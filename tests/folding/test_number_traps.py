"""Traps in constants and numbers: expressions, overflow, lost bits, dead channels."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

import bnexport.errors
from bnexport import tolerances
from bnexport.folding import fold
from bnexport.model_io import to_proto
from bnexport.runtime.engine import Serialised
from bnexport.verification.oracle import PreciseModel
from tests.folding.conv_bn import BN, CONV, X4, conv_bn
from tests.support.onnx_text import (
    assert_near,
    assert_refused,
    batch_norm,
    exact,
    fold_and_check,
    make_inputs,
    model,
    operators,
    parameters,
)


def test_sparse_constant() -> None:
    norm = "k = Constant <value_float = 1.0> ()\n y = BatchNormalization (z, k, p_b, p_m, p_v)"
    proto = conv_bn(norm=norm)
    values = onnx.numpy_helper.from_array(np.array([1.0, 2.0], np.float32))
    places = onnx.numpy_helper.from_array(np.array([0, 5]))
    attribute = proto.graph.node[1].attribute[0]
    attribute.CopyFrom(onnx.helper.make_attribute("sparse_value", onnx.helper.make_sparse_tensor(values, places, [8])))
    with pytest.raises(bnexport.errors.UnsupportedModelError, match="sparse"):
        fold(proto)


def test_shared_operands_do_not_explode() -> None:
    """k = k + k, thirty times: each sum is looked at once."""
    nodes = "\n".join(f"k{index + 1} = Add (k{index}, k{index})" for index in range(30))
    norm = f"k0 = Constant <value = float[8] {{1, 1, 1, 1, 1, 1, 1, 1}}> ()\n {nodes}\n y = BatchNormalization (z, k30, p_b, p_m, p_v)"
    assert fold(conv_bn(norm=norm), max_scale=1e12, verify=False).report.folded


def test_quantized_weight_keeps_its_bytes() -> None:
    scale = np.abs(parameters({"p_s": (8,)})["p_s"])
    norm = "y = BatchNormalization (z, g, p_b, p_m, p_v)"
    values = {
        "q": np.random.default_rng(0).integers(-127, 128, (8, 6, 1, 1)).astype(np.int8),
        "d": np.float32(0.02),
        "g": scale,
    }
    proto = conv_bn("k = DequantizeLinear (q, d)\n z = Conv (x, k)", norm=norm, values=values, opset=21, ir_version=10)
    folded, _ = fold_and_check(proto)
    assert operators(folded) == ["DequantizeLinear", "Conv"]
    assert [attribute.name for attribute in folded.graph.node[0].attribute] == ["axis"]
    kept = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in folded.graph.initializer}
    np.testing.assert_array_equal(kept["q"], values["q"])


def test_quantized_weight_with_a_scale_for_each_channel() -> None:
    generator = np.random.default_rng(0)
    values = {
        "q": generator.integers(0, 255, (8, 6, 1, 1)).astype(np.uint8),
        "d": np.abs(generator.standard_normal(8)).astype(np.float32) + np.float32(0.01),
        "o": generator.integers(100, 150, 8).astype(np.uint8),
        "p_s": np.abs(parameters({"p_s": (8,)})["p_s"]),
    }
    nodes = "k = DequantizeLinear <axis=0> (q, d, o)\n z = Conv (x, k)"
    folded, _ = fold_and_check(conv_bn(nodes, values=values, opset=21, ir_version=10))
    assert operators(folded) == ["DequantizeLinear", "Conv"]
    kept = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in folded.graph.initializer}
    np.testing.assert_array_equal(kept["q"], values["q"])
    np.testing.assert_array_equal(kept["o"], values["o"])


def test_one_rounding() -> None:
    """Three maps in a row round once: every folded weight is the float32 nearest to the exact product."""
    body = f"""g ({X4}) => (float[N,8,A,B] y) {{ t = Conv (x, w)
        u = BatchNormalization (t, p_s, p_b, p_m, p_v)
        v = BatchNormalization (u, q_s, q_b, q_m, q_v)
        y = Mul (v, d) }}"""
    shapes = {"w": (8, 6, 1, 1), **batch_norm("p", 8), **batch_norm("q", 8), "d": (8, 1, 1)}
    values = {name: value.astype(np.float64) for name, value in parameters(shapes).items()}
    eps = np.float64(np.float32(1e-5))
    scale = (
        values["p_s"]
        / np.sqrt(values["p_v"] + eps)
        * (values["q_s"] / np.sqrt(values["q_v"] + eps))
        * values["d"].reshape(8)
    )
    folded, _ = fold_and_check(model(body, shapes))
    weight = onnx.numpy_helper.to_array(folded.graph.initializer[0])
    np.testing.assert_array_equal(weight, (values["w"] * scale.reshape(8, 1, 1, 1)).astype(np.float32))


def test_large_mean_does_not_cancel() -> None:
    """b' = (b - mean) k + beta, exact to one rounding where b and mean agree to many digits."""
    values = {
        "w": np.ones((1, 6, 1, 1), np.float32),
        "c": np.full(1, 12345.678, np.float32),
        "p_m": np.full(1, 12345.67, np.float32),
    }
    values |= {
        "p_s": np.ones(1, np.float32),
        "p_b": np.full(1, 1e-3, np.float32),
        "p_v": np.full(1, 3.0, np.float32),
    }
    proto = model(f"g ({X4}) => (float[N,1,A,B] y) {{ z = Conv (x, w, c)\n {BN} }}", values=values)
    # The bound of `verify` is made for networks; this one's rounding errors are those of its mean.
    folded = to_proto(fold(proto, verify=False).model)
    bias = next(onnx.numpy_helper.to_array(tensor) for tensor in folded.graph.initializer if tensor.name == "c")
    wide = {name: np.float64(value.reshape(-1)[0]) for name, value in values.items()}
    expected = (wide["c"] - wide["p_m"]) / np.sqrt(wide["p_v"] + np.float64(np.float32(1e-5))) * wide["p_s"] + wide[
        "p_b"
    ]
    assert bias[0] == np.float32(expected)


def test_bfloat16() -> None:
    """Nothing runs it here: the weights are compared with the product of the exact values, rounded once."""
    import ml_dtypes
    import onnx_ir as ir

    values = parameters({"w": (8, 6, 1, 1), "c": (8,), **batch_norm("p", 8)}, dtype=ml_dtypes.bfloat16)
    body = f"g (bfloat16[N,6,H,W] x) => (bfloat16[N,8,A,B] y) {{ z = Conv (x, w, c)\n {BN} }}"
    proto = model(body, opset=22)
    for name, value in values.items():
        proto.graph.initializer.append(ir.serde.serialize_tensor(ir.tensor(value, name=name)))
    result = fold(proto)
    assert operators(to_proto(result.model)) == ["Conv"]
    exact_values = {name: value.astype(np.float64) for name, value in values.items()}
    scale = exact_values["p_s"] / np.sqrt(exact_values["p_v"] + np.float64(np.float32(1e-5)))
    initializers = ir.from_proto(result.model).graph.initializers
    weight = exact_values["w"] * scale.reshape(8, 1, 1, 1)
    bias = (exact_values["c"] - exact_values["p_m"]) * scale + exact_values["p_b"]
    for name, expected in (("w", weight), ("c", bias)):
        got = initializers[name].const_value.numpy()
        assert got.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(got, expected.astype(ml_dtypes.bfloat16))


def test_half_data_beside_single_statistics() -> None:
    """Opset 15 and up: the weights stay half, and are rounded once from the exact product."""
    half = parameters({"w": (8, 6, 1, 1)}, dtype="float16")
    single = parameters(batch_norm("p", 8), seed=1)
    proto = model(f"g (float16[N,6,H,W] x) => (float16[N,8,A,B] y) {{ {CONV}\n {BN} }}", values={**half, **single})
    folded, _ = fold_and_check(proto, oracle=False)
    kept = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in folded.graph.initializer}
    scale = single["p_s"].astype(np.float64) / np.sqrt(single["p_v"] + np.float64(np.float32(1e-5)))
    expected = half["w"].astype(np.float64) * scale.reshape(8, 1, 1, 1)
    np.testing.assert_array_equal(kept["w"], expected.astype(np.float16))
    assert {array.dtype for array in kept.values()} == {np.dtype(np.float16)}


def test_float64() -> None:
    """ONNX Runtime has no such Conv; the reference implementation verifies it."""
    body = f"g (double[N,6,H,W] x) => (double[N,8,A,B] y) {{ {CONV}\n {BN} }}"
    proto = model(body, {"w": (8, 6, 1, 1), **batch_norm("p", 8)}, dtype="float64")
    result = fold(proto)
    assert operators(to_proto(result.model)) == ["Conv"]
    assert result.report.verification is not None
    assert result.report.verification.passed
    assert result.report.verification.engine.startswith("onnx.reference ")
    inputs = make_inputs(proto)
    assert_near(exact(to_proto(result.model), inputs)[0], exact(proto, inputs)[0])


class TestDeadChannels:
    """Half networks whose training left channels with scales near 0: their output is their shift."""

    # Layers with 16 outputs; the sizes of x, and of w.
    LAYERS: ClassVar = {
        "conv": ("z = Conv <pads = [1, 1, 1, 1]> (x, w)", "N,32,5,5", (16, 32, 3, 3)),
        "transposed-conv": ("z = ConvTranspose (x, w)", "N,32,5,5", (32, 16, 3, 3)),
        "gemm": ("z = Gemm (x, w)", "N,32", (32, 16)),
        "gemm-alpha": ("z = Gemm <transB = 1, alpha = 4.0> (x, w)", "N,32", (16, 32)),
        "large": ("z = Conv <dilations = [5, 5], pads = [5, 5, 5, 5]> (x, w)", "N,512,5,5", (16, 512, 3, 3)),
    }

    @classmethod
    def build(cls, layer: str, *, scale: float = 1e-6, shift: float = -0.2) -> onnx.ModelProto:
        """Channels 3 and 11 are dead."""
        text, sizes, shape = cls.LAYERS[layer]
        generator = np.random.default_rng(5)
        values = {"w": generator.standard_normal(shape) * 0.02, "p_m": generator.standard_normal(16) * 0.1}
        values |= {"p_s": generator.uniform(0.5, 2, 16), "p_b": generator.standard_normal(16)}
        values["p_v"] = generator.uniform(0.5, 2, 16)
        values["p_s"][[3, 11]], values["p_b"][[3, 11]] = scale, shift
        rank = "N,16" if len(shape) == 2 else "N,16,A,B"
        body = f"g (float16[{sizes}] x) => (float16[{rank}] y) {{ {text}\n {BN} }}"
        return model(body, values={name: value.astype(np.float16) for name, value in values.items()})

    @pytest.mark.parametrize("layer", LAYERS)
    def test_they_fold(self, layer: str, tmp_path: Path) -> None:
        """Some weights become zero; what they made is below the rounding error of the output."""
        proto = self.build(layer)
        result = fold(proto, tmp_path / "out.onnx")
        assert [site.outcome for site in result.report.sites] == ["folded"]
        assert result.report.verification is not None
        assert result.report.verification.passed
        folded = to_proto(result.model)
        inputs = make_inputs(proto)
        inputs["x"] = (np.sign(inputs["x"]) * tolerances.ACTIVATION).astype(np.float16)
        wide = {"x": inputs["x"].astype(np.float64)}
        double = [
            PreciseModel(Serialised(each.SerializeToString()), 30.0).run([wide], ["y"])[0][0]
            for each in (proto, folded)
        ]
        dead = np.abs(double[1] - double[0])[:, [3, 11]].max()
        # One rounding of the bias, and what the inputs' bound gives the weights' errors.
        assert 0 < dead <= 2 * 2.0**-11 * 0.2

    @pytest.mark.parametrize("shift", [0.0, 1e-3])
    def test_they_stay_where_an_output_would_show(self, shift: float) -> None:
        assert_refused(self.build("conv", shift=shift), "underflow")

    def test_not_when_they_are_inputs(self) -> None:
        """A scale that goes forward meets every output, whose shifts say nothing about it."""
        body = f"g (float16[N,16,5,5] x) => (float16[N,4,A,B] y) {{ {BN.replace('(z', '(x').replace('y =', 't =')}\n y = Conv (t, w) }}"
        values = {
            "w": np.full((4, 16, 3, 3), 0.02, np.float16),
            **dict.fromkeys(("p_b", "p_m"), np.zeros(16, np.float16)),
        }
        values |= {"p_v": np.ones(16, np.float16), "p_s": np.where(np.arange(16) == 3, 1e-6, 1).astype(np.float16)}
        assert_refused(model(body, values=values), "underflow")
