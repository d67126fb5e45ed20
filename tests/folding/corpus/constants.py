"""Lone constants, maps in front of padding, and the forms of what stays."""

from __future__ import annotations

import functools

import numpy as np

from tests.folding.corpus.case import ARITHMETIC, CONV, Case

LONE: dict[str, Case] = {
    "conv-add": Case("z = Conv (x, w:8.6.3.3) y = Add (z, c:1.8.1.1)", "Conv"),
    "conv-padded-add": Case("z = Conv <pads=[1,1,1,1]> (x, w:8.6.3.3) y = Add (c:8.1.1, z)", "Conv"),
    "conv-mul": Case("z = Conv (x, w:8.6.3.3) y = Mul (z, c_s:1.8.1.1)", "Conv"),
    "conv-bias-div": Case("z = Conv (x, w:8.6.3.3, b:8) y = Div (z, c_s:8.1.1)", "Conv"),
    "conv-scalar": Case("z = Conv (x, w:8.6.3.3) y = Mul (z, c_s:-)", "Conv"),
    "conv-one-value": Case("z = Conv (x, w:8.6.3.3) y = Sub (z, c:1.1.1.1)", "Conv"),
    "sub-from": Case("z = Conv (x, w:8.6.3.3) y = Sub (c:8.1.1, z)", "Conv"),
    "mul-conv": Case("z = Mul (x, c_s:6.1.1) y = Conv <pads=[1,1,1,1]> (z, w:8.6.3.3)", "Conv"),
    "add-conv": Case("z = Add (x, c:1.6.1.1) y = Conv (z, w:8.6.3.3)", "Conv"),
    "transposed": Case("z = ConvTranspose (x, w:6.8.2.2) y = Add (z, c:8.1.1)", "ConvTranspose"),
    "through-relu": Case("z = Conv (x, w:8.6.3.3) r = Relu (z) y = Mul (r, c_v:8.1.1)", "Conv Relu"),
    "through-pool": Case("z = Conv (x, w:8.6.3.3) r = GlobalAveragePool (z) y = Add (r, c:8.1.1)", "Conv GlobalAveragePool"),
    "two-conv": Case("z = Conv (x, w:8.6.3.3) t = Add (z, c:8.1.1) y = Conv (t, v:4.8.1.1)", "Conv Conv"),
    **{f"through-a-sum-{index}": Case(f"t = Add (x, c:6.1.1) z = {node} y = Conv (z, w:8.6.1.1)", f"{node[:3]} Conv",
        ins="float[N,6,H,W] x, float[N,6,H,W] b") for index, node in enumerate(("Add (t, b)", "Add (b, t)", "Sub (t, b)", "Sub (b, t)"))},
    "matmul": Case("z = MatMul (x, w:6.4) t = Add (z, b:4) y = Mul (t, s)", "MatMul Add", ins="float[N,L,6] x",
        values={"s": np.float32(0.125)}),
    "gemm": Case("z = Gemm (x, w:6.4) t = Add (z, b:4) y = Div (t, s_s:1)", "Gemm", ins="float[N,6] x"),
    # Gelu written out stays; its last factor is a map as well, and goes with the batch norm behind it.
    **{f"gelu-{pad}": Case("z = Conv (x, w:8.6.3.3) n = Norm (z, p:8) r = Constant <value_float = 1.4142135> () "
        "o = Constant <value_float = 1.0> () h = Constant <value_float = 0.5> () d = Div (n, r) e = Erf (d) f = Add (e, o) "
        f"p = Mul (n, f) i = Mul (p, h) m = Norm (i, q:8) y = Conv <pads = {[pad] * 4}> (m, v:4.8.3.3)",
        f"Conv Constant Constant Div Erf Add Mul {'BatchNormalization ' * pad}Conv") for pad in (0, 1)},
    "stays-in-front-of-matmul": Case("z = Add (x, b:6) y = MatMul (z, w:6.4)", "Add MatMul", ins="float[N,L,6] x"),
    "stays-padded": Case("z = Add (x, c:6.1.1) y = Conv <pads=[1,1,1,1]> (z, w:8.6.3.3)", "Add Conv"),
    "stays-map-of-columns": Case("z = Conv (x, w:8.6.3.3) y = Add (z, c:1.1.1.5)", "Conv Add"),
    "stays-shift-through-relu": Case("z = Conv (x, w:8.6.3.3) r = Relu (z) y = Add (r, c:8.1.1)", "Conv Relu Add"),
    "stays-negative-through-relu": Case("z = Conv (x, w:8.6.3.3) r = Relu (z) y = Mul (r, c:8.1.1)", "Conv Relu Mul"),
    "stays-read-twice": Case("z = Conv (x, w:8.6.3.3) t = Add (z, c:8.1.1) y = Mul (t, z)", "Conv Add Mul"),
    "stays-broadcast": Case("z = Conv (x, w:1.6.3.3) y = Add (z, c:1.8.1.1)", "Conv Add"),
    "stays-divided-by": Case("z = Conv (x, w:8.6.3.3) y = Div (c_s:8.1.1, z)", "Conv Div"),
    "stays-another-axis": Case("z = Conv (x, w:5.6.3.3) y = Mul (z, c_s:1.1.5.1)", "Conv Mul"),
}  # fmt: skip
_case = functools.partial(Case, options=ARITHMETIC)
PADDED: dict[str, Case] = {
    "input": _case("z = Norm (x, p:6) y = Conv <pads=[1,1,1,1]> (z, w:8.6.3.3)", "Add Conv"),
    "strided": _case("z = Norm (x, p:6) y = Conv <pads=[1,1,1,1], strides=[2,2]> (z, w:8.6.3.3)", "Add Conv"),
    "dilated": _case("z = Norm (x, p:6) y = Conv <pads=[2,2,2,2], dilations=[2,2]> (z, w:8.6.3.3)", "Add Conv"),
    "same": _case('z = Norm (x, p:6) y = Conv <auto_pad = "SAME_UPPER"> (z, w:8.6.3.3)', "Add Conv"),
    "one-side": _case("z = Norm (x, p:6) y = Conv <pads=[1,0,0,0]> (z, w:8.6.3.3)", "Add Conv"),
    "grouped": _case("z = Norm (x, p:6) y = Conv <pads=[1,1,1,1], group = 2> (z, w:8.3.3.3)", "Add Conv"),
    "depthwise": _case("z = Norm (x, p:6) y = Conv <pads=[1,1,1,1], group = 6> (z, w:6.1.3.3)", "Add Conv"),
    "two-readers": _case("z = Norm (x, p:6) a = Conv <pads=[1,1,1,1]> (z, w:8.6.3.3) b = Conv <pads=[1,1,1,1]> (z, v:8.6.3.3) "
        "y = Mul (a, b)", "Add Conv Conv Mul"),
    "bias": _case("z = Norm (x, p:6) y = Conv <pads=[1,1,1,1]> (z, w:8.6.3.3, b:8)", "Add Conv"),
    "behind-sum": _case("a = Conv (x, v:6.6.1.1) s = Sigmoid (x) u = Add (a, s) z = Norm (u, p:6) "
        "y = Conv <pads=[1,1,1,1]> (z, w:8.6.3.3)", "Conv Sigmoid Add Conv"),
    "behind-difference": _case("a = Conv (x, v:6.6.1.1) s = Sigmoid (x) u = Sub (s, a) z = Norm (u, p:6) "
        "y = Conv <pads=[1,1,1,1]> (z, w:8.6.3.3)", "Conv Sigmoid Sub Conv"),
    "stays-read-elsewhere": _case("z = Norm (x, p:6) a = Conv <pads=[1,1,1,1]> (z, w:6.6.3.3) y = Mul (a, z)", "Mul Add Conv Mul"),
    "stays-an-output": _case("z = Norm (x, p:6) z2 = Sigmoid (z) y = Conv <pads=[1,1,1,1]> (z2, w:8.6.3.3)", "Mul Add Sigmoid Conv"),
    "stays-activation": _case("z = Norm (x, p:6) a = Tanh (z) y = Conv <pads=[1,1,1,1]> (a, w:8.6.3.3)", "Mul Add Tanh Conv"),
    "stays-reader-without-rule": _case("z = Norm (x, p:6) a = Conv <pads=[1,1,1,1]> (z, w:6.6.3.3) b = Softmax <axis = 1> (z) "
        "y = Add (a, b)", "Mul Add Conv Softmax Add"),
    "stays-computed-weight": _case("z = Norm (x, p:6) v = Tanh (q) y = Conv <pads=[1,1,1,1]> (z, v)", "Mul Add Tanh Conv",
        ins="float[N,6,H,W] x, float[8,6,3,3] q"),
}  # fmt: skip
# Nodes, and what is left of them as a Conv and as arithmetic.
_FORMS = {
    "alone": ("y = Norm (x, p:8)", "Conv", "Mul Add", "float[N,8,H,W] x"),
    "one-dimension": ("y = Norm (x, p:8)", "Conv", "Mul Add", "float[N,8,L] x"),
    "three-dimensions": ("y = Norm (x, p:8)", "Conv", "Mul Add", "float[N,8,D,H,W] x"),
    "rank-2": ("y = Norm (x, p:8)", "Mul Add", "Mul Add", "float[N,8] x"),
    "behind-relu": ("r = Relu (x) y = Norm (r, p:8)", "Relu Conv", "Relu Mul Add", "float[N,8,H,W] x"),
    "two-merged": ("a = Norm (x, p:8) r = Norm (a, q:8) y = Relu (r)", "Conv Relu", "Mul Add Relu", "float[N,8,H,W] x"),
    "with-arithmetic": ("a = Mul (x, c_s:8.1.1) r = Norm (a, p:8) y = Sigmoid (r)", "Conv Sigmoid", "Mul Add Sigmoid", "float[N,8,H,W] x"),
    "fixed-sizes": ("r = Relu (x) y = Norm (r, p:8)", "Relu Conv", "Relu Mul Add", "float[2,8,40,40] x"),
    "padded": ("r = Norm (x, p:8) y = Conv <pads=[1,1,1,1]> (r, w:4.8.3.3)", "Conv Conv", "Add Conv", "float[N,8,H,W] x"),
    "pre-activation": ("r = Norm (x, p:8) a = Relu (r) c = Conv <pads=[1,1,1,1]> (a, w:8.8.3.3) y = Add (c, x)",
        "Conv Relu Conv Add", "Mul Add Relu Conv Add", "float[N,8,H,W] x"),
}  # fmt: skip
LEFTOVER: dict[str, Case] = {
    f"{name}-{form['leftover']}": Case(nodes, left, ins=ins, options=form)
    for name, (nodes, *both, ins) in _FORMS.items() for left, form in zip(both, (CONV, ARITHMETIC))
}  # fmt: skip
# Maps in a row that find no place become one batch norm, in front of nothing, a Relu, and a Relu that is not the only reader.
_RUNS = {
    "two-norms": "t = Norm (x, p:6) y = Norm (t, q:6)",
    "behind": "t = Norm (x, p:6) u = Mul (t, k_s:6.1.1) y = Add (u, k:6.1.1)",
    "before": "t = Sub (x, k:6.1.1) u = Div (t, k_s:6.1.1) y = Norm (u, p:6)",
    "around": "t = Add (k:6.1.1, x) u = Norm (t, p:6) v = Sub (k, u) y = Mul (v, two:1)",
}
MERGED: dict[str, Case] = {
    f"{name}{tail}": Case(f"{nodes}{' r = Relu (y)' * bool(tail)}", "BatchNormalization" + " Relu" * bool(tail), outs=outs)
    for name, nodes in _RUNS.items() for tail, outs in (("", "y"), ("-relu", "r"), ("-read-twice", "r, y"))
}  # fmt: skip
# Without a batch norm none is written; the Add of the last makes six channels out of one.
UNMERGED: dict[str, Case] = {
    "mul-add": Case("r = Relu (x) t = Mul (r, k_s:6.1.1) y = Add (t, k:1.6.1.1)", "Relu Mul Add"),
    "sub-div-mul-add": Case("r = Relu (x) t = Sub (r, k:6.1.1) u = Div (t, k_s:6.1.1) v = Mul (u, k_s) y = Add (v, k)",
        "Relu Sub Div Mul Add"),
    "negated": Case("r = Relu (x) t = Mul (k_s:6.1.1, r) u = Sub (k:6.1.1, t) y = Sigmoid (u)", "Relu Mul Sub Sigmoid"),
    "along-the-last-axis": Case("r = Relu (x) t = Mul (r, k_s:6) y = Add (t, k:6)", "Relu Mul Add", ins="float[N,L,6] x"),
    "half": Case("r = Relu (x) t = Mul (r, k_s:6.1.1) y = Add (t, k:6.1.1)", "Relu Mul Add", ins="float16[N,6,H,W] x", judge="run"),
    "broadcast": Case("t = Add (x, k:6.1.1) y = Norm (t, p:6)", "Add BatchNormalization", ins="float[N,1,H,W] x"),
}  # fmt: skip
