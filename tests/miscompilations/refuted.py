"""Rewrites that a proof once let pass, or that a lemma without one of its conditions would: no tool is known to make them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.miscompilations.mistake import Triple
from tests.support.onnx_text import parameters

SHAPES = {
    **{"w": (4, 3, 1, 3), "v": (4, 3, 1, 1), "c": (1, 4, 1, 1), "m": (3, 4)},
    **{"p_s": (4,), "p_b": (4,), "p_m": (4,), "p_v": (4,)},
}
VALUES = parameters(SHAPES)
FACTOR = VALUES["p_s"] / np.sqrt(VALUES["p_v"] + np.float32(1e-5))
VALUES |= {
    "turned": VALUES["w"].transpose(0, 1, 3, 2).copy(),
    "folded": VALUES["w"] * FACTOR[:, None, None, None],
    "folded_turned": (VALUES["w"] * FACTOR[:, None, None, None]).transpose(0, 1, 3, 2).copy(),
    "folded_v": VALUES["v"] * FACTOR[:, None, None, None],
    "shift": VALUES["p_b"] - VALUES["p_m"] * FACTOR,
    "rows": np.repeat(VALUES["c"], 2, axis=0),
    "ones": np.ones((1, 4, 1, 1), np.float32),
    "one": np.ones((1, 1, 1), np.float32),
    "plain": np.ones((1, 1, 1, 1), np.float32),
    "slope": np.full((4, 1, 1), 0.5, np.float32),
    "steep": np.full((4, 1, 1), 0.9, np.float32),
    "tiny": np.full((4, 1, 1), 2.0**-12, np.float32),
    "huge": np.full((4, 1, 1), 1e30, np.float32),
    "third": np.full((4, 1, 1), 1 / 3, np.float32),
    "twice": np.asarray([1, 1, 2, 2], np.float32),
    "wider": np.asarray([1, 1, 2, 3], np.float32),
    "two": np.asarray(2, np.int64),
    "many": np.asarray([16777217], np.int64),
    "wide": np.full((4, 1, 1), 16777216.0, np.float32),
    "one_double": np.ones((), np.float64),
    "one_float": np.ones((), np.float32),
    "spatial": np.asarray([2, 3]),
    "rate": np.asarray(0.5, np.float32),
    "true": np.asarray(True),
    "border": np.asarray([0, 0, 1, 1, 0, 0, 1, 1]),
    "gain": np.asarray(3, np.float32),
    "growing": np.asarray([1, 2, 3], np.float32).reshape(3, 1, 1),
}
VALUES["square"] = parameters({"square": (4, 4)}, seed=5)["square"]
VALUES |= {"double": 2 * VALUES["square"], "scaled_square": 3 * VALUES["square"], "thrice": 3 * VALUES["p_b"]}
VALUES["kernel"] = parameters({"kernel": (5, 4, 3, 3)}, seed=4)["kernel"]
VALUES["scaled_kernel"] = VALUES["kernel"] * VALUES["c"]


def _triple(name: str, *, shape: tuple[int, ...] = (2, 3, 6, 5), **fields: Any) -> Triple:
    """shape: of the input that shows the difference."""
    x = 3 * np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    fields = {"graph": "float[N,3,H,W] x => float[A,B,C,D] y", "inputs": {"x": x}} | fields
    return Triple(name, values=VALUES, method="local", **fields)


REFUTED = [
    _triple("cast-to-integers", original="z = Conv (x, v) y = BatchNormalization (z, p_s, p_b, p_m, p_v)",
        wrong="z = Conv (x, folded_v, shift) i = Cast <to=6> (z) y = Cast <to=1> (i)",
        right="z = Conv (x, folded_v, shift) i = Cast <to=11> (z) y = Cast <to=1> (i)"),
    _triple("kernel-turned", original="z = Conv (x, w) y = BatchNormalization (z, p_s, p_b, p_m, p_v)",
        wrong="y = Conv (x, folded_turned, shift)", right="y = Conv (x, folded, shift)"),
    _triple("kernel-turned-by-name", original="y = Conv <kernel_shape=[1, 3]> (x, w)", wrong="y = Conv (x, turned)",
        right="y = Conv (x, w)"),
    _triple("broadcast-dropped", original="a = Mul (x, ones) y = Relu (a)", wrong="y = Relu (x)",
        right="a = Mul (ones, x) y = Relu (a)", graph="float[N,1,H,W] x => float[A,B,C,D] y", shape=(2, 1, 5, 5)),
    _triple("broadcast-dropped-before-conv", original="a = Mul (x, c) y = Conv (a, kernel)",
        wrong="y = Conv (x, scaled_kernel)", right="a = Mul (c, x) y = Conv (a, kernel)",
        graph="float[N,1,H,W] x => float[A,B,C,D] y", shape=(2, 1, 5, 5), runs=None),
    _triple("rank-dropped", original="a = MatMul (x, m) y = Mul (a, one)", wrong="y = MatMul (x, m)",
        right="a = MatMul (x, m) y = Mul (one, a)", graph="float[N,3] x => float[A,B,C] y", shape=(2, 3), runs=None),
    _triple("squeeze-at-batch-1",
        original="z = Conv (x, v) n = BatchNormalization (z, p_s, p_b, p_m, p_v) p = GlobalAveragePool (n) y = Squeeze (p, spatial)",
        wrong="n = Conv (x, folded_v, shift) p = GlobalAveragePool (n) y = Squeeze (p)",
        right="n = Conv (x, folded_v, shift) p = GlobalAveragePool (n) y = Squeeze (p, spatial)",
        graph="float[N,3,H,W] x => float[A,B] y", shape=(1, 3, 5, 5)),
    _triple("squeeze-alone-at-batch-1", original="p = GlobalAveragePool (x) y = Squeeze (p, spatial)",
        wrong="p = GlobalAveragePool (x) y = Squeeze (p)",
        right="p = GlobalAveragePool (x) i = Identity (p) y = Squeeze (i, spatial)", graph="float[N,3,H,W] x => float[A,B] y",
        shape=(1, 3, 5, 5)),
    _triple("constant-of-two-rows", original="a = Add (x, c) r = ReduceMax <axes=[3]> (a) y = Flatten (r)",
        wrong="a = Add (x, rows) r = ReduceMax <axes=[3]> (a) y = Flatten (r)",
        right="a = Add (c, x) r = ReduceMax <axes=[3]> (a) y = Flatten (r)", graph="float[N,4,6,6] x => float[A,B] y",
        shape=(1, 4, 6, 6)),
    _triple("split-in-more-parts", original="a, b = Split <axis=1> (x) y = Add (a, a)",
        wrong="a, b, e = Split <axis=1> (x) y = Add (a, a)",
        right="a, b = Split <axis=1> (x) i = Identity (a) y = Add (i, a)", graph="float[N,6,H,W] x => float[A,B,C,D] y",
        shape=(2, 6, 4, 4), opset=13),
    _triple("training-momentum", original="y, u, q = BatchNormalization <training_mode=1> (x, p_s, p_b, p_m, p_v)",
        wrong="y, u, q = BatchNormalization <training_mode=1, momentum=0.1> (x, p_s, p_b, p_m, p_v)",
        right="y, u, q = BatchNormalization <training_mode=1, momentum=0.9> (x, p_s, p_b, p_m, p_v)",
        graph="float[N,4,H,W] x => float[A,B,C,D] y, float[4] u, float[4] q", shape=(2, 4, 5, 5)),
    _triple("random-nodes-merged", original="a = RandomNormalLike (x) b = RandomNormalLike (x) y = Sub (a, b)",
        wrong="a = RandomNormalLike (x) y = Sub (a, a)",
        right="b = RandomNormalLike (x) a = RandomNormalLike (x) y = Sub (b, a)", runs=None),
    _triple("random-dropouts-merged", original="a = Dropout (x, rate, true) b = Dropout (x, rate, true) y = Sub (a, b)",
        wrong="a = Dropout (x, rate, true) y = Sub (a, a)",
        right="b = Dropout (x, rate, true) a = Dropout (x, rate, true) y = Sub (b, a)", runs=None),
    _triple("dropout-that-trains", original="d = Dropout (x) y = Relu (d)", wrong="y = Relu (x)",
        right="i = Identity (x) d = Dropout (i) y = Relu (d)", opset=6, runs=None),
    _triple("constant-through-float16", original="n = Cast <to=10> (huge) k = Cast <to=1> (n) y = Add (x, k)",
        wrong="y = Add (x, huge)", right="n = Cast <to=10> (huge) i = Identity (n) k = Cast <to=1> (i) y = Add (x, k)",
        graph="float[N,4,H,W] x => float[A,B,C,D] y", shape=(2, 4, 3, 3)),
    _triple("constant-through-bfloat16", original="n = Cast <to=16> (third) k = Cast <to=1> (n) y = Mul (x, k)",
        wrong="y = Mul (x, third)", right="n = Cast <to=16> (third) i = Identity (n) k = Cast <to=1> (i) y = Mul (x, k)",
        graph="float[N,4,H,W] x => float[A,B,C,D] y", shape=(2, 4, 3, 3)),
    _triple("integer-through-float32", original="f = Cast <to=1> (many) y = Cast <to=7> (f) z = Relu (x)",
        wrong="y = Identity (many) z = Relu (x)",
        right="f = Cast <to=1> (many) i = Identity (f) y = Cast <to=7> (i) z = Relu (x)",
        graph="float[N,3,H,W] x => int64[1] y, float[A,B,C,D] z"),
    _triple("cast-like-another-type", original="d = Mul (one_float, one_float) y = CastLike (x, d)",
        wrong="d = Mul (one_double, one_double) y = CastLike (x, d)",
        right="d = Mul (one_float, one_float) i = Identity (x) y = CastLike (i, d)", runs=None),
    _triple("slopes-of-prelu", original="z = Conv (x, v) n = BatchNormalization (z, p_s, p_b, p_m, p_v) y = PRelu (n, slope)",
        wrong="n = Conv (x, folded_v, shift) y = PRelu (n, steep)",
        right="n = Conv (x, folded_v, shift) y = PRelu (n, slope)"),
    _triple("computed-slopes-of-prelu",
        original="a = Mul (x, c) s = ReduceMax <keepdims=1, axes=[0, 2, 3]> (x) p = PRelu (a, s) y = Div (p, c)",
        wrong="s = ReduceMin <keepdims=1, axes=[0, 2, 3]> (x) y = PRelu (x, s)",
        right="a = Mul (c, x) s = ReduceMax <keepdims=1, axes=[0, 2, 3]> (x) p = PRelu (a, s) y = Div (p, c)",
        graph="float[N,4,H,W] x => float[A,B,C,D] y", shape=(2, 4, 3, 3), opset=15),
    _triple("integer-division", original="a = Div (x, two) y = Mul (a, two)", wrong="y = Identity (x)",
        right="i = Identity (x) a = Div (i, two) y = Mul (a, two)", graph="int64[N,3,H,W] x => int64[A,B,C,D] y", runs=None),
    _triple("opset-under-its-other-name", original="y = Softmax (x)", wrong="y = Softmax (x)",
        right="i = Identity (x) y = Softmax (i)", opset=13, wrong_opset=12, wrong_domain="ai.onnx"),
    _triple("constant-in-one-model", original="a = Mul (x, c) y = Add (a, x)", wrong="a = Mul (c, c) y = Add (a, c)",
        right="a = Mul (c, x) y = Add (a, x)", graph="float[1,4,1,1] x => float[A,B,C,D] y", shape=(1, 4, 1, 1)),
    _triple("switch-of-3",
        original="a = BatchNormalization (x, p_s, p_b, p_m, p_v) y = ReduceMean <axes=[3], keepdims=1> (a)",
        wrong="a = BatchNormalization (x, p_s, p_b, p_m, p_v) y = ReduceMean <axes=[3], keepdims=3> (a)",
        right="a = BatchNormalization (x, p_s, p_b, p_m, p_v) y = ReduceMean <axes=[3]> (a)",
        graph="float[N,4,H,W] x => float[A,B,C,D] y", shape=(2, 4, 3, 3)),
    _triple("resize-with-an-unread-region",
        original='a = Resize <mode="nearest"> (x, , twice) y = BatchNormalization (a, p_s, p_b, p_m, p_v)',
        wrong='b = BatchNormalization (x, p_s, p_b, p_m, p_v) y = Resize <mode="nearest"> (b, ones, wider)',
        right='b = BatchNormalization (x, p_s, p_b, p_m, p_v) y = Resize <mode="nearest"> (b, ones, twice)',
        graph="float[N,4,H,W] x => float[A,B,C,D] y", shape=(2, 4, 3, 3)),
    _triple("constant-over-a-value", original="a = Div (one_float, x) b = Mul (a, c) y = Relu (b)",
        wrong="a = Div (x, one_float) b = Mul (a, c) y = Relu (b)",
        right="a = Div (one_float, x) b = Mul (c, a) y = Relu (b)", graph="float[N,4,H,W] x => float[A,B,C,D] y",
        shape=(2, 4, 3, 3)),
    _triple("pad-of-a-half", original="a = Pad (x, border, rate) y = Mul (a, gain)",
        wrong="a = Mul (x, gain) y = Pad (a, border, rate)",
        right="i = Identity (x) a = Pad (i, border, rate) y = Mul (gain, a)"),
    _triple("beta-of-a-gemm-in-a-sum", original="a = Gemm <beta=3.0> (x, square, p_b) b = MatMul (x, square) y = Add (a, b)",
        wrong="y = Gemm (x, double, p_b)", right="y = Gemm (x, double, thrice)", graph="float[N,4] x => float[A,B] y",
        shape=(2, 4)),
    _triple("gemm-of-what-is-turned", original="a = Gemm <transA=1> (x, square) y = Mul (a, gain)",
        wrong="y = Gemm (x, scaled_square)", right="y = Gemm <transA=1> (x, scaled_square)",
        graph="float[4,4] x => float[4,4] y", shape=(4, 4)),
    _triple("maximum-over-all-axes", original="a = Mul (x, growing) t = Transpose <perm=[1, 0, 2, 3]> (a) y = ReduceMax (t)",
        wrong="t = Transpose <perm=[1, 0, 2, 3]> (x) y = ReduceMax (t)",
        right="a = Mul (growing, x) t = Transpose <perm=[1, 0, 2, 3]> (a) y = ReduceMax (t)"),
    _triple("axis-of-an-old-product", original="y = Mul <axis=1, broadcast=1> (x, p_s)",
        wrong="y = Mul <axis=3, broadcast=1> (x, p_s)", right="i = Identity (x) y = Mul <axis=1, broadcast=1> (i, p_s)",
        graph="float[N,4,H,4] x => float[A,B,C,D] y", opset=6, runs=None),
]  # fmt: skip
