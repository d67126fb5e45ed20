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
    **{name: np.ones(shape, np.float32) for name, shape in {"ones": (1, 4, 1, 1), "one": (1, 1, 1), "plain": (1, 1, 1, 1),
        "single": (4, 1, 1, 1), "one_float": ()}.items()},
    **{name: np.full((4, 1, 1), value, np.float32) for name, value in {"slope": 0.5, "steep": 0.9, "tiny": 2.0**-12, "huge": 1e30,
        "third": 1 / 3, "wide": 16777216.0}.items()},
    **{name: np.asarray(value, np.float32) for name, value in {"twice": [1, 1, 2, 2], "wider": [1, 1, 2, 3], "rate": 0.5, "gain": 3,
        "six": 6, "half_more": 1.5, "both_more": 4.5, "steps": [1, 2, 3], "below_0": [1, -1, 1, 1]}.items()},
    "two": np.asarray(2, np.int64),
    "many": np.asarray([16777217], np.int64),
    "one_double": np.ones((), np.float64),
    "spatial": np.asarray([2, 3]),
    "true": np.asarray(True),
    "border": np.asarray([0, 0, 1, 1, 0, 0, 1, 1]),
    "growing": np.asarray([1, 2, 3], np.float32).reshape(3, 1, 1),
}  # fmt: skip
VALUES["square"] = parameters({"square": (4, 4)}, seed=5)["square"]
VALUES |= {"double": 2 * VALUES["square"], "scaled_square": 3 * VALUES["square"], "thrice": 3 * VALUES["p_b"]}
VALUES["kernel"] = parameters({"kernel": (5, 4, 3, 3)}, seed=4)["kernel"]
VALUES["scaled_kernel"] = VALUES["kernel"] * VALUES["c"]
VALUES |= parameters({"cubes": (2, 3, 4), "more_cubes": (2, 3, 4), "cube": (3, 3, 4), "other": (5, 3, 3, 3)})
_POINT = VALUES["v"][:, :, 0, 0]
VALUES |= {
    "tall": VALUES["c"].reshape(4, 1, 1, 1),
    "none": np.zeros(0, np.int64),
    "below": VALUES["kernel"] * FACTOR[:, None, None],
    "below_shift": VALUES["kernel"].sum((2, 3)) @ VALUES["shift"],
    "longer": np.asarray([2, 3, 6, 8]),
    "deep": VALUES["p_b"].reshape(1, 1, 4),
    "scaled_b": VALUES["p_b"] * VALUES["p_s"],
    "column": VALUES["p_s"][:, None],
    "scaled_rows": VALUES["square"] * VALUES["p_s"][:, None],
    "all_steps": np.asarray([1, 2, 3], np.float32) @ VALUES["cubes"].sum(0),
    "all_cubes": VALUES["cubes"] + VALUES["more_cubes"],
    "all_columns": (VALUES["cubes"] + VALUES["more_cubes"]).sum((0, 1)),
    "all_square": VALUES["square"].sum(keepdims=True).reshape(()),
    "all_cube": VALUES["cube"].sum((0, 1)),
    "front": VALUES["c"][:, :2],
    "back": VALUES["c"][:, 2:],
    "merged": np.einsum("omhw,mi->oihw", VALUES["kernel"], _POINT) + VALUES["other"],
    "merged_shift": VALUES["kernel"].sum((2, 3)) @ VALUES["p_b"],
    "point": VALUES["square"].reshape(4, 4, 1, 1),
    "gates": parameters({"gates": (1, 4, 3)})["gates"],
    "again": parameters({"again": (1, 4, 4)})["again"],
    "middle": np.asarray([2, 3, 1, 1]),
    "first": VALUES["c"].reshape(-1)[0],
    "pairs": np.asarray([[1, 2], [3, 4], [5, 6]]),
    "diagonal": (VALUES["square"] + np.diag(VALUES["p_b"])).reshape(4, 4, 1, 1),
}
VALUES |= {"more_gates": 2 * VALUES["gates"], "more_pairs": 2 * VALUES["pairs"], "rows3": VALUES["w"][:3, :1]}
FOUR, ROWS = "float[N,4,H,W] x => float[A,B,C,D] y", "float[N,3] x => float[A,B,C] y"
SAME = 'auto_pad="SAME_UPPER"'


def _feed(shape: tuple[int, ...], name: str, *numbers: int) -> dict[str, np.ndarray]:
    """Return data, and integers for the second input."""
    return {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32), name: np.asarray(numbers)}


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
        graph="float[N,1,H,W] x => float[A,B,C,D] y", shape=(2, 1, 5, 5)),
    _triple("broadcast-dropped-before-conv", original="a = Mul (x, c) y = Conv (a, kernel)", wrong="y = Conv (x, scaled_kernel)",
        graph="float[N,1,H,W] x => float[A,B,C,D] y", shape=(2, 1, 5, 5), runs=None),
    _triple("rank-dropped", original="a = MatMul (x, m) y = Mul (a, one)", wrong="y = MatMul (x, m)",
        graph="float[N,3] x => float[A,B,C] y", shape=(2, 3), runs=None),
    _triple("squeeze-at-batch-1", original="z = Conv (x, v) n = BatchNormalization (z, p_s, p_b, p_m, p_v) p = GlobalAveragePool (n) y = "
        "Squeeze (p, spatial)", wrong="n = Conv (x, folded_v, shift) p = GlobalAveragePool (n) y = Squeeze (p)",
        right="n = Conv (x, folded_v, shift) p = GlobalAveragePool (n) y = Squeeze (p, spatial)", graph="float[N,3,H,W] x => float[A,B] y",
        shape=(1, 3, 5, 5)),
    _triple("squeeze-alone-at-batch-1", original="p = GlobalAveragePool (x) y = Squeeze (p, spatial)",
        wrong="p = GlobalAveragePool (x) y = Squeeze (p)", right="p = GlobalAveragePool (x) i = Identity (p) y = Squeeze (i, spatial)",
        graph="float[N,3,H,W] x => float[A,B] y", shape=(1, 3, 5, 5)),
    _triple("constant-of-two-rows", original="a = Add (x, c) r = ReduceMax <axes=[3]> (a) y = Flatten (r)",
        wrong="a = Add (x, rows) r = ReduceMax <axes=[3]> (a) y = Flatten (r)", graph="float[N,4,6,6] x => float[A,B] y",
        shape=(1, 4, 6, 6)),
    _triple("split-in-more-parts", original="a, b = Split <axis=1> (x) y = Add (a, a)",
        wrong="a, b, e = Split <axis=1> (x) y = Add (a, a)", right="a, b = Split <axis=1> (x) i = Identity (a) y = Add (i, a)",
        graph="float[N,6,H,W] x => float[A,B,C,D] y", shape=(2, 6, 4, 4), opset=13),
    _triple("training-momentum", original="y, u, q = BatchNormalization <training_mode=1> (x, p_s, p_b, p_m, p_v)",
        wrong="y, u, q = BatchNormalization <training_mode=1, momentum=0.1> (x, p_s, p_b, p_m, p_v)",
        right="y, u, q = BatchNormalization <training_mode=1, momentum=0.9> (x, p_s, p_b, p_m, p_v)",
        graph="float[N,4,H,W] x => float[A,B,C,D] y, float[4] u, float[4] q", shape=(2, 4, 5, 5)),
    _triple("random-nodes-merged", original="a = RandomNormalLike (x) b = RandomNormalLike (x) y = Sub (a, b)",
        wrong="a = RandomNormalLike (x) y = Sub (a, a)", runs=None),
    _triple("random-dropouts-merged", original="a = Dropout (x, rate, true) b = Dropout (x, rate, true) y = Sub (a, b)",
        wrong="a = Dropout (x, rate, true) y = Sub (a, a)", runs=None),
    _triple("dropout-that-trains", original="d = Dropout (x) y = Relu (d)", wrong="y = Relu (x)", opset=6, runs=None),
    _triple("constant-through-float16", original="n = Cast <to=10> (huge) k = Cast <to=1> (n) y = Add (x, k)",
        wrong="y = Add (x, huge)", right="n = Cast <to=10> (huge) i = Identity (n) k = Cast <to=1> (i) y = Add (x, k)",
        graph="float[N,4,H,W] x => float[A,B,C,D] y", shape=(2, 4, 3, 3)),
    _triple("constant-through-bfloat16", original="n = Cast <to=16> (third) k = Cast <to=1> (n) y = Mul (x, k)",
        wrong="y = Mul (x, third)", right="n = Cast <to=16> (third) i = Identity (n) k = Cast <to=1> (i) y = Mul (x, k)",
        graph="float[N,4,H,W] x => float[A,B,C,D] y", shape=(2, 4, 3, 3)),
    _triple("integer-through-float32", original="f = Cast <to=1> (many) y = Cast <to=7> (f) z = Relu (x)",
        wrong="y = Identity (many) z = Relu (x)", right="f = Cast <to=1> (many) i = Identity (f) y = Cast <to=7> (i) z = Relu (x)",
        graph="float[N,3,H,W] x => int64[1] y, float[A,B,C,D] z"),
    _triple("cast-like-another-type", original="d = Mul (one_float, one_float) y = CastLike (x, d)",
        wrong="d = Mul (one_double, one_double) y = CastLike (x, d)",
        right="d = Mul (one_float, one_float) i = Identity (x) y = CastLike (i, d)", runs=None),
    _triple("slopes-of-prelu", original="z = Conv (x, v) n = BatchNormalization (z, p_s, p_b, p_m, p_v) y = PRelu (n, slope)",
        wrong="n = Conv (x, folded_v, shift) y = PRelu (n, steep)", right="n = Conv (x, folded_v, shift) y = PRelu (n, slope)"),
    _triple("computed-slopes-of-prelu", original="a = Mul (x, c) s = ReduceMax <keepdims=1, axes=[0, 2, 3]> (x) p = PRelu (a, s) y = Div "
        "(p, c)", wrong="s = ReduceMin <keepdims=1, axes=[0, 2, 3]> (x) y = PRelu (x, s)",
        graph="float[N,4,H,W] x => float[A,B,C,D] y", shape=(2, 4, 3, 3), opset=15),
    _triple("integer-division", original="a = Div (x, two) y = Mul (a, two)", wrong="y = Identity (x)",
        graph="int64[N,3,H,W] x => int64[A,B,C,D] y", runs=None),
    _triple("opset-under-its-other-name", original="y = Softmax (x)", wrong="y = Softmax (x)", opset=13, wrong_opset=12,
        wrong_domain="ai.onnx"),
    _triple("constant-in-one-model", original="a = Mul (x, c) y = Add (a, x)", wrong="a = Mul (c, c) y = Add (a, c)",
        graph="float[1,4,1,1] x => float[A,B,C,D] y", shape=(1, 4, 1, 1)),
    _triple("switch-of-3", original="a = BatchNormalization (x, p_s, p_b, p_m, p_v) y = ReduceMean <axes=[3], keepdims=1> (a)",
        wrong="a = BatchNormalization (x, p_s, p_b, p_m, p_v) y = ReduceMean <axes=[3], keepdims=3> (a)",
        right="a = BatchNormalization (x, p_s, p_b, p_m, p_v) y = ReduceMean <axes=[3]> (a)", graph="float[N,4,H,W] x => float[A,B,C,D] y",
        shape=(2, 4, 3, 3)),
    _triple("resize-with-an-unread-region", original='a = Resize <mode="nearest"> (x, , twice) y = BatchNormalization (a, p_s, p_b, p_m, '
        "p_v)", wrong='b = BatchNormalization (x, p_s, p_b, p_m, p_v) y = Resize <mode="nearest"> (b, ones, wider)',
        right='b = BatchNormalization (x, p_s, p_b, p_m, p_v) y = Resize <mode="nearest"> (b, ones, twice)',
        graph="float[N,4,H,W] x => float[A,B,C,D] y", shape=(2, 4, 3, 3)),
    _triple("constant-over-a-value", original="a = Div (one_float, x) b = Mul (a, c) y = Relu (b)",
        wrong="a = Div (x, one_float) b = Mul (a, c) y = Relu (b)", graph="float[N,4,H,W] x => float[A,B,C,D] y", shape=(2, 4, 3, 3)),
    _triple("pad-of-a-half", original="a = Pad (x, border, rate) y = Mul (a, gain)", wrong="a = Mul (x, gain) y = Pad (a, border, rate)",
        right="i = Identity (x) a = Pad (i, border, rate) y = Mul (gain, a)"),
    _triple("beta-of-a-gemm-in-a-sum", original="a = Gemm <beta=3.0> (x, square, p_b) b = MatMul (x, square) y = Add (a, b)",
        wrong="y = Gemm (x, double, p_b)", right="y = Gemm (x, double, thrice)", graph="float[N,4] x => float[A,B] y", shape=(2, 4)),
    _triple("gemm-of-what-is-turned", original="a = Gemm <transA=1> (x, square) y = Mul (a, gain)", wrong="y = Gemm (x, scaled_square)",
        right="y = Gemm <transA=1> (x, scaled_square)", graph="float[4,4] x => float[4,4] y", shape=(4, 4)),
    _triple("maximum-over-all-axes", original="a = Mul (x, growing) t = Transpose <perm=[1, 0, 2, 3]> (a) y = ReduceMax (t)",
        wrong="t = Transpose <perm=[1, 0, 2, 3]> (x) y = ReduceMax (t)"),
    _triple("axis-of-an-old-product", original="y = Mul <axis=1, broadcast=1> (x, p_s)", wrong="y = Mul <axis=3, broadcast=1> (x, p_s)",
        graph="float[N,4,H,4] x => float[A,B,C,D] y", opset=6, runs=None),
    # The conditions of lemmas: what each leaves out if it is not there.
    _triple("one-channel-becomes-four", original="a = Conv (x, single) y = Relu (a)", wrong="y = Relu (x)",
        graph="float[N,E,H,W] x => float[A,B,C,D] y", shape=(2, 1, 5, 5)),
    _triple("stride-of-a-point", original="a = Conv <group=4, strides=[2, 2]> (x, tall) y = Relu (a)", wrong="a = Mul (x, c) y = Relu (a)",
        graph=FOUR, shape=(2, 4, 5, 5)),
    _triple("pads-of-a-point", original="a = Conv <group=4, pads=[1, 1, 1, 1]> (x, tall) y = Relu (a)",
        wrong="a = Mul (x, c) y = Relu (a)", graph=FOUR, shape=(2, 4, 5, 5)),
    _triple("mean-with-automatic-pads", original=f"a = Mul (x, c) y = AveragePool <{SAME}, kernel_shape=[3, 3]> (a)",
        wrong=f"y = AveragePool <{SAME}, kernel_shape=[3, 3]> (x)",
        right=f"b = AveragePool <{SAME}, kernel_shape=[3, 3]> (x) y = Mul (b, c)", graph=FOUR, shape=(2, 4, 5, 5)),
    _triple("sum-over-no-axes", original="a = Add (x, one_float) y = ReduceSum <noop_with_empty_axes=1> (a)",
        wrong="b = ReduceSum <noop_with_empty_axes=1> (x) y = Add (b, six)", graph="float[2,3] x => float[A,B] y", shape=(2, 3)),
    _triple("sum-over-an-empty-list", original="a = Mul (x, growing) y = ReduceSum (a, none)",
        wrong="b = ReduceSum (x, none) y = Mul (b, growing)"),
    _triple("shift-before-automatic-pads", original=f"n = BatchNormalization (x, p_s, p_b, p_m, p_v) y = Conv <{SAME}> (n, kernel)",
        wrong=f"y = Conv <{SAME}> (x, below, below_shift)",
        right=f"i = Identity (x) n = BatchNormalization (i, p_s, p_b, p_m, p_v) y = Conv <{SAME}> (n, kernel)", graph=FOUR,
        shape=(2, 4, 5, 5)),
    _triple("columns-become-more", original="a = Mul (x, p_b) y = Resize (a, , , longer)",
        wrong="b = Resize (x, , , longer) y = Mul (b, p_b)", graph="float[2,3,6,4] x => float[A,B,C,D] y", shape=(2, 3, 6, 4), runs=False),
    _triple("constant-of-rank-3", original="a = Gemm (x, square) y = Add (a, p_b)", wrong="y = Gemm (x, square, deep)",
        right="y = Gemm (x, square, p_b)", graph="float[N,4] x => float[A,B] y", shape=(2, 4), runs=False),
    _triple("product-with-a-vector", original="y = MatMul (x, p_b)", wrong="a = MatMul (x, scaled_b) y = Div (a, p_s)",
        graph="float[4,4] x => float[A] y", shape=(4, 4)),
    _triple("product-of-what-may-be-a-vector", original="r = Reshape (x, s) y = MatMul (square, r)",
        wrong="r = Reshape (x, s) a = MatMul (scaled_rows, r) y = Div (a, column)", graph="float[N] x, int64[K] s => float[A] y",
        inputs=_feed((4,), "s", 4)),
    _triple("shift-before-two-matrices", original="a = Add (x, steps) y = MatMul (a, cubes)",
        wrong="b = MatMul (x, cubes) y = Add (b, all_steps)", graph=ROWS, shape=(5, 3)),
    _triple("shift-before-two-products-of-two-matrices", original="a = Add (x, one_float) b = MatMul (a, cubes) e = MatMul (a, "
        "more_cubes) y = Add (b, e)", wrong="f = MatMul (x, all_cubes) y = Add (f, all_columns)", graph=ROWS, shape=(5, 3)),
    _triple("equation-without-an-arrow", original='a = Add (x, one_float) y = Einsum <equation="i,ij"> (a, square)',
        wrong='b = Einsum <equation="i,ij"> (x, square) y = Add (b, all_square)', graph="float[4] x => float[A] y", shape=(4,)),
    _triple("equation-of-a-diagonal", original='a = Add (x, one_float) y = Einsum <equation="bi,iij->bj"> (a, cube)',
        wrong='b = Einsum <equation="bi,iij->bj"> (x, cube) y = Add (b, all_cube)', graph="float[N,3] x => float[A,B] y", shape=(2, 3)),
    _triple("parts-of-given-sizes", original="a = Mul (x, c) p, q = Split <axis=1> (a, s) y = Concat <axis=1> (q, p)",
        wrong="p, q = Split <axis=1> (x, s) e = Mul (p, front) f = Mul (q, back) y = Concat <axis=1> (f, e)",
        graph="float[N,4,H,W] x, int64[2] s => float[A,B,C,D] y", inputs=_feed((2, 4, 3, 3), "s", 1, 3), runs=False),
    _triple("repeated-as-often-as-given", original="a = Mul (x, growing) y = Tile (a, s)", wrong="y = Tile (x, s)",
        graph="float[N,3,H,W] x, int64[4] s => float[A,B,C,D] y", inputs=_feed((2, 3, 3, 3), "s", 1, 1, 2, 1)),
    _triple("flattened-from-an-unknown-shape", original="r = Reshape (x, s) a = Mul (r, growing) y = Flatten (a)",
        wrong="r = Reshape (x, s) y = Flatten (r)", graph="float[N] x, int64[K] s => float[A,B] y", inputs=_feed((12,), "s", 1, 3, 2, 2)),
    _triple("joined-of-unknown-channels", original="a = Mul (x, growing) b = Mul (u, c) y = Concat <axis=1> (a, b)",
        wrong="y = Concat <axis=1> (x, u)", graph="float[N,E,H,W] x, float[N,F,H,W] u => float[A,B,C,D] y",
        inputs={"x": np.ones((2, 3, 4, 4), np.float32), "u": np.ones((2, 4, 4, 4), np.float32)}),
    _triple("shift-between-branches-that-pad", original="a = Conv (x, v, p_b) b = Conv <pads=[1, 1, 1, 1]> (a, kernel) e = Conv <pads=[1, "
        "1, 1, 1]> (x, other) y = Add (b, e)", wrong="y = Conv <pads=[1, 1, 1, 1]> (x, merged, merged_shift)"),
    _triple("mean-and-its-data", original="p = AveragePool <kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1> (x) y = Add (p, "
        "x)", wrong="y = AveragePool <kernel_shape=[1, 1]> (x)", graph="float[N,E,H,W] x => float[A,B,C,D] y"),
    _triple("columns-in-a-branch", original="a = Conv (x, point) t = Mul (x, p_b) y = Add (a, t)", wrong="y = Conv (x, diagonal)",
        graph="float[N,4,4,4] x => float[A,B,C,D] y", shape=(2, 4, 4, 4)),
    _triple("scale-before-a-convolution", original="y = Conv (x, kernel)", wrong="a = Mul (x, c) y = Conv (a, kernel)", graph=FOUR,
        shape=(2, 4, 5, 5)),
    _triple("shift-before-a-convolution", original="y = Conv (x, kernel)", wrong="a = Add (x, c) y = Conv (a, kernel)", graph=FOUR,
        shape=(2, 4, 5, 5)),
    _triple("no-shift-before-a-convolution", original="a = Add (x, c) y = Conv (a, kernel)", wrong="y = Conv (x, kernel)", graph=FOUR,
        shape=(2, 4, 5, 5)),
    _triple("dilation-of-a-depthwise-kernel", original="a = Conv <group=3> (x, rows3) y = Relu (a)",
        wrong="a = Conv <group=3, dilations=[1, 2]> (x, rows3) y = Relu (a)"),
    _triple("gates-of-other-numbers", original="y = RNN <hidden_size=4> (x, gates, again)",
        wrong="y = RNN <hidden_size=4> (x, more_gates, again)", graph="float[L,N,3] x => float[A,B,C,D] y", shape=(5, 2, 3)),
    _triple("weights-of-integers", original="i = Cast <to=7> (x) y = MatMul (i, pairs)",
        wrong="i = Cast <to=7> (x) y = MatMul (i, more_pairs)",
        right="i = Cast <to=7> (x) e = Identity (i) y = MatMul (e, pairs)", graph="float[N,3] x => int64[A,B] y", shape=(2, 3), runs=None),
    _triple("channels-that-are-given", original="a = Mul (x, growing) y = Gather <axis=1> (a, s)", wrong="y = Gather <axis=1> (x, s)",
        graph="float[N,3,H,W] x, int64[2] s => float[A,B,C,D] y", inputs=_feed((2, 3, 3, 3), "s", 1, 2)),
    _triple("padded-along-given-axes", original='a = Mul (x, growing) y = Pad <mode="edge"> (a, border, , s)',
        wrong='b = Pad <mode="edge"> (x, border, , s) y = Mul (b, growing)', opset=18,
        graph="float[N,3,H,W] x, int64[4] s => float[A,B,C,D] y", inputs=_feed((2, 3, 3, 3), "s", 2, 3, 0, 1), runs=False),
    _triple("reshaped-from-an-unknown-shape", original="r = Reshape (x, s) a = Mul (r, growing) y = Reshape (a, middle)",
        wrong="r = Reshape (x, s) y = Reshape (r, middle)",
        graph="float[N] x, int64[K] s => float[A,B,C,D] y", inputs=_feed((6,), "s", 1, 3, 2, 1)),
    _triple("scales-of-one-block", original="a = Mul (x, c) y = DepthToSpace <blocksize=2> (a)",
        wrong="b = DepthToSpace <blocksize=2> (x) y = Mul (b, first)", graph=FOUR, shape=(2, 4, 3, 3)),
    _triple("scale-of-both-signs", original="a = Mul (x, c) y = Relu (a)", wrong="b = Relu (x) y = Mul (b, c)", graph=FOUR,
        shape=(2, 4, 3, 3)),
    _triple("variance-below-0", original="n = BatchNormalization (x, p_s, p_b, p_m, below_0) a = Mul (n, gain) y = Mul (a, half_more)",
        wrong="y = Identity (x)", right="n = BatchNormalization (x, p_s, p_b, p_m, below_0) y = Mul (n, both_more)", graph=FOUR,
        shape=(2, 4, 3, 3)),
    _triple("dropout-that-may-train", original="d = Dropout (x, rate, t) y = Relu (d)", wrong="y = Relu (x)",
        graph="float[N,3,H,W] x, bool t => float[A,B,C,D] y", runs=None),
]  # fmt: skip
