"""Mistakes with quantised values."""

from __future__ import annotations

import numpy as np

from tests.miscompilations.mistake import Mistake, floats

_INT8 = np.asarray(0, np.int8)
_INT16 = np.asarray(0, np.int16)
_WEIGHT = np.random.default_rng(0).integers(-100, 100, (4, 4, 3, 3)).astype(np.int8)
_S = floats(0.05)

MISTAKES: list[Mistake] = [
    Mistake("relu_in_front_of_signed_numbers", "microsoft/onnxruntime#9425", "Relu, QuantizeLinear",
        "A Relu is removed since the quantisation cuts at zero, which signed numbers do not.", graph="float[N,4] x => float[N,4] y",
        values={"s": _S, "z": _INT8}, original="r = Relu (x) q = QuantizeLinear (r, s, z) y = DequantizeLinear (q, s, z)",
        wrong="q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z)", right="q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, "
        "s, z) y = Relu (d)"),
    Mistake("zero_point_of_16_bits", "microsoft/onnxruntime#20187", "Relu, QuantizeLinear",
        "A zero point of 16 bits is read as one of 8, and the Relu in front is removed.", graph="float[N,4] x => float[N,4] y",
        values={"s": floats(0.001), "z": _INT16}, opset=21, original="r = Relu (x) q = QuantizeLinear (r, s, z) y = DequantizeLinear (q, "
        "s, z)", wrong="q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z)",
        right="q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) y = Relu (d)"),
    Mistake("maximum_of_negative_scales", "microsoft/onnxruntime#21176", "DequantizeLinear, MaxPool",
        "A MaxPool takes the quantised numbers, whose order a negative scale turns round.", graph="int8[N,1,4,4] x => int8[N,1,2,2] y",
        values={"s": floats(-0.5), "z": _INT8}, original="d = DequantizeLinear (x, s, z) p = MaxPool <kernel_shape=[2,2], strides=[2,2]> "
        "(d) y = QuantizeLinear (p, s, z)", wrong="y = MaxPool <kernel_shape=[2,2], strides=[2,2]> (x)",
        inputs={"x": np.arange(-16, 16, dtype=np.int8).reshape(2, 1, 4, 4)}),
    Mistake("constant_of_signed_numbers", "microsoft/onnxruntime#28491", "DequantizeLinear, Conv",
        "Stored int8 numbers are folded as if they were unsigned: negative weights become 0.",
        graph="float[N,4,5,5] x => float[N,4,3,3] y", values={"w": _WEIGHT, "s": _S,
        "f": floats(0.05 * np.maximum(_WEIGHT, 0)), "e": floats(np.float32(0.05) * _WEIGHT.astype(np.float64))},
        original="d = DequantizeLinear (w, s) y = Conv (x, d)", wrong="y = Conv (x, f)", right="y = Conv (x, e)"),
    Mistake("resize_of_quantised_numbers", "microsoft/onnxruntime#28448", "Resize, QuantizeLinear",
        "A linear Resize takes the quantised numbers and cuts what lies between them.", graph="float[N,1,1,3] x => float[N,1,1,6] y",
        values={"s": floats(1.0), "z": _INT8, "n": floats([1, 1, 1, 2])}, original="a = QuantizeLinear (x, s, z) d = DequantizeLinear (a, "
        's, z) r = Resize <mode="linear"> (d, , n) q = QuantizeLinear (r, s, z) y = DequantizeLinear (q, s, z)',
        wrong='a = QuantizeLinear (x, s, z) r = Resize <mode="linear"> (a, , n) y = DequantizeLinear (r, s, z)',
        inputs={"x": floats([2, 6, 4] * 2).reshape(2, 1, 1, 3)}),
]  # fmt: skip
