"""Mistakes in arithmetic: constants, algebra that forgets infinity, names, and bounds that are too wide."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.miscompilations.mistake import OURS, Mistake, floats, ints
from tests.support.onnx_text import parameters

_P = parameters({"c": (4,), "m": (4, 4), "e": (64, 4)})
_ROW = "float[N,4] x => float[N,4] y"
_LARGE = 9007199254740993  # 2^53 + 1, which no double is

MISTAKES: list[Mistake] = [
    Mistake("sign_of_mod", "apache/tvm#20170", "Mod, Add", "Mod of two constants is folded with the sign of the dividend.",
        graph="int64[N,1] x => int64[N,1] y", values={"a": ints(-5), "b": ints(3), "k": ints(-2), "r": ints(1)},
        original="i = Mod (a, b) y = Add (x, i)", wrong="y = Add (x, k)", right="y = Add (x, r)"),
    Mistake("int64_division", "apache/tvm#20281", "Div, Add", "A division of large int64 constants passes through float64 and is off by "
        "one.", graph="int64[N,1] x => int64[N,1] y", values={"a": ints(_LARGE), "b": ints(1), "k": ints(_LARGE - 1)},
        original="i = Div (a, b) y = Add (x, i)", wrong="y = Add (x, k)", right="y = Add (x, a)"),
    Mistake("two_subtractions", "PINTO0309/onnx2tf#686", "Sub", "(200 - x) - 200 is merged into one subtraction with the wrong sign.",
        graph=_ROW, values={"k": floats(200.0)}, original="d = Sub (k, x) y = Sub (d, k)", wrong="y = Identity (x)", right="y = Neg (x)"),
    Mistake("zero_minus_x", "posit-dev/orbital#108", "Sub", "0 - x is folded to x.", graph=_ROW,
        values={"k": floats(0.0)}, original="y = Sub (k, x)", wrong="y = Identity (x)", right="y = Neg (x)"),
    Mistake("negative_zero", "tensorflow/tensorflow#61939", "Mul, Div, Sign", "The product -0.0 of two constants becomes 0.0; what is "
        "divided by it has the other sign.", graph=_ROW, values={"k": floats(-0.0), "v": floats(123.0), "z": floats(0.0)},
        original="m = Mul (v, k) d = Div (x, m) y = Sign (d)", wrong="d = Div (x, z) y = Sign (d)",
        right="d = Div (x, z) e = Neg (d) y = Sign (e)"),
    Mistake("zero_times_infinity", "tile-ai/tilelang#2638", "Mul", "x * 0 is folded to 0, which it is not where x is infinite.",
        graph=_ROW, values={"z": floats(0.0), "s": floats(7.0)}, original="l = Relu (x) i = Reciprocal (l) m = Mul (i, z) n = IsNaN (m) y "
        "= Where (n, s, x)", wrong="m = Mul (x, z) n = IsNaN (m) y = Where (n, s, x)",
        right="l = Relu (x) i = Reciprocal (l) m = Mul (z, i) n = IsNaN (m) y = Where (n, s, x)"),
    Mistake("infinity_minus_infinity", "apache/tvm#19503", "Mul, Sub", "a - a is folded to 0, also where a is infinite.", graph=_ROW,
        values={"i": floats(np.inf), "s": floats(7.0), "z": floats(0.0)}, original="a = Mul (x, i) b = Mul (x, i) d = Sub (a, b) n = "
        "IsNaN (d) y = Where (n, s, x)", wrong="d = Mul (x, z) n = IsNaN (d) y = Where (n, s, x)",
        right="a = Mul (i, x) d = Sub (a, a) n = IsNaN (d) y = Where (n, s, x)"),
    Mistake("name_of_an_initializer", "pytorch/pytorch#168211", "Sub, ReduceMean", "A constant named mean and the output of the first "
        "ReduceMean share a name, and readers get the wrong one.", graph=_ROW, values=_P,
        original="a = ReduceMean <axes=[1]> (x) d = Sub (x, c) y = Mul (d, a)", wrong="a = ReduceMean <axes=[1]> (x) d = Sub (x, a) y = "
        "Mul (d, a)", right="a = ReduceMean <axes=[1]> (x) d = Sub (x, c) y = Mul (a, d)"),
    Mistake("add_to_a_gemm_with_beta", "onnx/onnx-mlir#1924", "Gemm, Add", "An Add becomes the operand C of a Gemm whose beta is 0.",
        graph=_ROW, values=_P, original="z = Gemm <beta=0.0> (x, m) y = Add (z, c)", wrong="y = Gemm <beta=0.0> (x, m, c)",
        right="y = Gemm (x, m, c)"),
    Mistake("embedding_zeroed", OURS, "Gather", "Rows of an embedding from the third on are zero; indices of 0 and 1 do not show it.",
        graph="int64[N,3] x => float[N,3,4] y", values={"e": _P["e"], "f": floats(_P["e"] * (np.arange(64) < 2)[:, None])},
        original="y = Gather (e, x)", wrong="y = Gather (f, x)", inputs={"x": np.asarray([[0, 5, 63]] * 2)}),
    Mistake("bound_of_an_unread_constant", OURS, "MatMul, Cast", "A constant in bfloat16, which no output needs, widens the bound for "
        "weights that are off by a hundredth.", graph=_ROW,
        values={**_P, "f": floats(1.01 * _P["m"]), "d": np.ones(1, ml_dtypes.bfloat16)}, original="y = MatMul (x, m)",
        wrong="y = MatMul (x, f) u = Cast <to=1> (d)"),
    Mistake("scores_beside_boxes", OURS, "Sigmoid, Concat", "Boxes in pixels and scores leave in one output, whose bound is that of the "
        "largest number: scores may be off.", graph="float[N,4] x => float[N,8] y", values={"size": floats(640.0), "off": floats(0.01)},
        original="b = Mul (x, size) s = Sigmoid (x) y = Concat <axis=1> (b, s)", wrong="b = Mul (x, size) t = Sigmoid (x) s = Add (t, "
        "off) y = Concat <axis=1> (b, s)", right="b = Mul (size, x) s = Sigmoid (x) y = Concat <axis=1> (b, s)"),
    Mistake("weight_that_a_caller_may_give", "microsoft/onnxscript#1944", "MatMul", "An initializer that is an input as well is taken as "
        "constant, and the input is gone.", graph="float[N,4] x, float[4,4] m => float[N,4] y", values=_P, original="y = MatMul (x, m)",
        wrong_graph="float[N,4] x => float[N,4] y", wrong="y = MatMul (x, m)",
        inputs={"x": floats(np.ones((2, 4))), "m": floats(np.zeros((4, 4)))}, runs=False, verdict="not_verified"),
    Mistake("division_of_negative_constants", "onnx/onnx#7570", "Div, Add", "A division of negative integer constants is folded with the "
        "floor, not towards 0.", graph="int64[N,1] x => int64[N,1] y", values={"a": ints(-7), "b": ints(2), "k": ints(-4), "r": ints(-3)},
        original="i = Div (a, b) y = Add (x, i)", wrong="y = Add (x, k)", right="y = Add (x, r)"),
    Mistake("floor_of_a_quotient", "onnx/tensorflow-onnx#2174", "Div, Mod",
        "The floor of an integer quotient becomes a Div, which cuts towards 0.", graph="int64[N,4] x => int64[N,4] y",
        values={"b": ints(3)}, original="r = Mod (x, b) d = Sub (x, r) y = Div (d, b)", wrong="y = Div (x, b)",
        right="r = Mod (x, b) n = Neg (r) d = Add (x, n) y = Div (d, b)", inputs={"x": np.asarray([[-7, -6, 6, 7]])}),
    Mistake("random_numbers_merged", "microsoft/onnxruntime#3047", "RandomNormalLike",
        "Two random numbers are one common subexpression; their difference is 0.", graph=_ROW,
        original="a = RandomNormalLike (x) b = RandomNormalLike (x) d = Sub (a, b) s = Sign (d) y = Abs (s)",
        wrong="a = RandomNormalLike (x) d = Sub (a, a) s = Sign (d) y = Abs (s)",
        right="a = RandomNormalLike (x) b = RandomNormalLike (x) d = Sub (b, a) s = Sign (d) y = Abs (s)"),
]  # fmt: skip
