"""Mistakes in moving, merging and removing operators that only arrange elements, and in sizes that become constants."""

from __future__ import annotations

import numpy as np

from tests.miscompilations.mistake import OURS, Mistake, floats, ints
from tests.support.onnx_text import parameters

_P = parameters({"w": (4, 4), "c": (4,), "u": (4, 4, 3, 3)})

_ROW = "float[N,4] x => float[N,4] y"
_IF = "If ({}) <then_branch = t () => (float[N,4] p) {{ p = Neg (x) }}, else_branch = e () => (float[N,4] q) {{ q = Relu (x) }}>"

MISTAKES: list[Mistake] = [
    Mistake("identity_transpose_into_gemm", "microsoft/onnxruntime#32228", "Transpose, Gemm",
        "Any Transpose in front sets transA, one that moves nothing as well.", graph="float[4,4] x => float[4,4] y", values=_P,
        original="t = Transpose <perm=[0,1]> (x) y = Gemm (t, w, c)", wrong="y = Gemm <transA=1> (x, w, c)", right="y = Gemm (x, w, c)"),
    Mistake("two_transposes", "onnx/onnx#2446", "Transpose", "Two permutations are composed in the wrong order.",
        graph="float[4,4,4] x => float[4,4,4] y", original="t = Transpose <perm=[1,0,2]> (x) y = Transpose <perm=[0,2,1]> (t)",
        wrong="y = Transpose <perm=[2,0,1]> (x)", right="y = Transpose <perm=[1,2,0]> (x)"),
    Mistake("reshape_in_front_of_transpose", "onnx/tensorflow-onnx#226", "Transpose, Reshape",
        "A Transpose moves behind a Reshape whose shape is not permuted.", graph="float[N,4,2,2] x => float[N,4,4] y",
        values={"s": ints(0, 4, 4)}, original="t = Transpose <perm=[0,2,3,1]> (x) y = Reshape (t, s)",
        wrong="y = Reshape (x, s)", right="r = Reshape (x, s) y = Transpose <perm=[0,2,1]> (r)"),
    Mistake("slice_to_the_last_but_one", "microsoft/onnxruntime#885", "Slice", "A Slice from 0 to -1 is removed as if it took everything.",
        graph="float[N,4] x => float[N,A] y", values={"a": ints(0), "b": ints(-1), "axes": ints(1), "e": ints(3)},
        original="y = Slice (x, a, b, axes)", wrong="y = Identity (x)", right="y = Slice (x, a, e, axes)"),
    Mistake("two_slices", "inisis/OnnxSlim#277", "Slice", "Merged Slices change the result; the cause is not published. Here: the second "
        "one's bounds are taken of the first one's input.", graph="float[N,8] x => float[N,A] y",
        values={"a": ints(2), "b": ints(8), "c": ints(1), "d": ints(4), "e": ints(3), "f": ints(6), "axes": ints(1)},
        original="t = Slice (x, a, b, axes) y = Slice (t, c, d, axes)", wrong="y = Slice (x, c, d, axes)",
        right="y = Slice (x, e, f, axes)"),
    Mistake("backward_slice_of_a_constant", "alibaba/heterogeneity-aware-lowering-and-optimization#275", "Slice, Add",
        "A Slice with the step -1 of a constant is computed without turning it round.", graph="float[N,4] x => float[N,4] y",
        values={**_P, "a": ints(-1), "b": ints(-5), "axes": ints(0), "step": ints(-1), "r": _P["c"][::-1].copy()},
        original="s = Slice (c, a, b, axes, step) y = Add (x, s)", wrong="y = Add (x, c)", right="y = Add (x, r)"),
    Mistake("slice_of_a_concat", "microsoft/onnxruntime#27638", "Concat, Slice", "A Slice that gives back one part of a Concat is removed "
        "although it cuts another axis, too.", graph="float[4,4] x, float[4,4] v => float[A,B] y",
        values={"a": ints(0, 1), "b": ints(4, 3), "axes": ints(0, 1), "c": ints(1), "d": ints(3), "one": ints(1)},
        original="t = Concat <axis=0> (x, v) y = Slice (t, a, b, axes)", wrong="t = Concat <axis=0> (x, v) y = Identity (x)",
        right="y = Slice (x, c, d, one)"),
    Mistake("output_deleted", "onnxsim/onnxsim#227", "Relu, Identity", "One of two outputs with the same values is deleted.",
        graph="float[N,4] x => float[N,4] y, float[N,4] t", original="y = Relu (x) t = Identity (y)",
        wrong_graph="float[N,4] x => float[N,4] y", wrong="y = Relu (x)", right="y = Relu (x) t = Relu (x)"),
    Mistake("squeeze_without_axes", "microsoft/onnxscript#2810", "Squeeze", "The axes of a Squeeze are lost; with a batch of 1 it removes "
        "the batch.", graph="float[N,4,7,7] x => float[A,B] y", values={**_P, "axes": ints(2, 3)},
        original="z = Conv (x, u) p = GlobalAveragePool (z) y = Squeeze (p, axes)", wrong="z = Conv (x, u) p = GlobalAveragePool (z) y = "
        "Squeeze (p)", right="z = Conv (x, u) p = GlobalAveragePool (z) y = Flatten (p)", sizes={"N": 1}),
    Mistake("reshape_to_the_batch_of_the_export", "kotaro-kinoshita/yomitoku#215", "Shape, Reshape",
        "The product of sequence and batch becomes a constant when the batch was 1.", graph="float[3,N,4] x => float[A,4] y",
        values={"s": ints(-1, 4), "b": ints(3, 4), "i": ints(0), "e": ints(4)}, original="r = Shape (x) f = ReduceProd <keepdims=1> (r) q "
        "= Div (f, e) d = Concat <axis=0> (q, e) y = Reshape (x, d)", wrong="y = Reshape (x, b)", right="y = Reshape (x, s)", runs=False),
    Mistake("folded_shape", "microsoft/onnxruntime#4898", "Shape, ConstantOfShape",
        "Zeros of a dynamic shape become a constant of the shape that was seen: a batch of 2.",
        graph="float[N,4] x => float[A,4] y", values={"z": floats(np.zeros((2, 4))), "zero": floats(0.0)},
        original="s = Shape (x) c = ConstantOfShape (s) y = Concat <axis=0> (x, c)", wrong="y = Concat <axis=0> (x, z)",
        right="s = Shape (x) c = Expand (zero, s) y = Concat <axis=0> (x, c)", sizes={"N": 3}),
    Mistake("reshape_allowzero", "microsoft/onnxruntime#28348", "Reshape", "Two Reshapes become one without allowzero, and 0 copies a "
        "size of the first input.", graph="float[0,6,2] x => float[A,B,C] y", values={"s": ints(3, 2, -1), "t": ints(0, 0, 3)},
        original="r = Reshape (x, s) y = Reshape <allowzero=1> (r, t)", wrong="y = Reshape (x, t)",
        right="y = Reshape <allowzero=1> (x, t)"),
    Mistake("matmul_add_into_gemm", "microsoft/onnxruntime#3764", "MatMul, Add", "An Add that widens the product becomes the bias of a "
        "Gemm, which widens nothing: no engine runs it.", graph="float[3,4] x => float[3,4] y",
        values={"w": _P["w"][:, :1].copy(), "c": _P["c"]}, original="z = MatMul (x, w) y = Add (z, c)", wrong="y = Gemm (x, w, c)",
        right="z = Gemm (x, w) y = Add (z, c)", runs=False),
    Mistake("bias_of_rank_5", "inisis/OnnxSlim#323", "MatMul, Add", "A bias of rank 5 becomes the operand C of a Gemm: no engine runs it.",
        graph="float[3,4] x => float[1,1,1,3,4] y", values={"w": _P["w"], "c": _P["c"].reshape(1, 1, 1, 1, 4)},
        original="z = MatMul (x, w) y = Add (z, c)", wrong="y = Gemm (x, w, c)", right="z = Gemm (x, w) y = Add (z, c)", runs=False),
    Mistake("gemm_of_rank_3", "microsoft/onnxruntime#22512", "MatMul, Add", "A MatMul of rank 3 with a bias becomes a Gemm, which takes "
        "matrices only.", graph="float[N,3,4] x => float[N,3,4] y", values=_P, original="z = MatMul (x, w) y = Add (z, c)",
        wrong="y = Gemm (x, w, c)", right="z = MatMul (x, w) y = Add (c, z)", runs=False),
    Mistake("input_of_the_example_size", "onnxsim/onnxsim#213", "Relu",
        "The input has the size of the example, a batch of 2, instead of any.", graph="float[N,4] x => float[N,4] y",
        original="y = Relu (x)", wrong_graph="float[2,4] x => float[2,4] y", wrong="y = Relu (x)", sizes={"N": 3}, runs=False),
    Mistake("split_in_three", OURS, "Split", "A Split into two equal parts became one into three; numbers of outputs were not compared.",
        graph="float[N,6] x => float[N,A] y", original="y, b = Split <axis=1> (x)", wrong="y, b, c = Split <axis=1> (x)"),
    Mistake("broadcast_removed", OURS, "Mul, Relu", "A factor of ones that widens one channel to four is removed.",
        graph="float[N,1,5,5] x => float[N,A,5,5] y", values={"one": floats(np.ones((1, 4, 1, 1))), "s": ints(1, 4, 1, 1)},
        original="z = Mul (x, one) y = Relu (z)", wrong="y = Relu (x)", right="z = Expand (x, s) y = Relu (z)"),
    Mistake("rank_of_a_factor", OURS, "Mul", "A factor of one with more axes than the value is removed, and its axis with it.",
        graph="float[N,4] x => float[A,N,4] y", values={"one": floats(np.ones((1, 1, 1))), "axes": ints(0)},
        original="z = Mul (x, one) y = Relu (z)", wrong="y = Relu (x)", right="z = Unsqueeze (x, axes) y = Relu (z)"),
    Mistake("height_for_width", "google-coral/examples-camera#50", "Shape, Gather, Reshape",
        "Height and width are exchanged, which only sizes that differ show.", graph="float[N,4,H,W] x => float[N,4,A,B] y",
        values={"s": ints(0, 0, -1), "order": ints(0, 1, 3, 2), "same": ints(0, 1, 2, 3)},
        original="h = Shape (x) f = Reshape (x, s) y = Reshape (f, h)", wrong="h = Shape (x) g = Gather (h, order) f = Reshape (x, s) y = "
        "Reshape (f, g)", right="h = Shape (x) g = Gather (h, same) f = Reshape (x, s) y = Reshape (f, g)", sizes={"H": 3, "W": 5}),
    Mistake("branch_without_an_output", "microsoft/onnxscript#2728", "If", "An If of a constant condition is replaced, and nothing makes "
        "its output: no engine loads it.", graph=_ROW, values={"c": np.asarray(True)},
        original=f"c2 = Identity (c) y = {_IF.format('c2')}", wrong="z = Neg (x)", right="y = Neg (x)", runs=False, verdict="refused"),
    Mistake("branch_that_is_hardly_taken", OURS, "If", "A branch that large inputs alone take is removed.", graph=_ROW,
        values={"t": floats(1000.0)}, original=f"m = ReduceMax <keepdims=0> (x) c = Greater (m, t) y = {_IF.format('c')}",
        wrong="y = Relu (x)", right=f"m = ReduceMax <keepdims=0> (x) c = Less (t, m) y = {_IF.format('c')}",
        inputs={"x": floats([[10000, 1, -2, 3]])}),
]  # fmt: skip
