"""Mistakes that show beyond the sizes and indices that are usually tried, and constants that are computed with large errors."""

from __future__ import annotations

import numpy as np

from tests.miscompilations.mistake import OURS, Mistake, floats, ints

_RNG = np.random.default_rng(5)
_TABLE = floats(_RNG.standard_normal((512, 8)))
_CUT = floats(np.where(np.arange(512)[:, None] < 100, _TABLE, 0))
_LENGTH = "s = Shape (x) l = Gather (s, one) "
_ROWS = "float[N,L,8] x => float[N,L,8] y"
_LONG = {"N": 1, "L": 200}
_CONSTANTS = {"one": np.int64(1), "zero": np.int64(0), "axis": ints(1), "start": ints(0), "many": np.int64(100)}
_INDEXED = "int64[N,L] t => float[N,L,8] y"
_INDICES = {"t": ints(3, 450, 90, 511).reshape(1, 4)}
_W = floats(_RNG.standard_normal((8, 3, 3, 3)))
# One filter is constant but for its last digits.
_W[0] = floats(1000 + 1e-4 * _W[0])
_STANDARD = floats(_W.astype(np.float64) - _W.astype(np.float64).mean(axis=(1, 2, 3), keepdims=True))
_OFF = _STANDARD.copy()
_OFF[1:] = floats(1.3 * _OFF[1:])

MISTAKES: list[Mistake] = [
    Mistake("positions_beyond_short_sequences", OURS, "Shape, Slice", "A table of positions was compared only in the rows that short "
        "sequences read.", graph=_ROWS, values={**_CONSTANTS, "p": _TABLE, "c": _CUT},
        original=_LENGTH + "e = Unsqueeze (l, start) r = Slice (p, start, e, start) y = Add (x, r)",
        wrong=_LENGTH + "e = Unsqueeze (l, start) r = Slice (c, start, e, start) y = Add (x, r)",
        right=_LENGTH + "e = Unsqueeze (l, start) r = Slice (p, start, e, start) y = Add (r, x)", sizes=_LONG),
    Mistake("cut_of_long_sequences", OURS, "Shape, Min, Slice", "A Slice to at most 100 rows was taken for a copy.",
        graph="float[N,L,8] x => float[N,M,8] y", values={**_CONSTANTS, "k": np.float32(2)},
        original=_LENGTH + "m = Min (l, many) e = Unsqueeze (m, start) z = Slice (x, start, e, axis) y = Mul (z, k)",
        wrong="y = Mul (x, k)", right=_LENGTH + "m = Min (l, many) e = Unsqueeze (m, start) z = Slice (x, start, e, axis) y = Mul (k, z)",
        sizes=_LONG),
    Mistake("size_as_a_factor", OURS, "Shape, Min, Mul", "A size in a product lost its largest value.", graph=_ROWS,
        values={**_CONSTANTS}, original=_LENGTH + "m = Min (l, many) f = Cast <to = 1> (m) y = Mul (x, f)",
        wrong=_LENGTH + "f = Cast <to = 1> (l) y = Mul (x, f)",
        right=_LENGTH + "m = Min (many, l) f = Cast <to = 1> (m) y = Mul (f, x)", sizes=_LONG),
    Mistake("difference_of_large_constants", OURS, "Add, Sub, Mul",
        "The rounding error of a computed constant excused any other one.", graph="float[N,8] x => float[N,8] y",
        values={"big": np.float32(1e8), "u": np.float32(1), "k": np.float32(2.9), "n": np.float32(0)},
        original="a = Add (big, u) d = Sub (a, big) y = Mul (x, d)", wrong="y = Mul (x, k)", right="y = Mul (x, n)",
        verdict="not_verified"),
    Mistake("filters_beside_a_constant_one", OURS, "ReduceMean, Sub, Conv", "Weights that the graph standardises: the error of one nearly "
        "constant filter excused all others.", graph="float[N,3,7,7] x => float[N,8,5,5] y", values={"w": _W, "o": _OFF, "r": _STANDARD},
        original="m = ReduceMean <axes = [1, 2, 3]> (w) d = Sub (w, m) y = Conv (x, d)", wrong="y = Conv (x, o)", right="y = Conv (x, r)"),
    Mistake("rows_behind_a_cast", OURS, "Cast, Gather", "Indices of a table that a Cast makes were only 0 and 1.", graph=_INDEXED,
        values={"p": _TABLE.astype(np.float16), "c": _CUT.astype(np.float16)}, original="w = Cast <to = 1> (p) y = Gather (w, t)",
        wrong="w = Cast <to = 1> (c) y = Gather (w, t)", right="g = Gather (p, t) y = Cast <to = 1> (g)", inputs=_INDICES),
    Mistake("rows_by_comparison", OURS, "Equal, MatMul", "A one-hot that Equal makes was read at a byte's range only.",
        graph="int64[N,L,1] t => float[N,L,8] y", values={"p": _TABLE, "c": _CUT, "r": np.arange(512)},
        original="e = Equal (t, r) o = Cast <to = 1> (e) y = MatMul (o, p)", wrong="e = Equal (t, r) o = Cast <to = 1> (e) y = MatMul (o, "
        "c)", right="e = Equal (r, t) o = Cast <to = 1> (e) y = MatMul (o, p)", inputs={"t": _INDICES["t"][..., None]}),
    Mistake("column_beside_a_large_one", OURS, "Gemm",
        "A column of small numbers was compared by the size of a large one.", graph="float[N,8] x => float[N,8] y",
        values={"w": floats(_TABLE[:8] * np.array([1e5, *[1] * 7])), "v": floats(_TABLE[:8] * np.array([1e5, -1,
        *[1] * 6]))}, original="y = Gemm (x, w)", wrong="y = Gemm (x, v)"),
    Mistake("equal_to_a_threshold", OURS, "Greater, GreaterOrEqual", "Numbers equal to the threshold were not among those compared.",
        graph="float[N,8] x => bool[N,8] y", values={"c": np.float32(0.3)}, original="y = Greater (x, c)",
        wrong="y = GreaterOrEqual (x, c)", right="y = Less (c, x)", inputs={"x": floats(np.full((2, 8), np.float32(0.3)))}),
]  # fmt: skip
