"""Models that tools are known to break: wrong axes, training, foreign operators, shared parameters, constants of every form."""

from __future__ import annotations

import numpy as np

from tests.folding.corpus.case import ALONE, Case, ints

FOREIGN = '<ir_version: 8, opset_import: ["": 17, "other": 1]>'
CONV, NORM = "z = Conv (x, w:8.6.1.1)", "y = Norm (z, p:8)"
X = "float[N,6,H,W] x"
SHAPED = "y = BatchNormalization (z, k, p_b:8, p_m:8, p_v:8)"
EIGHT = "0.5, -1.25, 2.0, 1.5, -0.75, 3.0, 0.25, -2.5"
CASES: dict[str, Case] = {
    # sizes that agree by chance
    "transpose-behind-matmul": Case(f"t = MatMul (x, w:6.8) z = Transpose <perm=[0,2,1]> (t) {NORM}", "MatMul Transpose Add",
        ins="float[N,8,6] x"),
    "matmul-over-positions": Case(f"z = MatMul (x, w:6.8) {NORM}", refused="axis", ins="float[N,8,6] x"),
    "batched-weight": Case(f"z = MatMul (x, w:3.6.8) {NORM}", refused="axis", ins="float[3,8,6] x"),
    "reshape-of-rows-to-channels": Case(f"t = MatMul (x, w:6.8) z = Reshape (t, c) {NORM}", refused="reshape",
        ins="float[16,6] x", values={"c": ints(2, 8, 8)}),
    "vector-meets-the-last-axis": Case(f"t = Conv (x, w:8.6.1.1) z = Mul (t, d:8) {NORM}", "Conv Mul BatchNormalization",
        ins="float[2,6,3,8] x"),
    "square-transposed-weight": Case("z = ConvTranspose (x, w:6.6.3.3) y = Norm (z, p:6)", "ConvTranspose"),
    # training
    "training": Case(f"{CONV} y, a, b = Norm <training_mode=1> (z, p:8)", refused="training"),
    "five-outputs": Case(f"{CONV} y, a, b, c, d = Norm (z, p:8)", refused="training", outs="y, a", opset=9),
    "five-outputs-unused": Case(f"{CONV} y, a, b, c, d = Norm <is_test=1> (z, p:8)", "Conv", opset=6, judge="proof"),
    "spatial-0-at-1": Case(f"{CONV} y = Norm <spatial=0, is_test=1> (z, p:8)", refused="not-per-channel", opset=1),
    "spatial-0-at-7": Case(f"{CONV} y = Norm <spatial=0> (z, p:8)", refused="not-per-channel", opset=7),
    # No engine takes the attribute there, which says what the operator does.
    "spatial-1-at-9": Case(f"{CONV} y = Norm <spatial=1> (z, p:8)", "Conv", opset=9, judge="proof", method="not_run"),
    "spatial-1-at-14": Case(f"{CONV} y = Norm <spatial=1> (z, p:8)", "Conv", opset=14, judge="proof", method="not_run"),
    "statistics-of-the-batch": Case(f"{CONV} m = ReduceMean <axes=[0,2,3]> (z) d = Sub (z, m) q = Mul (d, d) "
        "v = ReduceMean <axes=[0,2,3]> (q) e = Sqrt (v) n = Div (d, e) s = Mul (n, a:1.8.1.1) y = Add (s, b:1.8.1.1)",
        "Conv ReduceMean Sub Mul ReduceMean Sqrt Div Mul Add"),
    # foreign and unknown
    "namesake": Case(f"{CONV} y = other.Norm (z, p:8)", "Conv BatchNormalization", header=FOREIGN, judge="proof"),
    "foreign-conv": Case(f"z = other.Conv (x, w:8.6.1.1) {NORM}", refused="no-rule", header=FOREIGN),
    "unknown-opset": Case(f"{CONV} {NORM}", refused="opset", opset=999),
    "unknown-attribute": Case(f"{CONV} y = Norm <surprise=1> (z, p:8)", refused="unknown-attribute"),
    # what a caller gives
    "weight-may-be-given": Case(f"{CONV} {NORM}", refused="overridable", ins=f"{X}, float[8,6,1,1] w"),
    "mean-may-be-given": Case(f"{CONV} {NORM}", refused="overridable", ins=f"{X}, float[8] p_m"),
    "mean-is-given": Case(f"{CONV} y = BatchNormalization (z, p_s:8, p_b:8, m, p_v:8)", refused="not-constant", ins=f"{X}, float[8] m"),
    "bias-is-given": Case(f"z = Conv (x, w:8.6.1.1, c) {NORM}", refused="not-constant", ins=f"{X}, float[8] c"),
    "bias-is-absent": Case(f'z = Conv (x, w:8.6.1.1, "") {NORM}', "Conv"),
    # shared values and parameters
    "conv-is-read-twice": Case(f"{CONV} {NORM} q = Relu (z)", refused="shared", outs="y, q"),
    "sizes-of-the-conv": Case(f"""{CONV} {NORM} s = If (c) <then_branch = t () => (int64[4] a) {{ a = Shape (z) }},
        else_branch = e () => (int64[4] b) {{ b = Shape (x) }}>""", refused="captured", ins=f"{X}, bool c", outs="y, s"),
    "weight-of-two-convs": Case(f"{CONV} q = Conv (x, w) {NORM}", "Conv Conv", outs="y, q"),
    "weight-of-two-norms": Case(f"{CONV} u = Conv (x, w, c:8) q = Norm (u, q:8) {NORM}", "Conv Conv", outs="y, q"),
    "weight-of-three-convs": Case(f"{CONV} u = Conv (x, w) v = Conv (x, w) a = Norm (z, p:8) b = Norm (u, q:8) c = Add (a, b) "
        "y = Add (c, v)", "Conv Conv Conv Add Add", options=ALONE),
    "weight-is-an-output": Case(f"{CONV} {NORM}", "Conv", outs="float[N,8,A,B] y, float[8,6,1,1] w"),
    # An exporter may make bn.bias and running_mean one initializer.
    "one-bias-and-mean": Case(f"{CONV} y = BatchNormalization (z, p_s:8, p_b:8, p_b, p_v:8)", "Conv"),
    "residual": Case("t = Conv (x, w:6.6.1.1) z = Add (t, x) y = Norm (z, p:6)", refused="no-producer", options=ALONE),
    "part-of-a-split-of-rows": Case(f"t = Conv (x, w:8.6.1.1) z, u = Split <axis=2> (t) {NORM} r = Relu (u)", refused="shared",
        ins="float[N,6,4,4] x", outs="y, r"),
    # windows, means and axes
    "max-pool": Case("t = Conv (x, w:8.6.1.1) z = MaxPool <kernel_shape=[2,2], pads=[1,1,1,1]> (t) y = Norm (z, p+:8)", "Conv MaxPool"),
    # The elements of a window are on both sides of the data, and its maximum is the lowest number.
    **{f"{op.lower()}-of-padding-{size}": Case(f"z = Conv (x, w:4.4.1) t = {op} <kernel_shape=[2], dilations=[2], pads=[1,1]> (z) "
        "y = Norm (t, p+:4)", refused="padding", ins=f"float[N,4,{size}] x", opset=19)
        for op in ("MaxPool", "AveragePool") for size in ("1", "L")},
    "dilated-max-pool": Case("z = Conv (x, w:4.4.1) t = MaxPool <kernel_shape=[3], dilations=[2], pads=[2,2]> (z) "
        "y = Norm (t, p+:4)", "Conv MaxPool", ins="float[N,4,8] x"),
    # ONNX Runtime takes it, where ONNX's inference leaves it out and gives another rank.
    "negative-axis-before-11": Case("t = MatMul (x, w:4.4) z = Squeeze <axes=[-2]> (t) y = Norm (z, p:4)", refused="opset",
        ins="float[2,1,4] x", outs="float[2,4] y", opset=9),
    # Data of one axis have one channel, which is none of their elements.
    **{f"one-channel-without-an-axis-{index}": Case(f"z = {node} y = Norm (z, p:1)", refused=code, ins="float[6] x, int64[6] i")
        for index, (node, code) in enumerate((("LayerNormalization (x, a:6, b:6)", "shape"), ("Gather (t:9, i)", "shape"),
            ('Einsum <equation="i,ij->j"> (x, w:6.6)', "axis")))},
    "no-channels": Case("z = Conv (x, w:0.6.1.1) y = Norm (z, p:0)", "Conv", judge="run", options={"verify": False}),
    # Nothing moves into the convolution: its weight, which another one reads, is not copied.
    "shift-before-padding": Case("z = BatchNormalization <epsilon=0.0> (x, u, p_b:6, p_m:6, u) "
        "a = Conv <pads=[1,1,1,1]> (z, w:8.6.3.3) b = Conv <pads=[1,1,1,1]> (x, w) r = Relu (b) y = Add (a, r)",
        "Add Conv Conv Relu Add", "padding", values={"u": np.ones(6, np.float32)}, options={"leftover": "arithmetic"}),
    "mean-of-no-elements": Case("t = Conv (x, w:4.4.1) z = ReduceMean <axes=[0, 2]> (t) y = Norm (z, p:4)", refused="shape",
        ins="float[0,4,3] x", opset=13),
    # The batch norm's channels are axis 1; the last axis may have size 1.
    "constant-that-enlarges-another-axis": Case("t = Norm (x, q:1) u = Mul (t, c:3) v = Add (u, d:3) y = MatMul (v, w:3.3)",
        "BatchNormalization Mul Add MatMul", ins="float[N,1,L] x", sizes={"L": 1}),
    "another-form-in-an-unknown-rank": Case("r = other.Thing (x) y = Norm (r, p:6)", refused="rank", options={"leftover": "conv"},
        header=FOREIGN),
    # A value of one channel gets no more: its constant, and what asks for its sizes, would grow with it.
    **{f"one-channel-{kind}-{size}": Case(f"u = Mul (x, k_s:1) {nodes} y = Norm (z, p:3) s = Shape (u)", f"Mul {left} "
        "BatchNormalization Shape", ins=f"float[N,{size},H,W] x", outs="y, s", sizes={"C": 1}) for size in "1C"
        for kind, nodes, left in (("constant", "z = Add (u, c:3.1.1)", "Add"),
            ("operand", "v = Conv (x, w:3.1.1.1) z = Add (u, v)", "Conv Add"))},
    # constants in every form
    "floats": Case(f"k = Constant <value_floats=[{EIGHT}]> () {CONV} {SHAPED}", "Conv"),
    "tensor": Case(f"k = Constant <value=float[8] {{{EIGHT}}}> () {CONV} {SHAPED}", "Conv"),
    "identity": Case(f"i = Constant <value=float[8] {{{EIGHT}}}> () k = Identity (i) {CONV} {SHAPED}", "Conv"),
    "squeezed": Case(f"i = Constant <value=float[1,8] {{{EIGHT}}}> () a = Constant <value=int64[1] {{0}}> () "
        f"k = Squeeze (i, a) {CONV} {SHAPED}", "Conv"),
    "cast": Case(f"i = Constant <value=double[8] {{{EIGHT}}}> () k = Cast <to=1> (i) {CONV} {SHAPED}", "Conv"),
    "of-shape": Case("n = Constant <value_ints=[8]> () k = ConstantOfShape <value=float[1] {1.5}> (n) " f"{CONV} {SHAPED}", "Conv"),
    "of-shape-zero": Case(f"n = Constant <value_ints=[8]> () k = ConstantOfShape (n) {CONV} {SHAPED}", "Conv"),
    "transposed": Case(f"i = Constant <value=float[8,1] {{{EIGHT}}}> () t = Transpose (i) n = Constant <value_ints=[8]> () "
        f"k = Reshape (t, n) {CONV} {SHAPED}", "Conv"),
    "expanded": Case("i = Constant <value_float=-1.5> () n = Constant <value_ints=[8]> () k = Expand (i, n) " f"{CONV} {SHAPED}", "Conv"),
    "cast-ints": Case(f"i = Constant <value_ints=[1, -2, 3, 4, 5, 6, 7, 8]> () k = Cast <to=1> (i) {CONV} {SHAPED}", "Conv"),
    "cast-int": Case("i = Constant <value_int=-3> () f = Cast <to=1> (i) n = Constant <value_ints=[8]> () "
        f"k = Expand (f, n) {CONV} {SHAPED}", "Conv"),
    "joined": Case("i = Constant <value_floats=[1.0, 2.0, 3.0]> () j = Constant <value_floats=[4.0, 5.0, 6.0, 7.0, 8.0]> () "
        f"k = Concat <axis=0> (i, j) {CONV} {SHAPED}", "Conv"),
    "dequantized": Case("i = Constant <value=int8[8] {1, -2, 3, 4, 5, 6, 7, 8}> () f = Constant <value_float=0.25> () "
        f"k = DequantizeLinear (i, f) {CONV} {SHAPED}", "Conv", opset=19),
    "root": Case(f"i = Constant <value_floats=[1.0, 4.0, 2.0, 3.0, 5.0, 6.0, 7.0, 8.0]> () k = Sqrt (i) {CONV} {SHAPED}", "Conv"),
    # k = k + k, thirty times: each sum is looked at once.
    "shared-operands": Case(f"k0 = Constant <value=float[8] {{{EIGHT}}}> () "
        + " ".join(f"k{i + 1} = Add (k{i}, k{i})" for i in range(30)) + f" {CONV} {SHAPED.replace('k', 'k30')}", "Conv",
        judge="proof", options={"max_scale": 1e12}),
    # What torch's exporter writes without optimisation.
    "zero-bias": Case("s = Shape <start=0, end=1> (w:8.6.1.1) one = Constant <value_ints=[1]> () n = Expand (s, one) "
        f"zero = Constant <value=double {{0.0}}> () like = CastLike (zero, x) c = Expand (like, n) z = Conv (x, w, c) {NORM}",
        "Conv", method="not_run"),
    # Such a file is invalid, and another tool crashes on it.
    "text": Case(f'k = Constant <value_string="a"> () {CONV} {SHAPED}', refused="type"),
    "texts": Case(f'k = Constant <value_strings=["a", "b"]> () {CONV} {SHAPED}', refused="type"),
    "free-size": Case("s = Shape <start=2, end=3> (x) one = Constant <value_float=1.0> () c = Expand (one, s) "
        f"z = Conv (x, w:8.6.1.1, c) {NORM}", refused="not-constant"),
}  # fmt: skip


def _norm(dtype: str = "float32", weight: float = 1.0, **changes: float) -> dict[str, np.ndarray]:
    """Return parameters of one value each: scale 1, shift 0, mean 0, variance 1, but for changes."""
    numbers = {"s": 1.0, "b": 0.0, "m": 0.0, "v": 1.0} | changes
    return {"w": np.full((8, 6, 1, 1), weight, dtype)} | {
        f"p_{name}": np.full(8, numbers[name], dtype) for name in "sbmv"
    }


PLAIN, HALF = f"{CONV} {NORM}", "float16[N,6,H,W] x"
WITHOUT_EPSILON = f"{CONV} y = Norm <epsilon=0.0> (z, p:8)"
NUMBERS: dict[str, Case] = {
    "negative-variance": Case(PLAIN, refused="negative-variance", values=_norm(v=-1.0)),
    "nan-variance": Case(PLAIN, refused="not-finite", values=_norm(v=np.nan)),
    "infinite-mean": Case(PLAIN, refused="not-finite", values=_norm(m=np.inf)),
    "nan-scale": Case(PLAIN, refused="not-finite", values=_norm(s=np.nan)),
    "exploding-scale": Case(PLAIN, refused="scale", values=_norm(s=1e8)),
    "overflow": Case(PLAIN, refused="overflow", values=_norm(weight=1e35, s=1e5)),
    "overflow-of-half": Case(PLAIN, refused="overflow", ins=HALF, values=_norm("float16", weight=1000.0, s=100.0)),
    "overflow-of-a-half-bias": Case(PLAIN, refused="overflow", ins=HALF, values=_norm("float16", 0.001, s=100.0, m=1000.0)),
    "flush-to-zero": Case(PLAIN, refused="underflow", ins=HALF, values=_norm("float16", weight=1e-4, s=1e-4)),
    "lost-bits": Case(PLAIN, refused="underflow", ins=HALF, values=_norm("float16", weight=1e-3, s=1e-3)),
    "zero-scale": Case(PLAIN, "Conv", values=_norm(s=0.0)),
    "overflow-of-a-half-shift": Case("z = MatMul (x, w) y = Norm (z, p:8)", refused="overflow", ins="float16[N,8] x",
        values={**_norm("float16", s=2.0, b=60_000.0, m=-60_000.0), "w": np.ones((8, 8), np.float16)}),
    "scale-at-the-bound": Case(WITHOUT_EPSILON, "Conv", values=_norm(s=0.5), options={"max_scale": 0.5}),
    "scale-beyond-the-bound": Case(WITHOUT_EPSILON, refused="scale", values=_norm(s=0.5), options={"max_scale": 0.49}),
    "bound-of-the-caller": Case(PLAIN, "Conv", values=_norm(s=1e8, m=1e-3), options={"max_scale": 1e9}, judge="proof"),
    "half": Case(PLAIN, "Conv", ins=HALF, judge="run"),
    # 1 / sqrt(1 + 1e-5) rounds to 1, as in every batch norm that was just made: the fold keeps the bits of the weights.
    "half-of-neutral-numbers": Case(PLAIN, "Conv", ins=HALF, judge="run", values=_norm("float16", weight=0.3)),
    # ONNX Runtime has no such Conv.
    "double": Case(PLAIN, "Conv", ins="double[N,6,H,W] x", judge="proof"),
}  # fmt: skip
