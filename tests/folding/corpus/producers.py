"""Maps that go into what is in front of them."""

from __future__ import annotations

from tests.folding.corpus.case import ALONE, Case, floats, ints

CONV, NORM = "t = Conv (x, w:8.6.1.1)", "y = Norm (z, p:8)"
CASES: dict[str, Case] = {
    "conv-padded-strided-dilated": Case("z = Conv <pads=[1,2,0,1], strides=[2,1], dilations=[1,2]> (x, w:8.6.3.3, c:8) "
        "y = Norm <epsilon=0.001> (z, p:8)", "Conv"),
    "conv-transpose-1d-groups-3": Case("z = ConvTranspose <group=3> (x, w:6.3.2) y = Norm <epsilon=0.001> (z, p:9)",
        "ConvTranspose", ins="float[N,6,L] x"),
    "conv-transpose-add": Case("t = ConvTranspose <strides=[2,2]> (x, w:6.8.2.2) z = Add (t, c:1.8.1.1) "
        "y = Norm <epsilon=0.001> (z, p:8)", "ConvTranspose"),
    "conv-add-mul-sub-div": Case(f"{CONV} t1 = Add (t, c:8.1.1) t2 = Mul (d_s:8.1.1, t1) t3 = Sub (t2, c) z = Div (t3, d_s) y = Norm "
        "<epsilon=0.001> (z, p:8)", "Conv"),
    "conv-reversed-sub": Case(f"{CONV} z = Sub (c:8.1.1, t) y = Norm <epsilon=0.001> (z, p:8)", "Conv"),
    "gemm-trans-b-alpha-beta": Case(f"z = Gemm <transB=1, alpha=0.5, beta=-2.0> (x, w:8.6, c:8) {NORM}", "Gemm", ins="float[N,6] x"),
    "gemm-trans-a": Case(f"z = Gemm <transA=1> (x, w:6.8, c:8) {NORM}", "Gemm", ins="float[6,N] x"),
    "gemm-column-constant": Case(f"z = Gemm (x, w:6.8, c:2.1) {NORM}", "Gemm", ins="float[2,6] x", method="not_run"),
    "gemm-full-constant": Case(f"z = Gemm <beta=0.5> (x, w:6.8, c:2.8) {NORM}", "Gemm", ins="float[2,6] x", method="not_run"),
    "gemm-beta-zero": Case(f"z = Gemm <beta=0.0> (x, w:6.8, c:8) {NORM}", "Gemm", ins="float[N,6] x"),
    "matmul-transpose": Case(f"t = MatMul (x, w:6.8) a = Add (t, c:8) z = Transpose <perm=[0,2,1]> (a) {NORM}",
        "MatMul Add Transpose", ins="float[N,L,6] x"),
    "matmul-left-batched": Case(f"z = MatMul (w:3.8.6, x) {NORM}", "MatMul Add", ins="float[3,6,L] x"),
    "reshape-keeps-channels": Case(f"{CONV} s = Constant <value = int64[3] {{0, 8, -1}}> () z = Reshape (t, s) {NORM}",
        "Conv Constant Reshape", ins="float[N,6,4,4] x"),
    "flatten-of-1x1": Case(f"{CONV} g = GlobalAveragePool (t) z = Flatten (g) {NORM}", "Conv GlobalAveragePool Flatten"),
    "reshape-of-linear": Case(f"t = MatMul (x, w:6.8) b = Add (t, c:8) s = Constant <value = int64[2] {{-1, 8}}> () z = Reshape (b, s) "
        f"{NORM}", "MatMul Add Constant Reshape", ins="float[N,5,6] x"),
    "average-pool-counting-padding": Case(f"{CONV} z = AveragePool <kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1> (t) {NORM}",
        "Conv AveragePool Add"),
    "reduce-mean": Case(f"{CONV} z = ReduceMean <axes=[2,3], keepdims=0> (t) {NORM}", "Conv ReduceMean"),
    "mean-of-tokens": Case(f"t = MatMul (x, w:6.8) a = Add (t, c:8) z = ReduceMean <axes=[1], keepdims=0> (a) {NORM}",
        "MatMul Add ReduceMean", ins="float[N,L,6] x"),
    "difference-of-two": Case(f"{CONV} u = Conv (x, w2:8.6.1.1, c:8) z = Sub (t, u) {NORM}", "Conv Conv Sub", options=ALONE),
    "sum-with-position-constant": Case(f"{CONV} z = Add (t, c:1.8.7.7) {NORM}", "Conv Add", ins="float[N,6,7,7] x"),
    "concat-of-channels": Case(f"t = Conv (x, w:5.6.1.1) u = Conv (x, w2:3.6.1.1) z = Concat <axis=1> (t, u) {NORM}", "Conv Conv Concat"),
    "concat-with-constant": Case(f"t = Conv (x, w:5.6.1.1) z = Concat <axis=1> (t, c:2.3.3.3) {NORM}", "Conv Concat",
        ins="float[2,6,3,3] x"),
    "pixel-shuffle-crd": Case(f'{CONV} z = DepthToSpace <blocksize=2, mode="CRD"> (t) y = Norm (z, p:2)', "Conv DepthToSpace"),
    "pixel-shuffle-dcr": Case(f'{CONV} z = DepthToSpace <blocksize=2, mode="DCR"> (t) y = Norm (z, p:2)', "Conv DepthToSpace"),
    "split-of-channels": Case(f"{CONV} s = Constant <value_ints=[3, 5]> () u, z = Split <axis=1> (t, s) v = Relu (u) y = Norm (z, p:5)",
        "Conv Constant Split Relu"),
    "slice-of-channels": Case(f"{CONV} a = Constant <value_ints=[1]> () e = Constant <value_ints=[-1]> () i = Constant <value_ints=[2]> "
        "() z = Slice (t, a, e, a, i) y = Norm (z, p:3)", "Conv Constant Constant Constant Slice"),
    "slice-of-positions": Case(f"{CONV} a = Constant <value_ints=[1]> () e = Constant <value_ints=[9223372036854775807]> () i = Constant "
        f"<value_ints=[-1]> () z = Slice (t, a, e, i) {NORM}", "Conv Constant Constant Constant Slice"),
    "pad-with-zeros": Case(f"{CONV} p = Constant <value_ints=[0,0,1,0,0,0,1,1]> () z = Pad (t, p) {NORM}", "Conv Constant Pad Add"),
    "gemm-into-reshape-to-channels": Case(f"t = Gemm (x, w:6.8, c:8) s = Constant <value_ints=[0, 8, 1, 1]> () z = Reshape (t, s) {NORM}",
        "Gemm Constant Reshape", ins="float[N,6] x"),
    "concat-through-pool-and-shuffle": Case("t = Conv (x, w:5.6.1.1) u = Conv (x, w2:3.6.1.1) v = AveragePool <kernel_shape=[2,2]> (u) p "
        '= AveragePool <kernel_shape=[2,2]> (t) c = Concat <axis=1> (p, v) z = DepthToSpace <blocksize=2, mode="CRD"> (c) y = Norm (z, '
        "p:2)", "Conv Conv AveragePool AveragePool Concat DepthToSpace"),
    "second-batch-norm": Case(f"{CONV} z = Norm (t, q:8) {NORM}", "Conv"),
    "resize-scales": Case(f'{CONV} z = Resize <mode="cubic"> (t, , f) {NORM}', "Conv Resize", values={"f": floats(1.0, 1.0, 2.0, 2.0)}),
    "resize-sizes": Case(f"{CONV} z = Resize (t, , , s) {NORM}", "Conv Resize", values={"s": ints(2, 8, 9, 11)}),
    "resize-axes-from-the-end": Case(f'{CONV} z = Resize <mode="linear", axes=[-1]> (t, , f) {NORM}',
        "Conv Resize", opset=19, values={"f": floats(2.0)}, judge="run"),
    "resize-upsample": Case(f"{CONV} z = Upsample (t, f) {NORM}", "Conv Upsample", opset=9,
        values={"f": floats(1.0, 1.0, 2.0, 2.0)}, judge="run"),
    "sum-two-constants-behind-a-convolution": Case("a = Conv (x, w:4.3.1.1) z = Sum (c:4.1.1, a, d:1.4.1.1) y = Norm (z, p:4)",
        "Conv", ins="float[N,3,H,W] x"),
    "sum-constants-behind-a-batch-norm": Case("z = Conv (x, w:4.3.1.1) n = Norm (z, p:4) y = Sum (n, c:4.1.1, d:1.4.1.1)",
        "Conv", ins="float[N,3,H,W] x"),
    "sum-a-sum-of-one": Case("a = Conv (x, w:4.3.1.1) z = Sum (a) y = Norm (z, p:4)", "Conv", ins="float[N,3,H,W] x"),
    "sum-branches": Case("a = Conv (x, w:4.3.1.1) r = Relu (x) b = Conv (r, v:4.3.1.1) z = Sum (a, b, c:4.1.1) "
        "y = Norm (z, p:4)", "Conv Relu Conv Sum", ins="float[N,3,H,W] x"),
    "sum-constants-between-a-batch-norm-and-its-reader": Case("r = Relu (x) q = Conv (r, w:4.3.1.1) z = Tanh (q) n = Norm (z, p:4) s = "
        "Sum (c:4.1.1, n, d:1.4.1.1) y = Conv (s, u:5.4.1.1)", "Relu Conv Tanh Conv", ins="float[N,3,H,W] x"),
    "sum-negated-behind": Case("z = Conv (x, w:4.3.1.1) n = Norm (z, p:4) y = Neg (n)", "Conv", ins="float[N,3,H,W] x"),
    "sum-negated-before": Case("a = Conv (x, w:4.3.1.1) z = Neg (a) y = Norm (z, p:4)", "Conv", ins="float[N,3,H,W] x"),
    "sum-negated-before-behind-another-operator": Case("a = Conv (x, w:4.3.1.1) b = Neg (a) "
        "z = AveragePool <kernel_shape=[2, 2]> (b) y = Norm (z, p:4)", "Conv Neg AveragePool", ins="float[N,3,H,W] x"),
    "sum-negated-in-front-of-a-reader": Case("r = Relu (x) q = Conv (r, w:4.3.1.1) z = Tanh (q) n = Norm (z, p:4) s = AveragePool "
        "<kernel_shape=[2, 2]> (n) e = Neg (s) y = Conv (e, u:5.4.1.1)", "Relu Conv Tanh AveragePool Neg Conv", ins="float[N,3,H,W] x"),
    "written-out-mul-add": Case("z = Conv <pads=[1,1,1,1]> (x, w:8.6.3.3) t = Mul (z, a_s:1.8.1.1) y = Add (t, b:1.8.1.1)", "Conv"),
    "written-out-mul-add-constants-first": Case("z = Conv <pads=[1,1,1,1]> (x, w:8.6.3.3) t = Mul (a_s:1.8.1.1, z) "
        "y = Add (b:1.8.1.1, t)", "Conv"),
    "written-out-sub-div-mul-add": Case("z = Conv <pads=[1,1,1,1]> (x, w:8.6.3.3) t = Sub (z, m:1.8.1.1) "
        "u = Div (t, a_s:1.8.1.1) v = Mul (u, c_s:1.8.1.1) y = Add (v, b:1.8.1.1)", "Conv"),
    "written-out-sub-of-a-negative": Case("z = Conv <pads=[1,1,1,1]> (x, w:8.6.3.3) t = Mul (z, a_s:1.8.1.1) "
        "y = Sub (b:1.8.1.1, t)", "Conv"),
    "written-out-computed-standard-deviation": Case("z = Conv <pads=[1,1,1,1]> (x, w:8.6.3.3) e = Constant <value_float = 0.001> () q = "
        "Add (k_v:1.8.1.1, e) d = Sqrt (q) t = Sub (z, m:1.8.1.1) u = Div (t, d) v = Mul (u, c_s:1.8.1.1) y = Add (v, b:1.8.1.1)", "Conv"),
    "written-out-reciprocal": Case("z = Conv <pads=[1,1,1,1]> (x, w:8.6.3.3) r = Reciprocal (a_s:1.8.1.1) t = Mul (z, r) "
        "y = Add (t, b:1.8.1.1)", "Conv"),
    "written-out-vector-through-unsqueeze": Case("z = Conv <pads=[1,1,1,1]> (x, w:8.6.3.3) i = Constant <value_ints=[1, 2]> () "
        "g = Unsqueeze (o_s:8, i) t = Mul (z, g) y = Add (t, b:1.8.1.1)", "Conv"),
    "uneven-split": Case("t = Conv (x, w:5.6.1.1) z, u = Split <axis=1, num_outputs=2> (t) v = Relu (u) y = Norm (z, p:3)",
        "Conv Split Relu", outs="y, v", opset=18),
    "relu-before-neg": Case("a = Conv (x, w:4.6.1.1) r = Relu (a) z = Neg (r) y = Norm (z, p:4)", "Conv Relu BatchNormalization", "order"),
    "relu-behind-neg": Case("r = Relu (x) q = Conv (r, w:4.6.1.1) z = Tanh (q) n = Norm (z, p+:4) e = Neg (n) s = Relu (e) "
        "y = Conv (s, u:5.4.1.1)", "Relu Conv Tanh BatchNormalization Relu Conv"),
    "matmul-before-sum": Case("t = Transpose <perm=[0, 2, 1]> (x) z = Tanh (t) n = Norm (z, p:4) s = Transpose <perm=[0, 2, 1]> (n) q = "
        "MatMul (s, m:4.6) y = Sum (e:6, q)", "Transpose Tanh Transpose MatMul Sum", ins="float[N,L,4] x"),
    "sum-before-opset-8": Case("a = Conv (x, w:4.6.1.1) r = Relu (x) b = Conv (r, v:4.6.1.1) z = Sum (a, b) "
        "y = Norm <is_test=1> (z, p:4)", "Conv Relu Conv Sum", opset=6, judge="proof"),
    "matmul-of-two-axes": Case("z = MatMul (x, w:6.8) t = Mul (z, a_s:8) y = Add (t, b:8)", "MatMul Add", ins="float[N,L,6] x"),
    "norm-norm-through-reshape": Case("r = Relu (x) t = Norm (r, p:6) s = Constant <value_ints=[0, 6, -1]> () "
        "z = Reshape (t, s) y = Norm (z, q:6)", "Relu BatchNormalization Constant Reshape"),
    "indices-are-read": Case(f"{CONV} z, i = MaxPool <kernel_shape=[2,2]> (t) y = Norm (z, p+:8)", refused="indices", outs="y, i"),
    "gemm-of-two-inputs": Case(f"z = Gemm (x, u) {NORM}", refused="not-constant", ins="float[N,6] x, float[6,8] u"),
    "resize-by-an-input": Case(f"{CONV} z = Resize (t, , f) {NORM}", refused="not-constant", ins="float[N,6,H,W] x, float[4] f"),
    "layer-norm": Case("m = ReduceMean <axes=[-1]> (x) d = Sub (x, m) q = Mul (d, d) v = ReduceMean <axes=[-1]> (q) e = Sqrt (v) n = Div "
        "(d, e) t = Mul (n, a_s:8) y = Add (t, b:8)", "ReduceMean Sub Mul ReduceMean Sqrt Div Mul Add", ins="float[N,L,8] x"),
    **{f"mean-{name}": Case(f"z = Relu (x) m = ReduceMean <axes=[{axes}]> ({of}) y = Sub (z, m)", "Relu ReduceMean Sub", opset=13)
        for name, axes, of in (("of-rows", "-1", "z"), ("of-positions", "2,3", "z"), ("of-all", "0,1,2,3", "z"),
            ("of-the-batch", "0", "z"), ("of-another-value", "0,2,3", "x"))},
}  # fmt: skip
