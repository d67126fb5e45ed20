"""Every reader that takes a batch norm in: the pre-activation case, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from bnexport.folding import fold
from tests.support.onnx_text import assert_refused, batch_norm, fold_and_check, model, operators, parameters

X2, X3, X4 = "float[N,6] x", "float[N,6,L] x", "float[N,6,H,W] x"
BN = "z = BatchNormalization <epsilon=0.001> (x, p_s, p_b, p_m, p_v)"

CASES = {
    "conv-valid": (X4, "float[N,8,A,B]", 'y = Conv <auto_pad="VALID"> (z, w)', {"w": (8, 6, 3, 3)}, ["Conv"]),
    "conv-transpose-1x1-grouped": (X4, "float[N,8,A,B]", "y = ConvTranspose <group=2> (z, w)", {"w": (6, 4, 1, 1)},
        ["ConvTranspose"]),
    "gemm-trans-b-alpha-beta": (X2, "float[N,8]", "y = Gemm <transB=1, alpha=0.5, beta=-2.0> (z, w, c)",
        {"w": (8, 6), "c": (8,)}, ["Gemm"]),
    "gemm-column-constant": ("float[2,6] x", "float[2,8]", "y = Gemm (z, w, c)", {"w": (6, 8), "c": (2, 1)}, ["Gemm"]),
    "matmul-add": (X2, "float[N,8]", "t = MatMul (z, w)\n y = Add (t, c)", {"w": (6, 8), "c": (8,)}, ["MatMul", "Add"]),
    "matmul-left": (X3, "float[N,8,L]", "y = MatMul (w, z)", {"w": (8, 6)}, ["MatMul", "Add"]),
    "flatten": ("float[N,6,3,2] x", "float[N,8]", "t = Flatten (z)\n y = Gemm (t, w, c)", {"w": (36, 8), "c": (8,)},
        ["Flatten", "Gemm"]),
    "transpose": (X3, "float[N,L,8]", "t = Transpose <perm=[0,2,1]> (z)\n a = MatMul (t, w)\n y = Add (a, c)",
        {"w": (6, 8), "c": (8,)}, ["Transpose", "MatMul", "Add"]),
    "global-average-pool": (X4, "float[N,8]", "g = GlobalAveragePool (z)\n f = Flatten (g)\n y = Gemm (f, w, c)",
        {"w": (6, 8), "c": (8,)}, ["GlobalAveragePool", "Flatten", "Gemm"]),
    "two-consumers": (X4, "float[N,8,A,B]", "u = Conv (z, w)\n v = Conv (z, w2)\n y = Add (u, v)",
        {"w": (8, 6, 1, 1), "w2": (8, 6, 1, 1)}, ["Conv", "Conv", "Add"]),
    "concat": ("float[N,6,H,W] x, float[N,2,H,W] x2", "float[N,8,A,B]", "t = Concat <axis=1> (x2, z)\n y = Conv (t, w)",
        {"w": (8, 8, 1, 1)}, ["Concat", "Conv"]),
    "space-to-depth": ("float[N,6,4,4] x", "float[N,8,A,B]", "t = SpaceToDepth <blocksize=2> (z)\n y = Conv (t, w)",
        {"w": (8, 24, 1, 1)}, ["SpaceToDepth", "Conv"]),
    "split": (X4, "float[N,8,A,B]",
        "s = Constant <value_ints = [2, 4]> ()\n a, b = Split <axis=1> (z, s)\n u = Conv (a, w)\n v = Conv (b, w2)\n"
        " y = Add (u, v)", {"w": (8, 2, 3, 3), "w2": (8, 4, 3, 3)}, ["Constant", "Split", "Conv", "Conv", "Add"]),
    "two-slices": (X4, "float[N,8,A,B]",
        "o = Constant <value_ints = [0]> ()\n h = Constant <value_ints = [2]> ()\n e = Constant <value_ints = [99]> ()\n"
        " i = Constant <value_ints = [1]> ()\n a = Slice (z, o, h, i)\n b = Slice (z, h, e, i)\n u = Conv (a, w)\n"
        " v = Conv (b, w2)\n y = Add (u, v)", {"w": (8, 2, 1, 1), "w2": (8, 4, 1, 1)},
        ["Constant"] * 4 + ["Slice", "Slice", "Conv", "Conv", "Add"]),
    "consumers-of-many-kinds": (X4, "float[N,8]",
        "a = Conv (z, w)\n g = GlobalAveragePool (a)\n f = Flatten (g)\n h = GlobalAveragePool (z)\n i = Flatten (h)\n"
        " k = Gemm (i, w2, c)\n t = MatMul (i, w3)\n q = Add (t, c)\n r = Sum (f, k, q)\n y = Relu (r)",
        {"w": (8, 6, 3, 3), "w2": (6, 8), "w3": (6, 8), "c": (8,)}, ["Conv", "GlobalAveragePool", "Flatten",
        "GlobalAveragePool", "Flatten", "Gemm", "MatMul", "Add", "Sum", "Relu"]),
    "a-constant-of-each-reader": (X4, "float[N,8,A,B]",
        "a = Add (z, k)\n u = Conv <pads=[1,1,1,1]> (a, w)\n b = Sub (l, z)\n v = Conv <pads=[1,1,1,1]> (b, w)\n"
        " y = Add (u, v)", {"w": (8, 6, 3, 3), "k": (6, 1, 1), "l": (1, 6, 1, 1)},
        ["Add", "Conv", "Sub", "Conv", "Add"]),
    "the-same-reader-twice": (X4, "float[N,8,A,B]", "a = Identity (z)\n t = Concat <axis=1> (z, a)\n y = Conv (t, w)",
        {"w": (8, 12, 1, 1)}, ["Identity", "Concat", "Conv"]),
    "between-two-convs": (X4, "float[N,8,A,B]",
        "r = Relu (z)\n t = BatchNormalization (r, q_s, q_b, q_m, q_v)\n u = Conv (t, w)\n"
        " y = BatchNormalization (u, r_s, r_b, r_m, r_v)",
        {"w": (8, 6, 3, 3), **batch_norm("q", 6), **batch_norm("r", 8)}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_folds_into_the_readers(case: str) -> None:
    inputs, output, nodes, shapes, left = CASES[case]
    proto = model(f"g ({inputs}) => ({output} y) {{ {BN}\n {nodes} }}", {**shapes, **batch_norm("p", 6)})
    # Branches that are merged leave no map to place.
    folded, result = fold_and_check(proto, left=1 if left is None else 0, skip=["parallel"])
    if left is not None:
        assert operators(folded) == left
    assert result.report.folded


POSITIVE = {"p_s": np.abs(parameters({"p_s": (6,)})["p_s"])}

# A positive scale and a shift that part: id: (nodes around the batch norm t -> z, parameters, operators left).
APART = {
    # relu(k x + h) = k relu(x + h / k): h / k goes into one of the sum's operands, k through Relu and padding.
    "residual-relu-padded-conv": ("a = Conv (x, v, c)\n t = Add (a, x)",
        "r = Relu (z)\n y = Conv <pads=[1,1,1,1]> (r, w)", {"v": (6, 6, 1, 1), "c": (6,), "w": (8, 6, 3, 3)},
        ["Conv", "Add", "Relu", "Conv"]),
    "residual-leaky-relu-two-convs": ("a = Conv (x, v)\n t = Sub (x, a)",
        "r = LeakyRelu <alpha=0.2> (z)\n f = Conv <pads=[1,1,1,1]> (r, w)\n g = Conv <strides=[1,1]> (r, w2)\n y = Add (f, g)",
        {"v": (6, 6, 1, 1), "w": (8, 6, 3, 3), "w2": (8, 6, 1, 1)},
        ["Conv", "Sub", "LeakyRelu", "Conv", "Conv", "Add"]),
    "prelu": ("a = Conv (x, v)\n t = Add (x, a)", "r = PRelu (z, s)\n y = Conv <pads=[1,1,1,1]> (r, w)",
        {"v": (6, 6, 1, 1), "w": (8, 6, 3, 3), "s": (6, 1, 1)}, ["Conv", "Add", "PRelu", "Conv"]),
    # k goes up, where nothing takes h; h goes down into a constant.
    "product-then-sums": ("a = Conv (x, v)\n t = Mul (a, x)",
        "f = Add (z, d)\n g = Sub (d, z)\n i = Sigmoid (f)\n j = Sigmoid (g)\n y = Add (i, j)",
        {"v": (6, 6, 1, 1), "d": (6, 1, 1)}, ["Conv", "Mul", "Add", "Sub", "Sigmoid", "Sigmoid", "Add"]),
}  # fmt: skip


@pytest.mark.parametrize("case", APART)
def test_scale_and_shift_part(case: str) -> None:
    above, below, shapes, left = APART[case]
    norm = BN.replace("(x,", "(t,")
    others = {name: shape for name, shape in batch_norm("p", 6).items() if name != "p_s"}
    channels = 6 if case == "product-then-sums" else 8
    proto = model(
        f"g ({X4}) => (float[N,{channels},A,B] y) {{ {above}\n {norm}\n {below} }}",
        {**shapes, **others},
        values=POSITIVE,
    )
    # The two convolutions of one case give images of different sizes.
    sizes = {"H": 5, "W": 5}
    folded, result = fold_and_check(proto, sizes=sizes, skip=["parallel"])
    assert operators(folded) == left
    assert result.report.folded


def test_negative_scale_stays_before_a_relu() -> None:
    above, below, shapes, _ = APART["residual-relu-padded-conv"]
    negative = {"p_s": POSITIVE["p_s"] * np.array([1, 1, -1, 1, 1, 1], np.float32)}
    others = {name: shape for name, shape in batch_norm("p", 6).items() if name != "p_s"}
    proto = model(
        f"g ({X4}) => (float[N,8,A,B] y) {{ {above}\n {BN.replace('(x,', '(t,')}\n {below} }}",
        {**shapes, **others},
        values=negative,
    )
    assert_refused(proto, "order", skip=["parallel"])


def test_no_division_by_a_tiny_scale() -> None:
    above, below, shapes, _ = APART["residual-relu-padded-conv"]
    tiny = {"p_s": np.array([1, 1, 1e-12, 1, 1, 1], np.float32)}
    others = {name: shape for name, shape in batch_norm("p", 6).items() if name != "p_s"}
    proto = model(
        f"g ({X4}) => (float[N,8,A,B] y) {{ {above}\n {BN.replace('(x,', '(t,')}\n {below} }}",
        {**shapes, **others},
        values=tiny,
    )
    assert not fold(proto, skip=["parallel"]).report.folded


def test_scale_only_goes_through_padding() -> None:
    zeros = {"p_b": parameters({"b": (6,)})["b"] * 0, "p_m": parameters({"b": (6,)})["b"] * 0}
    shapes = {"w": (8, 6, 3, 3), "p_s": (6,), "p_v": (6,)}
    proto = model(f"g ({X4}) => (float[N,8,A,B] y) {{ {BN}\n y = Conv <pads=[1,1,1,1]> (z, w) }}", shapes, values=zeros)
    folded, _ = fold_and_check(proto)
    assert operators(folded) == ["Conv"]


REFUSED = {
    "padded": ("y = Conv <pads=[1,1,1,1]> (z, w)", {"w": (8, 6, 3, 3)}, "padding"),
    "auto-padded": ('y = Conv <auto_pad="SAME_LOWER"> (z, w)', {"w": (8, 6, 3, 3)}, "padding"),
    "conv-transpose-3x3": ("y = ConvTranspose (z, w)", {"w": (6, 8, 3, 3)}, "padding"),
    "relu": ("r = Relu (z)\n y = Conv (r, w)", {"w": (8, 6, 1, 1)}, "order"),
    "a-sum-with-something-else": ("r = Add (z, x)\n y = Conv (r, w)", {"w": (8, 6, 1, 1)}, "no-rule"),
    "a-product": ("r = Mul (z, x)\n y = Conv (r, w)", {"w": (8, 6, 1, 1)}, "shift"),
    "a-divisor": ("r = Div (x, z)\n y = Conv (r, w)", {"w": (8, 6, 1, 1)}, "shift"),
    "zero-padding": ("p = Constant <value_ints = [0,0,1,1,0,0,1,1]> ()\n r = Pad (z, p)\n y = Conv (r, w)",
        {"w": (8, 6, 1, 1)}, "shift"),
    "padding-with-a-value": ("p = Constant <value_ints = [0,0,1,1,0,0,1,1]> ()\n v = Constant <value_float = 2.0> ()\n r = Pad (z, p, v)\n"
        " y = Conv (r, w)", {"w": (8, 6, 1, 1)}, "padding"),
    "padded-channels": ('p = Constant <value_ints = [0,0,0,0,0,2,0,0]> ()\n r = Pad <mode="edge"> (z, p)\n y = Conv (r, w)',
        {"w": (8, 8, 1, 1)}, "axis"),
    "one-part-of-two": ("a, b = Split <axis=1> (z)\n u = Conv (a, w)\n v = Sigmoid (b)\n y = Concat <axis=1> (u, v)",
        {"w": (8, 3, 1, 1)}, "no-rule"),
    "reversed-channels": ("a = Constant <value_ints = [-1]> ()\n e = Constant <value_ints = [-9]> ()\n i = Constant <value_ints = [1]> ()\n"
        " r = Slice (z, a, e, i, a)\n y = Conv (r, w)", {"w": (8, 6, 1, 1)}, "axis"),
    "one-of-two-readers": ("u = Conv (z, w)\n v = Sigmoid (z)\n y = Concat <axis=1> (u, v)", {"w": (8, 6, 1, 1)},
        "no-rule"),
    "graph-output": ("y = Conv (z, w)", {"w": (8, 6, 1, 1)}, "graph-output"),
    "dynamic-weight": ("w = Reshape (x, s)\n y = Conv (z, w)", {}, "not-constant"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    nodes, shapes, code = REFUSED[case]
    extra = ", float[N,6,H,W] z" if case == "graph-output" else ""
    header = "int64[4] s" if case == "dynamic-weight" else ""
    inputs = f"{X4}, {header}" if header else X4
    proto = model(f"g ({inputs}) => (float[N,A,B,C] y{extra}) {{ {BN}\n {nodes} }}", {**shapes, **batch_norm("p", 6)})
    assert_refused(proto, code, skip=["parallel"])
