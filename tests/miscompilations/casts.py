"""Mistakes with casts, and with constants that pass a narrower type."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.miscompilations.mistake import OURS, Mistake, floats, ints
from tests.support.onnx_text import parameters

_P = parameters({"w": (4, 4, 3, 3), "m": (4, 4)})
_ROW = "float[N,4] x => float[N,4] y"
_FINE = floats([1.003, 1.007, 1.011, 1.013])
_COARSE = floats(_FINE.astype(ml_dtypes.bfloat16))
_BIG = floats([1e30, 1, 2, 3])

MISTAKES: list[Mistake] = [
    Mistake("float_to_int_and_back", "microsoft/onnxruntime#4039", "Cast", "A Cast to an integer is removed since another one leads back.",
        graph=_ROW, original="i = Cast <to=6> (x) y = Cast <to=1> (i)", wrong="y = Identity (x)",
        right="j = Identity (x) i = Cast <to=6> (j) y = Cast <to=1> (i)"),
    Mistake("float16_and_back", "microsoft/onnxruntime#8787", "Cast", "A Cast to float16 is removed since another one leads back.",
        graph=_ROW, original="h = Cast <to=10> (x) y = Cast <to=1> (h)", wrong="y = Identity (x)"),
    Mistake("bfloat16_inside", "microsoft/onnxruntime#24842", "Cast, MatMul", "A pair of Casts between two layers is removed, and the "
        "second layer sees other numbers.", graph=_ROW, values=_P, original="z = MatMul (x, m) h = Cast <to=16> (z) g = Cast <to=1> (h) y "
        "= MatMul (g, m)", wrong="z = MatMul (x, m) y = MatMul (z, m)"),
    Mistake("unsigned_and_back", "microsoft/onnxruntime#17953", "Cast", "A Cast to an unsigned type and back is removed: negative numbers "
        "change.", graph="int64[N,4] x => int64[N,4] y", original="u = Cast <to=2> (x) y = Cast <to=7> (u)", wrong="y = Identity (x)",
        inputs={"x": np.asarray([[-1, 0, 1, 300]] * 2)}),
    Mistake("uint8_through_int8", OURS, "Cast", "A uint8 passes int8 on its way to float: numbers from 128 on become negative.",
        graph="uint8[N,4] x => float[N,4] y", original="y = Cast <to=1> (x)", wrong="i = Cast <to=3> (x) y = Cast <to=1> (i)",
        right="i = Cast <to=6> (x) y = Cast <to=1> (i)", inputs={"x": np.asarray([[0, 127, 128, 255]] * 2, np.uint8)}),
    Mistake("chain_through_an_integer", OURS, "Conv, Cast, BatchNormalization", "A Cast to an integer inside a fold counted as a copy.",
        graph="float[N,4,5,5] x => float[N,4,3,3] y", values={**_P, "k": floats(2.0), "f": floats(2 * _P["w"])},
        original="z = Conv (x, w) i = Cast <to=6> (z) t = Cast <to=1> (i) y = Mul (t, k)",
        wrong="z = Conv (x, f) i = Cast <to=6> (z) y = Cast <to=1> (i)", right="z = Conv (x, w) i = Cast <to=6> (z) t = Cast <to=1> (i) y "
        "= Add (t, t)"),
    Mistake("constant_through_bfloat16", OURS, "Cast, Add", "A constant passes a narrower type and is evaluated in the wide one.",
        graph=_ROW, values={"fine": _FINE, "coarse": _COARSE}, original="h = Cast <to=16> (fine) k = Cast <to=1> (h) y = Add (x, k)",
        wrong="y = Add (x, fine)", right="y = Add (x, coarse)"),
    Mistake("constant_through_float16", OURS, "Cast, Min", "A constant overflows in a narrower type and is evaluated in the wide one.",
        graph=_ROW, values={"big": _BIG, "top": floats([np.inf, 1, 2, 3])}, original="h = Cast <to=10> (big) k = Cast <to=1> (h) d = Div "
        "(x, k) e = Sign (d) y = Abs (e)", wrong="d = Div (x, big) e = Sign (d) y = Abs (e)",
        right="d = Div (x, top) e = Sign (d) y = Abs (e)"),
    Mistake("any_constant_for_an_overflow", OURS, "Cast, Div", "A constant that overflows on its way through float16 was equal to any "
        "other one.", graph=_ROW, values={"big": _BIG, "any": floats([5, 1, 2, 3])},
        original="h = Cast <to=10> (big) k = Cast <to=1> (h) y = Div (x, k)", wrong="y = Div (x, any)",
        right="h = Cast <to=10> (big) k = Cast <to=1> (h) r = Reciprocal (k) y = Mul (x, r)"),
    Mistake("int64_through_float", OURS, "Cast, Add", "An int64 constant that float32 cannot hold keeps its last digit.",
        graph="int64[N,1] x => int64[N,1] y", values={"k": ints(16777217), "r": ints(16777216)},
        original="h = Cast <to=1> (k) i = Cast <to=7> (h) y = Add (x, i)", wrong="y = Add (x, k)", right="y = Add (x, r)"),
    Mistake("cast_like", OURS, "CastLike, Add", "A constant is cast like a computed one of another type, and was taken as it is.",
        graph=_ROW, values={"big": _BIG, "like": np.asarray([1.0], np.float16)}, original="l = Neg (like) h = CastLike (big, l) k = Cast "
        "<to=1> (h) d = Div (x, k) e = Sign (d) y = Abs (e)", wrong="d = Div (x, big) e = Sign (d) y = Abs (e)",
        right="l = Neg (like) h = CastLike (big, l) k = Cast <to=1> (h) d = Div (x, k) e = Abs (d) y = Sign (e)"),
    Mistake("cast_in_front_of_a_factor_of_one", "microsoft/onnxruntime#32416", "Cast, Mul",
        "Two rules remove neighbours, and the value between them has no maker: no engine loads it.", graph=_ROW,
        values={"one": floats(1.0)}, original="mid = Cast <to=1> (x) z = Mul (mid, one) y = Relu (z)",
        wrong="y = Relu (mid)", right="y = Relu (x)", runs=False, verdict="refused"),
]  # fmt: skip
