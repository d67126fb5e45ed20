"""Batch norms inside bodies and functions; captured and shadowed names."""

from __future__ import annotations

from tests.folding.corpus.case import Case

X2, X6 = "float[N,2,H,W] x", "float[N,6,H,W] x"
Y = "float[N,8,A,B]"
CONV, NORM, OUTER = "z = Conv (x, w:8.6.1.1)", "o = Norm (z, p:8)", "float[N,8,A,B] y"
LOCAL = '<ir_version: 8, opset_import: ["": 17, "local": 1]>'


def _function(signature: str, body: str, opset: int = 17) -> str:
    return f' <opset_import: ["": {opset}, "local": 1], domain: "local"> {signature} => (y) {{ {body} }}'


def _if(then: str, otherwise: str, taken: int = 1) -> str:
    return (
        f"c = Constant <value = bool {{{taken}}}> () y = If (c) <then_branch = t () => ({Y} o) {{ {then} }}, "
        f"else_branch = e () => ({Y} q) {{ {otherwise} }}>"
    )


SMALL = """k = Constant <value_floats = [2.0, -0.5]> () b = Constant <value_floats = [0.25, 1.0]> ()
    m = Constant <value_floats = [0.5, -1.0]> () v = Constant <value_floats = [4.0, 0.5]> ()"""
NORM2D = _function("norm2d <eps> (x, s, b, m, v)",
    "k = Identity (s) y = BatchNormalization <epsilon: float = @eps> (x, k, b, m, v)")  # fmt: skip
BLOCK = _function("block (x)", f"w = Constant <value = float[2,2,1,1] {{1.0, 2.0, -1.0, 0.5}}> () {SMALL} z = Conv (x, w) "
    "y = BatchNormalization (z, k, b, m, v)")  # fmt: skip
EPSILON = BLOCK.replace("block (x)", "block <eps> (x)").replace("tion (z", "tion <epsilon: float = @eps> (z")
GIVEN = _function("block (x, w, s, b, m, v)", "z = Conv (x, w) y = BatchNormalization (z, s, b, m, v)")
# A function for every module: weights and attributes come in from the main graph, through two levels.
MODULES = NORM2D + _function("conv2d <strides> (x, w)", "y = Conv <strides: ints = @strides> (x, w)") + _function(
    "block (x, w, s, b, m, v)", "z = local.conv2d <strides = [2, 2]> (x, w) n = local.norm2d <eps = 0.25> (z, s, b, m, v) "
    "y = Relu (n)")  # fmt: skip
# A Transpose without perm, and a constant of rank 3: both need the rank of what the calls give.
HEAD = _function("head (x)", f"w = Constant <value = float[2,2,1] {{1.0, 2.0, -1.0, 0.5}}> () {SMALL} "
    "c = Constant <value = float[2,1] {3.0, 4.0}> () z = Conv (x, w) a = Add (z, c) t = Transpose (a) u = Transpose (t) "
    "y = BatchNormalization (u, k, b, m, v)")  # fmt: skip
CASES: dict[str, Case] = {
    # Both branches capture the outer weight and statistics; each gets a weight of its own.
    **{f"branch-{taken}": Case(_if(f"{CONV} {NORM}", "u = Conv (x, w) q = Relu (u)", taken), "Constant If", outs=OUTER)
        for taken in (0, 1)},
    "loop": Case("n = Constant <value_int = 3> () c = Constant <value = bool {1}> () y = Loop (n, c, x) <body = b (int64 i, bool k, "
        "float[N,8,H,W] a) => (bool l, float[N,8,H,W] o) { l = Identity (k) z = Conv (a, w:8.8.1.1) s = Norm (z, p:8) o = Tanh (s) }>",
        "Constant Constant Loop", ins="float[N,8,H,W] x", outs="float[N,8,H,W] y"),
    "scan": Case("y, all = Scan <num_scan_inputs = 1, body = b (float[N,4] s, float[N,6] i) => (float[N,4] o, float[N,4] q) { "
        "z = Gemm (i, w:6.4, c:4) n = Norm (z, p:4) a = Add (n, s) o = Tanh (a) q = Identity (o) }> (h, x)", "Scan",
        ins="float[N,4] h, float[5,N,6] x", outs="float[N,4] y, float[5,N,4] all"),
    # The Conv runs once for both branches; only one of them normalises.
    "conv-outside": Case(f"{CONV} {_if(NORM, 'q = Identity (z)')}", refused="shared", outs=OUTER),
    "function": Case("t = local.block (x) y = local.block (t)", "block block", ins=X2, outs=X2[:-1] + "y", header=LOCAL, functions=BLOCK),
    "epsilon-of-the-caller": Case("y = local.block <eps=0.5> (x)", "Conv", ins=X2, outs=X2[:-1] + "y", header=LOCAL, functions=EPSILON),
    "parameters-of-the-caller": Case("y = local.block (x, w:8.6.1.1, p_s:8, p_b:8, p_m:8, p_v:8)", "Conv", outs=OUTER,
        header=LOCAL, functions=GIVEN),
    "parameters-that-it-does-not-fix": Case("y = local.block (x, w:8.6.1.1, s, p_b:8, p_m:8, p_v:8)", refused="not-constant",
        ins=f"{X6}, float[8] s", outs=OUTER, header=LOCAL, functions=GIVEN),
    "a-function-for-every-module": Case("y = local.block (x, w:8.6.1.1, p_s:8, p_b:8, p_m:8, p_v:8) q = local.block (x, w2:8.6.1.1, p_s, "
        "p_b, p_m, p_v)", "Conv Relu Conv Relu", outs=f"{OUTER}, {Y} q", header=LOCAL, functions=MODULES),
    # One call gives constants, the other statistics that are computed: that one stays a call.
    "other-callers": Case("z = Conv (x, w:8.6.1.1) y = local.norm2d <eps = 0.25> (z, p_s:8, p_b:8, p_m:8, p_v:8) "
        "u = Conv (x, w2:8.6.1.1) q = local.norm2d <eps = 0.5> (u, p_s, p_b, m, p_v)", "Conv Conv norm2d",
        ins=f"{X6}, float[8] m", outs=f"{OUTER}, {Y} q", header=LOCAL, functions=NORM2D),
    "a-call-that-gains-nothing": Case("r = Relu (x) t = local.norm2d <eps = 0.5> (r, p_s:6, p_b:6, p_m:6, p_v:6) y = Relu (t)",
        "Relu norm2d Relu", outs="float[N,6,A,B] y", header=LOCAL, functions=NORM2D),
    "a-call-between-norms-that-merge": Case("r = Relu (x) t = local.norm2d <eps = 0.5> (r, p_s:6, p_b:6, p_m:6, p_v:6) "
        "u = Norm (t, q:6) y = Relu (u)", "Relu BatchNormalization Relu", outs="float[N,6,A,B] y", header=LOCAL, functions=NORM2D),
    **{f"a-function-of-opset-{opset}": Case("z = Conv (x, w:8.6.1.1) y = local.norm2d <eps = 0.5> (z, p_s:8, p_b:8, p_m:8, p_v:8)",
        left, outs=OUTER, header=LOCAL, functions=NORM2D.replace('"": 17', f'"": {opset}'))
        for opset, left in ((16, "Conv norm2d"), (17, "Conv"))},
    # sums of branches: in a body, read by one, and in a function whose constants are inside, so that no call is inlined
    "branches-in-a-branch": Case(_if("a = Conv (x, w1:8.6.1.1) d = Conv <pads=[1,1,1,1]> (x, w3:8.6.3.3) o = Add (a, d)",
        "q = Conv (x, w1)"), "Constant If", outs=OUTER),
    **{f"branches-of-which-a-body-reads-{name}": Case("a = Conv (x, w1:6.6.1.1) d = Conv <pads=[1,1,1,1]> (x, w3:6.6.3.3) "
        f"t = Add (a, d) {_if('o = Conv (t, v:8.6.1.1)', f'q = Conv ({name}, v)')}", left, outs=OUTER)
        for name, left in (("a", "Conv Conv Add Constant If"), ("t", "Conv Constant If"))},
    "branches-in-a-function": Case("y = local.block (x)", "block", ins="float[N,4,H,W] x", outs="float[N,4,A,B] y", header=LOCAL,
        functions=_function("block (x)", "k = Constant <value = float[1, 4, 1, 1] {1.0, 2.0, 3.0, 4.0}> () "
        "s = Constant <value_ints=[4, 4, 1, 1]> () w = Expand (k, s) a = Conv (x, w) y = Sub (a, x)")),
    "shapes-inside-a-function": Case("t = local.head (x) y = local.head (t)", "head head", ins="float[N,2,L] x",
        outs="float[N,2,L] y", header=LOCAL, functions=HEAD),
}  # fmt: skip
