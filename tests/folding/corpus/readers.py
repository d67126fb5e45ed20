"""Maps that go into what reads them, or part, and maps that stay in front of a reader, with the reason."""

from __future__ import annotations

from tests.folding.corpus.case import ALONE, Case, floats, ints

NORM = "z = Norm (x, p:6)"
CASES: dict[str, Case] = {
    "conv-valid": Case('z = Norm <epsilon=0.001> (x, p:6) y = Conv <auto_pad="VALID"> (z, w:8.6.3.3)', "Conv"),
    "conv-transpose-1x1-grouped": Case("z = Norm <epsilon=0.001> (x, p:6) y = ConvTranspose <group=2> (z, w:6.4.1.1)", "ConvTranspose"),
    "gemm-trans-b-alpha-beta": Case(f"{NORM} y = Gemm <transB=1, alpha=0.5, beta=-2.0> (z, w:8.6, c:8)", "Gemm", ins="float[N,6] x"),
    "gemm-column-constant": Case(f"{NORM} y = Gemm (z, w:6.8, c:2.1)", "Gemm", ins="float[2,6] x", method="not_run"),
    "matmul-add": Case(f"{NORM} t = MatMul (z, w:6.8) y = Add (t, c:8)", "MatMul Add", ins="float[N,6] x"),
    "matmul-left": Case(f"{NORM} y = MatMul (w:8.6, z)", "MatMul Add", ins="float[N,6,L] x"),
    "flatten": Case(f"{NORM} t = Flatten (z) y = Gemm (t, w:36.8, c:8)", "Flatten Gemm", ins="float[N,6,3,2] x"),
    "transpose": Case(f"{NORM} t = Transpose <perm=[0,2,1]> (z) a = MatMul (t, w:6.8) y = Add (a, c:8)",
        "Transpose MatMul Add", ins="float[N,6,L] x"),
    "global-average-pool": Case(f"{NORM} g = GlobalAveragePool (z) f = Flatten (g) y = Gemm (f, w:6.8, c:8)",
        "GlobalAveragePool Flatten Gemm"),
    "two-consumers": Case(f"{NORM} u = Conv (z, w:8.6.1.1) v = Conv (z, w2:8.6.1.1) y = Add (u, v)", "Conv Conv Add", options=ALONE),
    "concat": Case(f"{NORM} t = Concat <axis=1> (x2, z) y = Conv (t, w:8.8.1.1)", "Concat Conv",
        ins="float[N,6,H,W] x, float[N,2,H,W] x2"),
    "space-to-depth": Case(f"{NORM} t = SpaceToDepth <blocksize=2> (z) y = Conv (t, w:8.24.1.1)", "SpaceToDepth Conv",
        ins="float[N,6,4,4] x"),
    "split": Case(f"{NORM} s = Constant <value_ints=[2, 4]> () a, b = Split <axis=1> (z, s) u = Conv (a, w:8.2.3.3) v = Conv (b, "
        "w2:8.4.3.3) y = Add (u, v)", "Constant Split Conv Conv Add"),
    "two-slices": Case(f"{NORM} o = Constant <value_ints=[0]> () h = Constant <value_ints=[2]> () e = Constant <value_ints=[99]> () i = "
        "Constant <value_ints=[1]> () a = Slice (z, o, h, i) b = Slice (z, h, e, i) u = Conv (a, w:8.2.1.1) v = Conv (b, w2:8.4.1.1) y = "
        "Add (u, v)", "Constant Constant Constant Constant Slice Slice Conv Conv Add"),
    "consumers-of-many-kinds": Case(f"{NORM} a = Conv (z, w:8.6.3.3) g = GlobalAveragePool (a) f = Flatten (g) h = GlobalAveragePool (z) "
        "i = Flatten (h) k = Gemm (i, w2:6.8, c:8) t = MatMul (i, w3:6.8) q = Add (t, c) r = Sum (f, k, q) y = Relu (r)",
        "Conv GlobalAveragePool Flatten GlobalAveragePool Flatten Gemm MatMul Add Sum Relu", options=ALONE),
    "a-constant-of-each-reader": Case(f"{NORM} a = Add (z, k:6.1.1) u = Conv <pads=[1,1,1,1]> (a, w:8.6.3.3) b = Sub (l:1.6.1.1, z) v = "
        "Conv <pads=[1,1,1,1]> (b, w) y = Add (u, v)", "Add Conv Sub Conv Add"),
    "the-same-reader-twice": Case(f"{NORM} a = Identity (z) t = Concat <axis=1> (z, a) y = Conv (t, w:8.12.1.1)", "Identity Concat Conv"),
    "between-two-convs": Case(f"{NORM} r = Relu (z) t = Norm (r, q:6) u = Conv (t, w:8.6.3.3) y = Norm (u, r:8)",
        "BatchNormalization Relu Conv"),
    "residual-relu-padded-conv": Case("a = Conv (x, v:6.6.1.1, c:6) t = Add (a, x) z = Norm (t, p+:6) r = Relu (z) "
        "y = Conv <pads=[1,1,1,1]> (r, w:8.6.3.3)", "Conv Add Relu Conv", options=ALONE),
    "residual-leaky-relu-two-convs": Case("a = Conv (x, v:6.6.1.1) t = Sub (x, a) z = Norm (t, p+:6) "
        "r = LeakyRelu <alpha=0.2> (z) f = Conv <pads=[1,1,1,1]> (r, w:8.6.3.3) g = Conv <strides=[1,1]> (r, w2:8.6.1.1) "
        "y = Add (f, g)", "Conv Sub LeakyRelu Conv Conv Add", options=ALONE),
    "prelu": Case("a = Conv (x, v:6.6.1.1) t = Add (x, a) z = Norm (t, p+:6) r = PRelu (z, s:6.1.1) "
        "y = Conv <pads=[1,1,1,1]> (r, w:8.6.3.3)", "Conv Add PRelu Conv", options=ALONE),
    "product-then-sums": Case("a = Conv (x, v:6.6.1.1) t = Mul (a, x) z = Norm (t, p+:6) f = Add (z, d:6.1.1) g = Sub (d, z) "
        "i = Sigmoid (f) j = Sigmoid (g) y = Add (i, j)", "Conv Mul Add Sub Sigmoid Sigmoid Add"),
    "resize-nearest": Case(f'{NORM} r = Resize <mode="nearest"> (z, , f) y = Conv (r, w:8.6.3.3)', "Resize Conv",
        values={"f": floats(1, 1, 2, 2)}),
    "resize-linear": Case(f'{NORM} r = Resize <mode="linear"> (z, , f) y = Conv (r, w:8.6.3.3)', "Resize Conv",
        values={"f": floats(1, 1, 2, 2)}),
    "resize-cubic": Case(f'{NORM} r = Resize <mode="cubic"> (z, , f) y = Conv (r, w:8.6.3.3)', "Resize Conv",
        values={"f": floats(1, 1, 2, 2)}),
    "scale-before-padding": Case(f"{NORM} y = Conv <pads=[1,1,1,1]> (z, w:8.6.3.3)", "Conv",
        values={"p_b": floats(*[0] * 6), "p_m": floats(*[0] * 6)}),
    # h / k would be divided by a scale near 0.
    "tiny-scale": Case("a = Conv (x, v:6.6.1.1, c:6) t = Add (a, x) z = Norm (t, p:6) r = Relu (z) y = Conv <pads=[1,1,1,1]> (r, "
        "w:8.6.3.3)", "Conv Add BatchNormalization Relu Conv", values={"p_s": floats(1, 1, 1e-12, 1, 1, 1)}, options=ALONE),
}  # fmt: skip
REFUSED: dict[str, Case] = {
    "negative-scale-before-relu": Case("a = Conv (x, v:6.6.1.1, c:6) t = Add (a, x) z = Norm (t, p:6) r = Relu (z) "
        "y = Conv <pads=[1,1,1,1]> (r, w:8.6.3.3)", refused="order", options=ALONE),
    "padded": Case(f"{NORM} y = Conv <pads=[1,1,1,1]> (z, w:8.6.3.3)", refused="padding"),
    "auto-padded": Case(f'{NORM} y = Conv <auto_pad="SAME_LOWER"> (z, w:8.6.3.3)', refused="padding"),
    "conv-transpose-3x3": Case("z = Norm <epsilon=0.001> (x, p:6) y = ConvTranspose (z, w:6.8.3.3)", refused="padding"),
    "relu": Case(f"{NORM} r = Relu (z) y = Conv (r, w:8.6.1.1)", refused="order"),
    "a-sum-with-something-else": Case(f"{NORM} r = Add (z, x) y = Conv (r, w:8.6.1.1)", refused="no-rule", options=ALONE),
    "a-product": Case(f"{NORM} r = Mul (z, x) y = Conv (r, w:8.6.1.1)", refused="shift"),
    "a-divisor": Case(f"{NORM} r = Div (x, z) y = Conv (r, w:8.6.1.1)", refused="shift"),
    "zero-padding": Case(f"{NORM} p = Constant <value_ints=[0,0,1,1,0,0,1,1]> () r = Pad (z, p) y = Conv (r, w:8.6.1.1)", refused="shift"),
    "zero-padding-behind": Case(f"{NORM} p = Constant <value_ints=[0,0,0,0,0,0,1,0]> () r = Pad (z, p) y = Conv (r, w:8.6.1.1)",
        refused="shift"),
    "padding-with-a-value": Case(f"{NORM} p = Constant <value_ints=[0,0,1,1,0,0,1,1]> () v = Constant <value_float = 2.0> () r = Pad (z, "
        "p, v) y = Conv (r, w:8.6.1.1)", refused="padding"),
    "padded-channels": Case(f'{NORM} p = Constant <value_ints=[0,0,0,0,0,2,0,0]> () r = Pad <mode="edge"> (z, p) y = Conv (r, w:8.8.1.1)',
        refused="axis"),
    "one-part-of-two": Case(f"{NORM} a, b = Split <axis=1> (z) u = Conv (a, w:8.3.1.1) v = Sigmoid (b) y = Concat <axis=1> (u, v)",
        refused="no-rule"),
    "reversed-channels": Case(f"{NORM} a = Constant <value_ints=[-1]> () e = Constant <value_ints=[-9]> () i = Constant <value_ints=[1]> "
        "() r = Slice (z, a, e, i, a) y = Conv (r, w:8.6.1.1)", refused="axis"),
    "one-of-two-readers": Case(f"{NORM} u = Conv (z, w:8.6.1.1) v = Sigmoid (z) y = Concat <axis=1> (u, v)", refused="no-rule"),
    "graph-output": Case(f"{NORM} y = Conv (z, w:8.6.1.1)", refused="graph-output", outs="y, z"),
    "dynamic-weight": Case(f"{NORM} w = Reshape (x, s) y = Conv (z, w)", refused="not-constant", ins="float[N,6,H,W] x, int64[4] s"),
    "resize-crop": Case('t = Conv (x, w:8.6.1.1) z = Resize <mode="linear", coordinate_transformation_mode="tf_crop_and_resize", '
        "extrapolation_value=3.0> (t, roi, f) y = Norm (z, p:8)", refused="crop",
        values={"f": floats(1.0, 1.0, 2.0, 2.0), "roi": floats(0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.5, 1.5)}),
    "resize-channels": Case("t = Conv (x, w:8.6.1.1) z = Resize (t, , f) y = Norm (z, p:16)", refused="axis",
        values={"f": floats(1.0, 2.0, 1.0, 1.0)}),
    "resize-channels-by-size": Case("t = Conv (x, w:8.6.1.1) z = Resize (t, , , s) y = Norm (z, p:16)", refused="axis",
        values={"s": ints(2, 16, 7, 7)}),
    "resize-channels-by-axes": Case("t = Conv (x, w:8.6.1.1) z = Resize <axes=[1]> (t, , f) y = Norm (z, p:16)", refused="axis",
        opset=19, values={"f": floats(2.0)}),
    "resize-channels-from-the-end": Case("t = Conv (x, w:8.6.1.1) z = Resize <axes=[-3]> (t, , f) y = Norm (z, p:16)",
        refused="axis", opset=19, values={"f": floats(2.0)}),
    "resize-one-factor-for-all-axes": Case('t = Conv (x, w:8.6.1.1) z = Resize <keep_aspect_ratio_policy="not_larger"> (t, , , s) y = '
        "Norm (z, p:16)", refused="axis", opset=19, values={"s": ints(4, 16, 14, 14)}),
    "resize-one-factor-although-the-channels-are-asked-to-stay": Case("t = Conv (x, w:8.6.1.1) "
        'z = Resize <keep_aspect_ratio_policy="not_smaller"> (t, , , s) y = Norm (z, p:16)', refused="axis", opset=19,
        values={"s": ints(2, 8, 14, 14)}),
}  # fmt: skip
