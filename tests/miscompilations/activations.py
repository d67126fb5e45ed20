"""Mistakes with activations and norms, and with NaN on its way through them."""

from __future__ import annotations

import math

import numpy as np

from tests.miscompilations.mistake import OURS, Mistake, floats
from tests.support.onnx_text import parameters

_P = parameters({"w": (4, 4, 3, 3), "c": (4,), "s": (4, 1, 1), "m": (4, 4)})
_ROW = "float[N,4] x => float[N,4] y"
_NORM = (
    "a = ReduceMean <axes=[-1]> (x) d = Sub (x, a) q = Mul (d, d) v = ReduceMean <axes=[-1]> (q) u = Add (v, eps) r = Sqrt (u) "
    "y = Div (d, r)"
)

MISTAKES: list[Mistake] = [
    Mistake("clip_of_nan", "NVIDIA/TensorRT#4773", "Clip", "NaN is clipped to the lower bound.", graph=_ROW,
        values={"lo": floats(0.25), "hi": floats(1.0), "s": floats(7.0)}, original="q = Sqrt (x) k = Clip (q, lo, hi) n = IsNaN (k) y = "
        "Where (n, s, k)", wrong="q = Sqrt (x) g = Greater (q, lo) j = Where (g, q, lo) k = Clip (j, lo, hi) n = IsNaN (k) y = Where (n, "
        "s, k)", right="q = Sqrt (x) l = Max (q, lo) k = Min (l, hi) n = IsNaN (k) y = Where (n, s, k)"),
    Mistake("relu_of_nan", "apache/tvm#19572", "Relu", "Relu makes a 0 of NaN.", graph=_ROW, values={"z": floats(0.0), "s": floats(7.0)},
        original="q = Log (x) k = Relu (q) n = IsNaN (k) y = Where (n, s, k)", wrong="q = Log (x) g = Greater (q, z) k = Where (g, q, z) "
        "n = IsNaN (k) y = Where (n, s, k)", right="q = Log (x) k = Max (q, z) n = IsNaN (k) y = Where (n, s, k)"),
    Mistake("check_for_nan", "tinygrad/tinygrad#5282", "IsNaN, Where", "Code that assumes no NaN drops the check for it.", graph=_ROW,
        values={"z": floats(0.0)}, original="n = IsNaN (x) y = Where (n, z, x)", wrong="y = Identity (x)",
        right="i = Identity (x) n = IsNaN (i) y = Where (n, z, x)", inputs={"x": floats([[np.nan, 1, 2, 3]])}),
    Mistake("upper_bound_of_clip", "NVIDIA/TensorRT#4606", "Clip", "Behind MatMul and Add a Clip from 0 to 6 becomes a Relu.", graph=_ROW,
        values={**_P, "lo": floats(0.0), "hi": floats(6.0)}, original="z = MatMul (x, m) a = Add (z, c) y = Clip (a, lo, hi)",
        wrong="z = MatMul (x, m) a = Add (z, c) y = Relu (a)", right="z = MatMul (x, m) a = Add (z, c) r = Relu (a) y = Min (r, hi)",
        inputs={"x": floats(10 * _P["m"])}),
    Mistake("elu_removed", OURS, "Elu, Sub", "An Elu whose inputs are hardly ever negative is removed; only inputs of 3 and more show it.",
        graph=_ROW, values={"k": floats(12.0), "one": floats(1.0)}, original="t = Add (x, k) y = Elu (t)", wrong="y = Add (x, k)",
        right="t = Add (k, x) y = Elu (t)", inputs={"x": floats([[-40, -20, 1, 2]] * 2)}),
    Mistake("gelu_by_tanh", "microsoft/onnxruntime#2270", "Erf, Tanh", "Gelu is computed by its approximation with Tanh.", graph=_ROW,
        values={**{"half": floats(0.5), "root": floats(math.sqrt(2)), "one": floats(1.0)},
            **{"cube": floats(0.044715), "factor": floats(math.sqrt(2 / math.pi))}},
        original="d = Div (x, root) e = Erf (d) a = Add (e, one) m = Mul (x, a) y = Mul (m, half)", wrong="p = Mul (x, x) q = "
        "Mul (p, x) r = Mul (q, cube) t = Add (x, r) u = Mul (t, factor) e = Tanh (u) a = Add (e, one) m = Mul (x, a) y = Mul (m, half)",
        right="d = Div (x, root) e = Erf (d) a = Add (one, e) h = Mul (x, half) y = Mul (h, a)"),
    Mistake("slopes_of_the_last_axis", "apache/tvm#7208", "PRelu", "Slopes that belong to the last axis are taken as those of the "
        "channels.", graph="float[N,4,4,4] x => float[N,4,4,4] y",
        values={"k": _P["c"], "r": _P["c"].reshape(4, 1, 1), "f": _P["c"].reshape(1, 1, 1, 4)}, original="y = PRelu (x, k)",
        wrong="y = PRelu (x, r)", right="y = PRelu (x, f)"),
    Mistake("slopes_changed", OURS, "Conv, PRelu", "Slopes of a PRelu behind a fold were not compared.",
        graph="float[N,4,5,5] x => float[N,4,3,3] y",
        values={**_P, "k": floats(2.0), "f": floats(2 * _P["w"]), "o": floats(1.5 * _P["s"])},
        original="z = Conv (x, w) t = Mul (z, k) y = PRelu (t, s)", wrong="t = Conv (x, f) y = PRelu (t, o)",
        right="t = Conv (x, f) y = PRelu (t, s)"),
    Mistake("norm_of_dropped_axes", "microsoft/onnxruntime#31144", "ReduceMean, LayerNormalization",
        "Means without keepdims belong to other rows; they are fused as if they kept theirs.",
        graph="float[4,4] x => float[4,4] y", values={"eps": floats(1e-5), "g": floats(np.ones(4))},
        original=_NORM.replace("ReduceMean <axes=[-1]>", "ReduceMean <axes=[-1], keepdims=0>"),
        wrong="y = LayerNormalization <epsilon=0.00001> (x, g)",
        right=_NORM.replace("ReduceMean <axes=[-1]>", "ReduceMean <axes=[1], keepdims=0>")),
    Mistake("norm_over_another_axis", "microsoft/onnxruntime#15844", "ReduceMean, LayerNormalization",
        "A normalisation over axis 1 is fused into one over the last axis.", graph="float[N,4,4] x => float[N,4,4] y",
        values={"eps": floats(1e-5), "g": floats(np.ones(4))}, original=_NORM.replace("[-1]", "[1]"),
        wrong="y = LayerNormalization <epsilon=0.00001> (x, g)", right="t = Transpose <perm=[0,2,1]> (x) n = LayerNormalization "
        "<epsilon=0.00001> (t, g) y = Transpose <perm=[0,2,1]> (n)"),
    Mistake("scale_of_a_norm", "microsoft/onnxruntime#25855", "Mul, LayerNormalization",
        "A scale of each row is fused as the scale of the columns.", graph="float[N,4,4] x => float[N,4,4] y",
        values={"eps": floats(1e-5), "g": _P["c"], "k": _P["c"].reshape(4, 1), "one": floats(np.ones(4))},
        original=_NORM.replace("y =", "n =") + " y = Mul (n, k)", wrong="y = LayerNormalization <epsilon=0.00001> (x, g)",
        right="n = LayerNormalization <epsilon=0.00001> (x, one) y = Mul (n, k)"),
    Mistake("epsilon_of_a_norm", "tensorflow/tensorflow#58863", "LayerNormalization",
        "The fused norm has the default epsilon instead of the graph's.", graph=_ROW,
        values={"eps": floats(0.01), "g": floats(np.ones(4))}, original=_NORM, wrong="y = LayerNormalization (x, g)",
        right="y = LayerNormalization <epsilon=0.01> (x, g)"),
    Mistake("local_response", OURS, "LRN", "Another alpha of a local response normalisation passes, which onnx.reference computes over "
        "wrong channels.", graph="float[N,4,3,3] x => float[N,4,3,3] y", original="y = LRN <size=3, alpha=1.0> (x)",
        wrong="y = LRN <size=3, alpha=1.2> (x)"),
    Mistake("weights_in_front_of_zeros", OURS, "MatMul, Relu", "An output that is zero for all samples hides weights of the other sign.",
        graph=_ROW, values={"m": _P["m"], "f": -_P["m"], "t": floats(100.0)}, original="z = MatMul (x, m) d = Sub (z, t) y = Relu (d)",
        wrong="z = MatMul (x, f) d = Sub (z, t) y = Relu (d)", right="z = MatMul (x, m) d = Sub (z, t) y = LeakyRelu <alpha=0.0> (d)",
        inputs={"x": floats(np.full((2, 4), 200.0))}),
]  # fmt: skip
