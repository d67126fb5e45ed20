"""Sums of branches: the operators that are left of each."""

from __future__ import annotations

import functools

import numpy as np

from tests.folding.corpus.case import Case, floats, ints

# A right merge that the proof does not see: a fold of such a file is not verified.
UNVERIFIED = {"verify": False}
HALF = "float16[N,4,H,W] x"
X = "float[N,4,H,W] x"
OTHER = '<ir_version: 8, opset_import: ["": 17, "other": 1]>'
ANY = {"header": OTHER, "judge": "proof"}
VALUES = {
    "padn": ints(1, 0, 0, 0, 0, 0, 0, 0),
    "pads1": ints(0, 0, 1, 1, 0, 0, 1, 1),
    "crop": ints(0, 0, -1, -1, 0, 0, -1, -1),
    "backwards": ints(1, 1, 0, 0, 1, 1, 0, 0),
    "minus1": ints(-1),
    "far": ints(-(2**63) + 1),
    "zero": ints(0),
    "unit": floats(1),
    "ones": ints(1, 1),
    "sixes": ints(6, 6),
    "axes23": ints(2, 3),
}
ONE = "a = Conv (x, w1:4.4.1.1)"
BESIDE, THREE, SECOND = (
    f"{name} = Conv <pads=[1,1,1,1]> (x, {weight}:4.4.3.3)" for name, weight in (("b0", "w3"), ("c", "w3"), ("c", "v3"))
)
_case = functools.partial(Case, ins=X)
CASES: dict[str, Case] = {
    "sizes-1-3-5": _case(f"a = Conv <pads=[2,2,2,2]> (x, w5:4.4.5.5) {BESIDE} c = Conv (x, w1:4.4.1.1) t = Add (a, b0) y = Add (t, c)",
        "Conv"),
    "cross-in-a-square": _case("a = Conv <pads=[1,1,1,1]> (x, w3:4.4.3.3) h = Conv <pads=[0,1,0,1]> (x, w13:4.4.1.3) "
        "v = Conv <pads=[1,0,1,0]> (x, w31:4.4.3.1) t = Add (a, h) y = Add (t, v)", "Conv"),
    "more-multiplications-of-fewer-parameters": _case("h = Conv <group=4, pads=[0,1,0,1]> (x, d13:4.1.1.3) m = Norm (h, p:4) "
        "v = Conv <group=4, pads=[1,0,1,0]> (x, d31:4.1.3.1) n = Norm (v, q:4) y = Add (m, n)", "Conv Conv Add", "cost"),
    "more-parameters-of-fewer-multiplications": _case("a = AveragePool <kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1> (x) "
        "c = Conv <group=4> (x, d1:4.1.1.1) y = Add (a, c)", "AveragePool Conv Add", "cost"),
    "cross-alone-would-grow": _case("h = Conv <pads=[0,1,0,1]> (x, w13:4.4.1.3) v = Conv <pads=[1,0,1,0]> (x, w31:4.4.3.1) "
        "y = Add (h, v)", "Conv Conv Add"),
    "different-strides-of-one-position": _case("a = Conv <pads=[1,1,1,1], strides=[2,2]> (x, w3:4.4.3.3) b0 = Conv (x, w1:4.4.1.1) "
        "y = Add (a, b0)", "Conv Conv Add", "shape", ins="float[N,4,1,1] x"),
    "different-strides-of-one-size": _case("a = Conv <pads=[1,1,1,1], strides=[2,2]> (x, w3:4.4.3.3) "
        "b0 = Conv <dilations=[3,3], strides=[1,1]> (x, w2:4.4.2.2) y = Add (a, b0)", "Conv Conv Add"),
    "stride-2": _case("a = Conv <pads=[1,1,1,1], strides=[2,2]> (x, w3:4.4.3.3) b0 = Conv <strides=[2,2]> (x, w1:4.4.1.1) "
        "y = Add (a, b0)", "Conv"),
    "stride-2-without-padding-before": _case("a = Conv <strides=[2,2]> (x, w2:4.4.2.2) "
        "b0 = Conv <strides=[2,2], pads=[0,0,1,1]> (x, w3:4.4.3.3) y = Add (a, b0)", "Conv"),
    "stride-2-equal-only-at-odd-sizes": _case("a = Conv <strides=[2,2]> (x, w2:4.4.2.2) "
        "b0 = Conv <strides=[2,2]> (x, w3:4.4.3.3) y = Add (a, b0)", "Conv Conv Add"),
    "dilated-and-point": _case("a = Conv <dilations=[2,2], pads=[2,2,2,2]> (x, w3:4.4.3.3) "
        "b0 = Conv <dilations=[3,3]> (x, w1:4.4.1.1) y = Add (a, b0)", "Conv"),
    "different-dilations": _case("a = Conv <dilations=[2,2], pads=[2,2,2,2]> (x, w3:4.4.3.3) "
        "b0 = Conv <pads=[1,1,1,1]> (x, v3:4.4.3.3) y = Add (a, b0)", "Conv Conv Add"),
    "a-dilation-that-the-other-one-divides": _case("a = Conv <dilations=[2,2], pads=[2,2,2,2]> (x, w3:4.4.3.3) "
        "b0 = Conv <pads=[2,2,2,2]> (x, w5:4.4.5.5) y = Add (a, b0)", "Conv Conv Add", "shape"),
    "one-dilation-between-its-positions": _case("a = Conv <dilations=[2,2], pads=[2,2,2,2]> (x, w3:4.4.3.3) "
        "b0 = Conv <dilations=[2,2], pads=[1,1,3,3]> (x, v3:4.4.3.3) y = Add (a, b0)", "Conv Conv Add", "shape"),
    "different-dilations-and-identity": _case("a = Conv <dilations=[2,2], pads=[2,2,2,2]> (x, w3:4.4.3.3) "
        "b0 = Conv <pads=[1,1,1,1]> (x, v3:4.4.3.3) t = Add (a, b0) y = Add (t, x)", "Conv Conv Add"),
    "shifted-by-its-pads": _case("a = Conv <pads=[1,1,1,1]> (x, w3:4.4.3.3) b0 = Conv <pads=[1,1,-0,0]> (x, w2:4.4.2.2) "
        "y = Add (a, b0)", "Conv"),
    "asymmetric-pads": _case("a = Conv <pads=[0,2,2,0]> (x, w3:4.4.3.3) b0 = Conv <pads=[2,0,0,2]> (x, v3:4.4.3.3) "
        "y = Add (a, b0)", "Conv Conv Add"),
    "asymmetric-pads-and-point": _case("a = Conv <pads=[0,2,2,0]> (x, w3:4.4.3.3) b0 = Conv (x, w1:4.4.1.1) y = Add (a, b0)", "Conv"),
    "auto-pad-same-upper": _case('a = Conv <auto_pad="SAME_UPPER"> (x, w2:4.4.2.2) b0 = Conv <pads=[0,0,1,1]> (x, w2b:4.4.2.2) '
        "y = Add (a, b0)", "Conv", method="not_run"),
    "auto-pad-same-lower": _case('a = Conv <auto_pad="SAME_LOWER"> (x, w2:4.4.2.2) '
        'b0 = Conv <auto_pad="SAME_UPPER"> (x, w3:4.4.3.3) y = Add (a, b0)', "Conv", method="not_run"),
    "auto-pad-valid": _case('a = Conv <auto_pad="VALID"> (x, w3:4.4.3.3) b0 = Conv <auto_pad="VALID"> (x, v3:4.4.3.3) '
        "y = Add (a, b0)", "Conv"),
    "auto-pad-with-stride": _case('a = Conv <auto_pad="SAME_UPPER", strides=[2,2]> (x, w3:4.4.3.3) '
        "b0 = Conv <strides=[2,2]> (x, w1:4.4.1.1) y = Add (a, b0)", "Conv Conv Add"),
    "point-in-a-kernel-without-padding": _case("a = Conv (x, w3:4.4.3.3) b0 = Conv (x, w1:4.4.1.1) "
        "c = Slice (b0, ones, sixes, axes23) y = Add (a, c)", "Conv Conv Slice Add", values=VALUES),
    "one-channel-is-broadcast": _case(f"{ONE} b0 = Conv (x, one:1.4.1.1) y = Add (a, b0)", "Conv Conv Add"),
    "positions-are-broadcast": _case(f"{ONE} b0 = Conv <dilations=[6,6]> (x, w2:4.4.2.2) y = Add (a, b0)", "Conv Conv Add"),
    "depthwise": _case("a = Conv <group=4, pads=[1,1,1,1]> (x, d3:4.1.3.3) b0 = Conv <group=4> (x, d1:4.1.1.1) t = Add (a, b0) "
        "y = Add (x, t)", "Conv"),
    "depthwise-with-dense-would-grow": _case("a = Conv <group=4, pads=[1,1,1,1]> (x, d3:4.1.3.3) b0 = Conv (x, w1:4.4.1.1) "
        "y = Add (a, b0)", "Conv Conv Add"),
    "depthwise-into-dense": _case(f"a = Conv <group=4, pads=[1,1,1,1]> (x, d3:4.1.3.3) {BESIDE} y = Sub (a, b0)", "Conv"),
    "groups-refined": _case("a = Conv <group=2, pads=[1,1,1,1]> (x, g3:4.2.3.3) "
        "b0 = Conv <group=4, pads=[1,1,1,1]> (x, d3:4.1.3.3) y = Add (a, b0)", "Conv"),
    "subtracted": _case(f"{ONE} {BESIDE} t = Sub (a, b0) y = Sub (x, t)", "Conv"),
    "constants-in-the-tree": _case(f"a = Conv (x, w1:4.4.1.1, b:4) u = Add (a, c_s:4.1.1) {BESIDE} t = Sub (scalar:1, b0) y = Add (u, t)",
        "Conv"),
    "constant-that-varies-by-position": _case(f"{ONE} u = Add (a, full:1.4.7.7) {BESIDE} y = Sub (u, b0)", "Conv Add", options=UNVERIFIED),
    "vector-meets-the-last-axis": _case(f"{ONE} u = Add (a, last:7) {BESIDE} y = Add (u, b0)", "Conv Add"),
    "scale-along-the-last-axis": _case(f"{ONE} u = Mul (a, last:7) {BESIDE} y = Add (u, b0)", "Conv Mul Conv Add"),
    "layer-scale-of-a-difference": _case("a = Conv <group=4, pads=[1,1,1,1]> (x, d3:4.1.3.3) n = Norm (x, p:4) d = Sub (a, n) "
        "u = Mul (d, c_s:4.1.1) y = Add (x, u)", "Conv"),
    "batch-norm-of-the-sum": _case("a = Conv <group=4, pads=[1,1,1,1]> (x, d3:4.1.3.3) t = Add (a, x) y = Norm (t, p:4)", "Conv"),
    "twice-the-same": _case(f"t = Add (x, x) {ONE} y = Add (t, a)", "Conv"),
    "not-linear": _case(f"{ONE} r = Relu (x) t = Add (a, r) {BESIDE} y = Add (t, b0)", "Relu Conv Add"),
    "subtracted-and-not-linear": _case(f"{ONE} r = Relu (x) t = Sub (r, a) {BESIDE} y = Sub (b0, t)", "Relu Conv Sub"),
    "two-inputs": _case(f"r = Relu (x) {ONE} c = Conv (r, v1:4.4.1.1) {BESIDE} e = Conv <pads=[1,1,1,1]> (r, v3:4.4.3.3) t = Add (a, c) u "
        "= Add (b0, e) y = Add (t, u)", "Relu Conv Conv Add"),
    "branch-read-elsewhere": _case(f"{ONE} {BESIDE} t = Add (a, b0) r = Relu (a) y = Mul (t, r)", "Conv Conv Add Relu Mul"),
    "sum-in-between-read-elsewhere": _case(f"{ONE} {BESIDE} t = Add (a, b0) c = Conv (x, v1:4.4.1.1) u = Add (t, c) y = Mul (t, u)",
        "Conv Conv Add Mul"),
    "affine-of-a-mixed-sum": _case(f"r = Relu (x) t = Add (x, r) u = Mul (t, c_s:4.1.1) {ONE} {BESIDE} v = Add (a, u) y = Add (v, b0)",
        "Relu Add Mul Conv Add", options=UNVERIFIED),
    "shift-before-padding": _case("n = Norm (x, p:4) a = Conv <pads=[1,1,1,1]> (n, w3:4.4.3.3) "
        "b0 = Conv <pads=[1,1,1,1]> (x, v3:4.4.3.3) y = Add (a, b0)", "BatchNormalization Conv Conv Add"),
    "shift-before-no-padding": _case("n = Norm (x, p:4) a = Conv (n, w3:4.4.3.3) b0 = Conv (x, v3:4.4.3.3) y = Add (a, b0)", "Conv"),
    "scale-before-padding": _case("n = Mul (x, c_s:4.1.1) a = Conv <pads=[1,1,1,1]> (n, w3:4.4.3.3) "
        "b0 = Conv <pads=[1,1,1,1]> (x, v3:4.4.3.3) y = Add (a, b0)", "Conv"),
    "padded-before-the-shift": _case("p = Pad (x, pads1) s = Conv (p, w1:4.4.1.1) n = Norm (s, p:4) a = Conv (n, w3:4.4.3.3) "
        "b0 = Conv <pads=[1,1,1,1]> (x, v3:4.4.3.3) y = Add (a, b0)", "Conv", values=VALUES),
    "padded-twice": _case("p = Pad (x, pads1) q = Pad (p, pads1) a = Conv (q, w3:4.4.3.3) c = Conv <pads=[2,2,2,2]> (x, v3:4.4.3.3) "
        "y = Add (a, c)", "Conv", values=VALUES),
    "one-pad-for-two-branches": _case("p = Pad (x, pads1) a = Conv (p, w3:4.4.3.3) c = Conv (p, v3:4.4.3.3) "
        "e = Conv <pads=[1,1,1,1]> (x, w3) t = Add (a, c) y = Add (t, e)", "Conv", values=VALUES),
    "one-pad-for-a-branch-and-something-else": _case("p = Pad (x, pads1) a = Conv (p, w3:4.4.3.3) e = Conv <pads=[1,1,1,1]> (x, "
        "v3:4.4.3.3) t = Add (a, e) r = MaxPool <kernel_shape=[3,3]> (p) y = Add (t, r)", "Pad MaxPool Conv Add", values=VALUES),
    "one-pad-of-a-point-for-two-branches": _case("s = Conv (x, w1:4.4.1.1) p = Pad (s, pads1) a = Conv (p, w3:4.4.3.3) "
        "c = Conv (p, v3:4.4.3.3) y = Add (a, c)", "Conv Conv", values=VALUES),
    "one-pad-of-a-point-for-other-sums": _case("s = Conv (x, w1:4.4.1.1) p = Pad (s, pads1) a = Conv (p, w3:4.4.3.3) c = Conv (p, "
        "v3:4.4.3.3) t = Add (a, c) r = Relu (p) e = Conv (r, w3) y = Add (t, e)", "Conv Pad Relu Conv Conv Add", values=VALUES),
    "pads-that-are-computed-from-constants": _case("l = Slice (backwards, minus1, far, zero, minus1) p = Pad (x, l) a = Conv (p, "
        f"w3:4.4.3.3) {SECOND} y = Add (a, c)", "Conv", values=VALUES),
    "padded-with-ones": _case("p = Pad (x, pads1, unit) a = Conv (p, w3:4.4.3.3) b0 = Conv <pads=[1,1,1,1]> (x, v3:4.4.3.3) "
        "y = Add (a, b0)", "Pad Conv Conv Add", values=VALUES),
    "padded-by-reflection": _case('p = Pad <mode="reflect"> (x, pads1) a = Conv (p, w3:4.4.3.3) '
        "b0 = Conv <pads=[1,1,1,1]> (x, v3:4.4.3.3) y = Add (a, b0)", "Pad Conv Conv Add", values=VALUES),
    "padded-batch": _case("p = Pad (x, padn) a = Conv (p, v1:4.4.1.1) b0 = Conv (x, w1:4.4.1.1) y = Add (a, b0)",
        "Pad Conv Conv Add", ins="float[1,4,H,W] x", values=VALUES),
    "shifted-points-before-a-kernel": _case("a = Conv <pads=[0,0,1,1]> (x, w1:4.4.1.1) c = Conv <pads=[1,1,0,0]> (x, v1:4.4.1.1) "
        "t = Add (a, c) e = Conv (t, w3:4.4.3.3) f = Conv (x, w2:4.4.2.2) y = Add (e, f)", "Conv Conv Add Conv Conv Add", "padding"),
    "cropped": _case("p = Pad (x, crop) a = Conv (p, w1:4.4.1.1) b0 = Conv (x, w3:4.4.3.3) y = Add (a, b0)", "Pad Conv Conv Add",
        values=VALUES, judge="run"),
    "cropped-for-two-branches": _case("p = Pad (x, crop) a = Conv (p, w1:4.4.1.1) c = Conv (p, v1:4.4.1.1) y = Add (a, c)", "Pad Conv",
        values=VALUES, judge="run"),
    "point-before-and-behind": _case("s = Conv (x, w1:4.4.1.1) a = Conv <pads=[1,1,1,1]> (s, w3:4.4.3.3) "
        "c = Conv <pads=[1,1,1,1]> (x, v3:4.4.3.3, b:4) e = Conv (c, v1:4.4.1.1) y = Add (a, e)", "Conv"),
    "point-with-bias-before-padding": _case(f"s = Conv (x, w1:4.4.1.1, b:4) a = Conv <pads=[1,1,1,1]> (s, w3:4.4.3.3) {SECOND} y = Add "
        "(a, c)", "Conv Conv Conv Add"),
    "expansion": _case("s = Conv (x, wide:8.4.1.1) a = Conv <pads=[1,1,1,1]> (s, narrow:4.8.3.3) y = Add (a, x)", "Conv"),
    "bottleneck-would-grow": _case("s = Conv (x, less:2.4.1.1) a = Conv <pads=[1,1,1,1]> (s, more:4.2.3.3) y = Add (a, x)",
        "Conv Conv Add"),
    "sum-below-a-point": _case(f"{ONE} {THREE} t = Add (a, c) e = Conv (t, v1:4.4.1.1) f = Conv <pads=[1,1,1,1]> (x, v3:4.4.3.3) y = Add "
        "(e, f)", "Conv"),
    "sum-below-a-shifted-padding": _case("a = Conv (x, w1:4.4.1.1, b:4) c = Conv (x, v1:4.4.1.1) t = Add (a, c) e = Conv <pads=[1,1,1,1]> "
        "(t, w3:4.4.3.3) f = Conv <pads=[1,1,1,1]> (x, v3:4.4.3.3) y = Add (e, f)", "Conv Conv Conv Add"),
    "pool-without-padding": _case("a = AveragePool <kernel_shape=[3,3]> (x) c = Conv (x, w3:4.4.3.3) y = Add (a, c)", "Conv"),
    "pool-that-counts-padding": _case(f"a = AveragePool <kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1> (x) {THREE} y = Sub (c, "
        "a)", "Conv"),
    "pool-that-does-not-count-padding": _case(f"a = AveragePool <kernel_shape=[3,3], pads=[1,1,1,1]> (x) {THREE} y = Add (a, c)",
        "AveragePool Conv Add"),
    "pool-with-dilation": _case("a = AveragePool <kernel_shape=[3,3], dilations=[2,2]> (x) c = Conv <dilations=[2,2]> (x, w3:4.4.3.3) "
        "y = Add (a, c)", "AveragePool Conv Add", "padding", opset=19),
    "pool-that-rounds-up": _case("a = AveragePool <kernel_shape=[2,2], strides=[2,2], ceil_mode=1> (x) "
        "c = Conv <strides=[2,2]> (x, w1:4.4.1.1) y = Add (a, c)", "AveragePool Conv Add"),
    # 2 x 2 windows, of which the last ones divide by fewer; the convolution makes one position, which is broadcast.
    "pool-that-rounds-up-to-two": _case("a = AveragePool <kernel_shape=[3,3], strides=[2,2], ceil_mode=1> (x) "
        "c = Conv <strides=[2,2]> (x, w3:4.4.3.3) y = Add (a, c)", "AveragePool Conv Add", ins="float[N,4,4,4] x"),
    "pool-behind-a-point": _case("s = Conv (x, w1:4.4.1.1) a = AveragePool <kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1> (s) "
        f"{THREE} y = Add (a, c)", "Conv"),
    "pool-with-nothing-to-carry-it": _case("a = AveragePool <kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1> (x) "
        "y = Sub (a, x)", "AveragePool Sub"),
    "matmuls": _case("a = MatMul (x, m:7.7) c = MatMul (x, m2:7.7) t = Add (a, c) y = Add (t, last:7)", "MatMul Add"),
    "matmul-and-identity": _case("a = MatMul (x, m:7.7) y = Add (a, x)", "MatMul"),
    "matmul-and-per-channel-of-axis-1": _case("a = MatMul (x, m:7.7) u = Mul (x, c_s:4.1.1) c = MatMul (x, m2:7.7) "
        "t = Add (a, u) y = Add (t, c)", "Mul MatMul Add", options=UNVERIFIED),
    "matmul-from-the-left": _case("a = MatMul (m:7.7, x) c = MatMul (x, m2:7.7) y = Add (a, c)", "MatMul MatMul Add"),
    "matmul-with-conv": _case("a = MatMul (x, m:7.7) c = Conv (x, w1:4.4.1.1) y = Add (a, c)", "MatMul Conv Add"),
    "n-ary-sum": _case(f"{ONE} {THREE} y = Sum (a, x, c)", "Conv"),
    "identity-and-dropout-nodes": _case(f"i = Identity (x) d = Dropout (i) {THREE} e = Identity (c) y = Add (d, e)", "Conv"),
    "divided": _case(f"a = Div (x, c_s:4.1.1) {THREE} y = Add (a, c)", "Conv"),
    "constant-divided-by-data": _case(f"a = Div (c_s:4.1.1, x) {THREE} e = Conv (x, w1:4.4.1.1) t = Add (a, c) y = Add (t, e)",
        "Div Conv Add"),
    "gemm-two": _case("a = Gemm (x, m:7.7) c = Gemm (x, m2:7.7) y = Add (a, c)", "Gemm", ins="float[M,7] x"),
    "gemm-alpha-beta-transposed": _case("a = Gemm <alpha=0.5, beta=2.0, transB=1> (x, m:7.7, last:7) "
        "c = Gemm <alpha=2.0> (x, m2:7.7) y = Sub (a, c)", "Gemm", ins="float[M,7] x"),
    "gemm-with-matmul-and-identity": _case("a = Gemm (x, m:7.7, last:7) c = MatMul (x, m2:7.7) t = Add (a, c) y = Add (x, t)",
        "Gemm", ins="float[M,7] x"),
    "gemm-batch-norm-in-front": _case("n = Norm (x, r:7) a = Gemm (n, m:7.7, last:7) o = Norm (x, u:7) c = Gemm (o, m2:7.7) "
        "t = Add (a, c) y = Mul (t, scalar:1)", "Gemm", ins="float[M,7] x"),
    "gemm-low-rank": _case("a = MatMul (x, m:7.7) s = MatMul (x, down:7.2) c = MatMul (s, up:2.7) d = Mul (c, scalar:1) "
        "y = Add (a, d)", "MatMul", ins="float[M,7] x"),
    "gemm-low-rank-and-identity-would-grow": _case("s = MatMul (x, down:7.2) c = MatMul (s, up:2.7) y = Add (x, c)",
        "MatMul MatMul Add", ins="float[M,7] x"),
    "gemm-transposed-data": _case("a = Gemm <transA=1> (x, m:7.7) c = Gemm (x, m2:7.7) y = Add (a, c)", "Gemm Gemm Add",
        ins="float[M,7] x"),
    "gemm-matrix-of-constants": _case("a = Gemm (x, m:7.7, m2:7.7) c = Gemm (x, m2) y = Add (a, c)", "Gemm Gemm Add", ins="float[M,7] x"),
    "gemm-vector-weight": _case("a = MatMul (x, last:7) c = MatMul (x, scale7:7) y = Add (a, c)", "MatMul MatMul Add", ins="float[M,7] x"),
    # outputs, and weights that are no constants
    "sum-is-an-output": _case(f"{ONE} {THREE} y = Add (a, c) z = Relu (y)", "Conv Relu", outs="y, z"),
    "branch-is-an-output": _case(f"{ONE} {THREE} y = Add (a, c)", "Conv Conv Add", outs="y, a"),
    "base-is-an-output": _case("r = Relu (x) a = Conv (r, w1:4.4.1.1) c = Conv <pads=[1,1,1,1]> (r, w3:4.4.3.3) y = Add (a, c)",
        "Relu Conv", outs="y, r"),
    "weight-is-an-input": _case(f"a = Conv (x, k) {THREE} y = Add (a, c)", "Conv Conv Add", "not-constant", ins=f"{X}, float[4,4,1,1] k"),
    "weight-is-computed": _case(f"h = Neg (k) a = Conv (x, h) {THREE} y = Add (a, c)",
        "Neg Conv Conv Add", "not-constant", ins=f"{X}, float[4,4,1,1] k"),
    "weight-may-be-given": _case(f"{ONE} {THREE} y = Add (a, c)", "Conv Conv Add", "overridable", ins=f"{X}, float[4,4,1,1] w1"),
    "weight-is-quantized": _case(f"k = DequantizeLinear (q, s) a = Conv (x, k) {THREE} y = Add (a, c)",
        "DequantizeLinear Conv Conv Add", "quantized", judge="run", values={"q": np.full((4, 4, 1, 1), 3, np.int8), "s": np.float32(0.5)}),
    "weight-of-a-later-layer": _case(f"{ONE} c = Conv <pads=[1,1,1,1]> (x, w3:4.4.3.3, b:4) t = Add (a, c) s = Add (t, x) e = Conv "
        "<pads=[1,1,1,1]> (s, w3) y = Relu (e)", "Conv Conv Relu"),
    "weight-of-a-node": _case("k = Constant <value_floats=[0.5, 1.0, 2.0, 4.0]> () g = Reshape (k, s4) a = Conv <group=4> (x, g) "
        "c = Conv <group=4, pads=[1,1,1,1]> (x, d3:4.1.3.3) y = Add (a, c)", "Conv", values={"s4": ints(4, 1, 1, 1)}),
    "training": _case(f"{ONE} n, e, v = Norm <training_mode=1> (x, p:4) y = Add (a, n)",
        "Conv BatchNormalization Add", "training", judge="proof"),
    # sizes that contradict each other, or are not known: nothing certain says so before
    "fewer-channels": _case("r = Relu (x) a = Conv (r, w1:4.4.1.1) c = Conv (r, less:2.4.1.1) y = Add (a, c)",
        "Relu Conv Conv Add", "shape", ins="float[N,C,H,W] x", judge="proof"),
    "more-channels-are-read": _case("r = Relu (x) a = Conv (r, w1:4.4.1.1) c = Conv (r, w8:4.8.1.1) y = Add (a, c)",
        "Relu Conv Conv Add", "shape", ins="float[N,C,H,W] x", judge="proof"),
    "vectors": _case("a = MatMul (x, m:7.7) c = MatMul (x, m2:7.7) y = Add (a, c)", "MatMul MatMul Add", "rank", ins="float[7] x"),
    "matmuls-of-any-rank": _case("r = other.Thing (x) a = MatMul (r, m:7.7) c = MatMul (r, m2:7.7) y = Add (a, c)",
        "Thing MatMul MatMul Add", "rank", header='<ir_version: 8, opset_import: ["": 17, "other": 1]>', judge="proof"),
    # The depthwise carrier becomes a convolution of two groups, which a batch norm behind another sum scales.
    "scaled-later": _case("a = Conv <group=4, pads=[1,1,1,1]> (x, d3:4.1.3.3) c = Conv <group=4, pads=[1,1,1,1]> (x, e3:4.1.3.3) "
        "e = Conv <group=2> (x, g1:4.2.1.1) r = Relu (x) f = Conv (r, w1:4.4.1.1) t = Sum (a, c, e) u = Add (t, f) "
        "y = Norm (u, p:4)", "Relu Conv Conv Add"),
    "channels-that-nothing-tells": _case("r = Relu (x) a = Mul (r, c_s:4.1.1) e = Conv (a, w1:4.4.1.1) u = Mul (r, d_s:4.1.1) f = Conv "
        "(u, v1:4.4.1.1) y = Add (e, f)", "Relu Mul Conv Mul Conv Add", "shape", ins="float[N,C,H,W] x", judge="proof"),
    "more-channels-are-read-below": _case("r = Relu (x) a = Conv (r, w1:4.4.1.1) e = Conv (a, w8:4.8.1.1) c = Conv (r, v1:4.4.1.1) "
        "y = Add (e, c)", "Relu Conv Conv Conv Add", "shape", ins="float[N,C,H,W] x", judge="proof"),
    "more-channels-are-normalised": _case("r = Relu (x) a = Conv (r, w1:4.4.1.1) n = Norm (a, p:3) c = Conv (r, v1:4.4.1.1) "
        "y = Add (n, c)", "Relu Conv BatchNormalization Conv Add", "shape", ins="float[N,C,H,W] x", judge="proof"),
    "convs-of-two-ranks": _case("r = other.Thing (x) a = Conv (r, w1:4.4.1.1) c = Conv (r, v:4.4.1) y = Add (a, c)",
        "Thing Conv Conv Add", "rank", **ANY),
    "pool-of-another-rank": _case("r = other.Thing (x) a = AveragePool <kernel_shape=[1]> (r) c = Conv (r, w1:4.4.1.1) y = Add (a, c)",
        "Thing AveragePool Conv Add", "rank", **ANY),
    "conv-with-matmul": _case("c = Conv (x, w1:4.4.1.1) a = MatMul (x, m:4.4) y = Add (c, a)", "Conv MatMul Add", "axis",
        ins="float[N,4,H,4] x"),
    **{f"matmul-with-{name}": _case(f"a = MatMul (x, m:4.4) c = {node} y = Add (a, c)", f"MatMul {name} Add", "axis",
        ins="float[N,4,H,4] x", values=VALUES, judge="proof") for name, node in {
        "Conv": "Conv (x, w1:4.4.1.1)", "BatchNormalization": "Norm (x, p:4)", "AveragePool": "AveragePool <kernel_shape=[1,1]> (x)",
        "Pad": "Pad (x, pads1)"}.items()},
    "weight-of-a-conv-is-a-matrix": _case("a = Conv (x, m:4.4) c = Conv (x, w1:4.4.1.1) y = Add (a, c)", "Conv Conv Add", "shape",
        judge="proof"),
    **{f"weight-of-rank-{len(shape)}": _case(f"a = {op} (x, {name}:{shape}) c = MatMul (x, m:7.7) y = Add (a, c)",
        f"{op} MatMul Add", code, judge="proof") for shape, op, name, code in (
        ("-", "MatMul", "one", "shape"), ("7", "Conv", "one", "shape"))},
    "weights-of-two-types": _case(f"{ONE} c = Conv (x, u) y = Add (a, c)", "Conv Conv Add", "type",
        judge="proof", values={"u": np.ones((4, 4, 1, 1))}),
    "weights-without-elements": _case("a = Conv (x, w1:0.4.1.1) c = Conv (x, v1:0.4.1.1) y = Add (a, c)", "Conv Conv Add",
        "shape", judge="proof"),
    "strides-of-one-axis": _case("a = Conv <strides=[1]> (x, w1:4.4.1.1) c = Conv (x, v1:4.4.1.1) y = Add (a, c)", "Conv Conv Add",
        "shape", judge="proof"),
    "kernel-shape-of-another-weight": _case("a = Conv <kernel_shape=[3,3]> (x, w1:4.4.1.1) c = Conv (x, v1:4.4.1.1) y = Add (a, c)",
        "Conv Conv Add", "shape", judge="proof"),
    "pool-without-a-window": _case("a = AveragePool (x) c = Gemm (x, m4:4.4) y = Add (a, c)", "AveragePool Gemm Add", "rank",
        ins="float[N,4] x", judge="proof"),
    "stride-0": _case("a = Conv <strides=[0,0]> (x, w1:4.4.1.1) c = Conv (x, v1:4.4.1.1) y = Add (a, c)", "Conv Conv Add",
        "bad-attribute", judge="proof"),
    "pool-of-nothing": _case("a = AveragePool <kernel_shape=[0,0]> (x) c = Conv (x, v1:4.4.1.1) y = Add (a, c)",
        "AveragePool Conv Add", "bad-attribute", judge="proof"),
    "auto-pad-and-pads": _case('a = Conv <auto_pad="VALID", pads=[1,1,1,1]> (x, w3:4.4.3.3) c = Conv (x, v3:4.4.3.3) y = Add (a, c)',
        "Conv Conv Add", "padding", judge="proof"),
    "auto-pad-of-no-name": _case('a = Conv <auto_pad="OTHER"> (x, w3:4.4.3.3) c = Conv (x, v3:4.4.3.3) y = Add (a, c)',
        "Conv Conv Add", "padding", judge="proof"),
    # a size that a file may claim is not allocated
    "huge-shifts": _case("a = Conv <pads=[0,0,1000000,1000000]> (x, w1:4.4.1.1) c = Conv <pads=[1000000,1000000,0,0]> (x, v1:4.4.1.1) t = "
        "Add (a, c) n = Norm (t, p:4) e = Conv <pads=[1000000,1000000,0,0]> (x, w1) y = Add (n, e)",
        "Conv Conv Add BatchNormalization Conv Add", "too-large", options={"only": ["parallel"]}, judge="proof"),
    "huge-pool": _case("a = AveragePool <kernel_shape=[1000000,1000000]> (x) c = Conv (x, w1:4.4.1.1) y = Add (a, c)",
        "AveragePool Conv Add", "too-large", judge="proof"),
    "huge-product": _case("a = Conv (x, v:1.20000.1.1) c = Conv (a, w:20000.1.1.1) y = Add (c, x)", "Conv Conv Add", "too-large",
        ins="float[N,20000,H,W] x", judge="proof"),
    # numbers
    "half": _case(f"{ONE} c = Conv <pads=[1,1,1,1]> (x, w3:4.4.3.3, b:4) t = Add (a, c) y = Add (t, x)", "Conv", ins=HALF, judge="run"),
    "half-overflows": _case("a = Conv (x, u) c = Conv (x, u) y = Add (a, c)", "Conv Conv Add", "overflow", ins=HALF, judge="proof",
        values={"u": np.full((4, 4, 1, 1), 60000, np.float16)}),
    "half-cancels": _case("a = Conv (x, u) c = Conv (x, u) y = Sub (a, c)", "Conv", ins=HALF, judge="proof",
        values={"u": np.full((4, 4, 1, 1), 60000, np.float16)}),
    "half-bias-overflows": _case("a = Conv (x, w1:4.4.1.1, u) c = Conv (x, v1:4.4.1.1, u) y = Add (a, c)", "Conv Conv Add",
        "overflow", ins=HALF, judge="proof", values={"u": np.full(4, 60000, np.float16)}),
    "rank-3": _case("a = Conv (x, u:4.4.1) c = Conv <pads=[1,1]> (x, v:4.4.3) n = Norm (x, p:4) y = Sum (a, c, n)", "Conv",
        ins="float[N,4,H] x"),
    "rank-5": _case("a = Conv (x, u:4.4.1.1.1) c = Conv <pads=[1,1,1,1,1,1]> (x, v:4.4.3.3.3) n = Norm (x, p:4) "
        "y = Sum (a, c, n)", "Conv", ins="float[N,4,D,H,W] x"),
    **{f"opset-{opset}": _case(f"{ONE} c = Conv <pads=[1,1,1,1]> (x, w3:4.4.3.3, b:4) t = Add (a, c) y = Add (t, x)", "Conv",
        opset=opset, judge="run" if opset > 6 else "proof", method="proved" if opset > 6 else "not_run") for opset in (6, 7, 9, 13, 21)},
    "broadcast-before-opset-7": _case(f"{ONE} c = Conv (x, one:1.4.1.1) d = Flatten (c) y = Add <broadcast=1, axis=0> (a, x)",
        "Conv Conv Flatten Add", opset=6, judge="proof"),
    # Layer scale around a pool, as in PoolFormer: a new batch norm is never written.
    "layer-scales-around-a-pool": _case("a = AveragePool <kernel_shape=[3,3], pads=[1,1,1,1]> (x) d = Sub (a, x) "
        "u = Mul (d, c_s:4.1.1) t = Add (x, u) e = Mul (t, c_s) y = Add (e, c_s)", "AveragePool Sub Mul Add Mul Add"),
}  # fmt: skip
