"""Sums of branches that are easily merged wrongly: each is merged right or stays, its outputs those of the source.

Every case is compared with ONNX's reference implementation in float64 and names the operators that are left, so that a
case which is right only because nothing was merged shows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.support.onnx_text import assert_near, batch_norm, exact, make_inputs, model, operators, run

X = "float[N,4,H,W] x"
Y = "float[N,A,B,D] y"
# Parameters that a case may name: square convolutions of four channels, affine maps, batch norms.
SHAPES: dict[str, tuple[int, ...]] = {
    "w1": (4, 4, 1, 1),
    "v1": (4, 4, 1, 1),
    "w2": (4, 4, 2, 2),
    "w3": (4, 4, 3, 3),
    "v3": (4, 4, 3, 3),
    "w5": (4, 4, 5, 5),
    "w13": (4, 4, 1, 3),
    "w31": (4, 4, 3, 1),
    "d1": (4, 1, 1, 1),
    "d3": (4, 1, 3, 3),
    "g3": (4, 2, 3, 3),
    "one": (1, 4, 1, 1),
    "wide": (8, 4, 1, 1),
    "narrow": (4, 8, 3, 3),
    "less": (2, 4, 1, 1),
    "more": (4, 2, 3, 3),
    "b": (4,),
    "c_s": (4, 1, 1),
    "full": (1, 4, 7, 7),
    "scalar": (1,),
    "last": (7,),
    "m": (7, 7),
    "m2": (7, 7),
    **batch_norm("p", 4),
    **batch_norm("q", 4),
}
BN = "BatchNormalization"
PAD = "pads=[1,1,1,1]"

# What the sum is made of, and the operators that are left.
CASES: dict[str, tuple[str, list[str]]] = {
    # geometry
    "sizes-1-3-5": (
        f"a = Conv <pads=[2,2,2,2]> (x, w5)\n b0 = Conv <{PAD}> (x, w3)\n c = Conv (x, w1)"
        "\n t = Add (a, b0)\n y = Add (t, c)",
        ["Conv"],
    ),
    "cross-in-a-square": (
        f"a = Conv <{PAD}> (x, w3)\n h = Conv <pads=[0,1,0,1]> (x, w13)\n v = Conv <pads=[1,0,1,0]> (x, w31)"
        "\n t = Add (a, h)\n y = Add (t, v)",
        ["Conv"],
    ),
    "cross-alone-would-grow": (
        "h = Conv <pads=[0,1,0,1]> (x, w13)\n v = Conv <pads=[1,0,1,0]> (x, w31)\n y = Add (h, v)",
        ["Conv", "Conv", "Add"],
    ),
    "different-strides-of-one-size": (
        # Both make 4 x 4 of 7 x 7.
        f"a = Conv <{PAD}, strides=[2,2]> (x, w3)\n b0 = Conv <dilations=[3,3], strides=[1,1]> (x, w2)\n y = Add (a, b0)",
        ["Conv", "Conv", "Add"],
    ),
    "stride-2": (
        f"a = Conv <{PAD}, strides=[2,2]> (x, w3)\n b0 = Conv <strides=[2,2]> (x, w1)\n y = Add (a, b0)",
        ["Conv"],
    ),
    "stride-2-without-padding-before": (
        "a = Conv <strides=[2,2]> (x, w2)\n b0 = Conv <strides=[2,2], pads=[0,0,1,1]> (x, w3)\n y = Add (a, b0)",
        ["Conv"],
    ),
    "stride-2-equal-only-at-odd-sizes": (
        # (H - 2) // 2 against (H - 3) // 2: at 7 both are 2.
        "a = Conv <strides=[2,2]> (x, w2)\n b0 = Conv <strides=[2,2]> (x, w3)\n y = Add (a, b0)",
        ["Conv", "Conv", "Add"],
    ),
    "dilated-and-point": (
        "a = Conv <dilations=[2,2], pads=[2,2,2,2]> (x, w3)\n b0 = Conv <dilations=[3,3]> (x, w1)\n y = Add (a, b0)",
        ["Conv"],
    ),
    "different-dilations": (
        f"a = Conv <dilations=[2,2], pads=[2,2,2,2]> (x, w3)\n b0 = Conv <{PAD}> (x, v3)\n y = Add (a, b0)",
        ["Conv", "Conv", "Add"],
    ),
    "different-dilations-and-identity": (
        f"a = Conv <dilations=[2,2], pads=[2,2,2,2]> (x, w3)\n b0 = Conv <{PAD}> (x, v3)\n t = Add (a, b0)\n y = Add (t, x)",
        ["Conv", "Conv", "Add"],
    ),
    "shifted-by-its-pads": (
        # The 1x1 reads the upper left corner of the 3x3.
        f"a = Conv <{PAD}> (x, w3)\n b0 = Conv <pads=[1,1,-0,0]> (x, w2)\n y = Add (a, b0)",
        ["Conv"],
    ),
    "asymmetric-pads": (
        "a = Conv <pads=[0,2,2,0]> (x, w3)\n b0 = Conv <pads=[2,0,0,2]> (x, v3)\n y = Add (a, b0)",
        ["Conv", "Conv", "Add"],
    ),
    "asymmetric-pads-and-point": (
        "a = Conv <pads=[0,2,2,0]> (x, w3)\n b0 = Conv (x, w1)\n y = Add (a, b0)",
        ["Conv"],
    ),
    "auto-pad-same-upper": (
        """a = Conv <auto_pad="SAME_UPPER"> (x, w2)\n b0 = Conv <pads=[0,0,1,1]> (x, w2b)\n y = Add (a, b0)""",
        ["Conv"],
    ),
    "auto-pad-same-lower": (
        """a = Conv <auto_pad="SAME_LOWER"> (x, w2)\n b0 = Conv <auto_pad="SAME_UPPER"> (x, w3)\n y = Add (a, b0)""",
        ["Conv"],
    ),
    "auto-pad-valid": (
        """a = Conv <auto_pad="VALID"> (x, w3)\n b0 = Conv <auto_pad="VALID"> (x, v3)\n y = Add (a, b0)""",
        ["Conv"],
    ),
    "auto-pad-with-stride": (
        """a = Conv <auto_pad="SAME_UPPER", strides=[2,2]> (x, w3)\n b0 = Conv <strides=[2,2]> (x, w1)\n y = Add (a, b0)""",
        ["Conv", "Conv", "Add"],
    ),
    "point-in-a-kernel-without-padding": (
        # 7 x 7 and 5 x 5 cannot be added; a crop makes them so, and is no part of the sum.
        "a = Conv (x, w3)\n b0 = Conv (x, w1)\n c = Slice (b0, ones, sixes, axes23)\n y = Add (a, c)",
        ["Conv", "Conv", "Slice", "Add"],
    ),
    # channels
    "one-channel-is-broadcast": (
        "a = Conv (x, w1)\n b0 = Conv (x, one)\n y = Add (a, b0)",
        ["Conv", "Conv", "Add"],
    ),
    "positions-are-broadcast": (
        # The second makes 1 x 1 of 7 x 7.
        "a = Conv (x, w1)\n b0 = Conv <dilations=[6,6]> (x, w2)\n y = Add (a, b0)",
        ["Conv", "Conv", "Add"],
    ),
    "depthwise": (
        f"a = Conv <group=4, {PAD}> (x, d3)\n b0 = Conv <group=4> (x, d1)\n t = Add (a, b0)\n y = Add (x, t)",
        ["Conv"],
    ),
    "depthwise-with-dense-would-grow": (
        f"a = Conv <group=4, {PAD}> (x, d3)\n b0 = Conv (x, w1)\n y = Add (a, b0)",
        ["Conv", "Conv", "Add"],
    ),
    "depthwise-into-dense": (
        f"a = Conv <group=4, {PAD}> (x, d3)\n b0 = Conv <{PAD}> (x, w3)\n y = Sub (a, b0)",
        ["Conv"],
    ),
    "groups-refined": (
        f"a = Conv <group=2, {PAD}> (x, g3)\n b0 = Conv <group=4, {PAD}> (x, d3)\n y = Add (a, b0)",
        ["Conv"],
    ),
    # signs and constants
    "subtracted": (f"a = Conv (x, w1)\n b0 = Conv <{PAD}> (x, w3)\n t = Sub (a, b0)\n y = Sub (x, t)", ["Conv"]),
    "constants-in-the-tree": (
        f"a = Conv (x, w1, b)\n u = Add (a, c_s)\n b0 = Conv <{PAD}> (x, w3)\n t = Sub (scalar, b0)\n y = Add (u, t)",
        ["Conv"],
    ),
    "constant-that-varies-by-position": (
        f"a = Conv (x, w1)\n u = Add (a, full)\n b0 = Conv <{PAD}> (x, w3)\n y = Sub (u, b0)",
        ["Conv", "Add"],
    ),
    "vector-meets-the-last-axis": (
        f"a = Conv (x, w1)\n u = Add (a, last)\n b0 = Conv <{PAD}> (x, w3)\n y = Add (u, b0)",
        ["Conv", "Add"],
    ),
    "scale-along-the-last-axis": (
        f"a = Conv (x, w1)\n u = Mul (a, last)\n b0 = Conv <{PAD}> (x, w3)\n y = Add (u, b0)",
        ["Conv", "Mul", "Conv", "Add"],
    ),
    "layer-scale-of-a-difference": (
        f"a = Conv <group=4, {PAD}> (x, d3)\n n = {BN} (x, p_s, p_b, p_m, p_v)\n d = Sub (a, n)\n u = Mul (d, c_s)"
        "\n y = Add (x, u)",
        ["Conv"],
    ),
    "batch-norm-of-the-sum": (
        f"a = Conv <group=4, {PAD}> (x, d3)\n t = Add (a, x)\n y = {BN} (t, p_s, p_b, p_m, p_v)",
        ["Conv"],
    ),
    "twice-the-same": ("t = Add (x, x)\n a = Conv (x, w1)\n y = Add (t, a)", ["Conv"]),
    # terms that stay outside
    "not-linear": (
        f"a = Conv (x, w1)\n r = Relu (x)\n t = Add (a, r)\n b0 = Conv <{PAD}> (x, w3)\n y = Add (t, b0)",
        ["Relu", "Conv", "Add"],
    ),
    "subtracted-and-not-linear": (
        f"a = Conv (x, w1)\n r = Relu (x)\n t = Sub (r, a)\n b0 = Conv <{PAD}> (x, w3)\n y = Sub (b0, t)",
        ["Relu", "Conv", "Sub"],
    ),
    "two-inputs": (
        f"r = Relu (x)\n a = Conv (x, w1)\n c = Conv (r, v1)\n b0 = Conv <{PAD}> (x, w3)\n e = Conv <{PAD}> (r, v3)"
        "\n t = Add (a, c)\n u = Add (b0, e)\n y = Add (t, u)",
        ["Relu", "Conv", "Conv", "Add"],
    ),
    "branch-read-elsewhere": (
        f"a = Conv (x, w1)\n b0 = Conv <{PAD}> (x, w3)\n t = Add (a, b0)\n r = Relu (a)\n y = Mul (t, r)",
        ["Conv", "Conv", "Add", "Relu", "Mul"],
    ),
    "sum-in-between-read-elsewhere": (
        f"a = Conv (x, w1)\n b0 = Conv <{PAD}> (x, w3)\n t = Add (a, b0)\n c = Conv (x, v1)\n u = Add (t, c)"
        "\n y = Mul (t, u)",
        ["Conv", "Conv", "Add", "Mul"],
    ),
    "affine-of-a-mixed-sum": (
        f"r = Relu (x)\n t = Add (x, r)\n u = Mul (t, c_s)\n a = Conv (x, w1)\n b0 = Conv <{PAD}> (x, w3)"
        "\n v = Add (a, u)\n y = Add (v, b0)",
        ["Relu", "Add", "Mul", "Conv", "Add"],
    ),
    # padding behind a shift
    "shift-before-padding": (
        f"n = {BN} (x, p_s, p_b, p_m, p_v)\n a = Conv <{PAD}> (n, w3)\n b0 = Conv <{PAD}> (x, v3)\n y = Add (a, b0)",
        [BN, "Conv", "Conv", "Add"],
    ),
    "shift-before-no-padding": (
        f"n = {BN} (x, p_s, p_b, p_m, p_v)\n a = Conv (n, w3)\n b0 = Conv (x, v3)\n y = Add (a, b0)",
        ["Conv"],
    ),
    "scale-before-padding": (
        f"n = Mul (x, c_s)\n a = Conv <{PAD}> (n, w3)\n b0 = Conv <{PAD}> (x, v3)\n y = Add (a, b0)",
        ["Conv"],
    ),
    "padded-before-the-shift": (
        f"p = Pad (x, pads1)\n s = Conv (p, w1)\n n = {BN} (s, p_s, p_b, p_m, p_v)\n a = Conv (n, w3)"
        f"\n b0 = Conv <{PAD}> (x, v3)\n y = Add (a, b0)",
        ["Conv"],
    ),
    "one-pad-for-two-branches": (
        f"p = Pad (x, pads1)\n a = Conv (p, w3)\n c = Conv (p, v3)\n e = Conv <{PAD}> (x, w3)\n t = Add (a, c)"
        "\n y = Add (t, e)",
        ["Conv"],
    ),
    "one-pad-for-a-branch-and-something-else": (
        f"p = Pad (x, pads1)\n a = Conv (p, w3)\n e = Conv <{PAD}> (x, v3)\n t = Add (a, e)\n r = MaxPool <kernel_shape=[3,3]> (p)"
        "\n y = Add (t, r)",
        ["Pad", "MaxPool", "Conv", "Add"],
    ),
    "one-pad-of-a-point-for-two-branches": (
        "s = Conv (x, w1)\n p = Pad (s, pads1)\n a = Conv (p, w3)\n c = Conv (p, v3)\n y = Add (a, c)",
        ["Conv", "Conv"],
    ),
    "one-pad-of-a-point-for-other-sums": (
        "s = Conv (x, w1)\n p = Pad (s, pads1)\n a = Conv (p, w3)\n c = Conv (p, v3)\n t = Add (a, c)\n r = Relu (p)"
        "\n e = Conv (r, w3)\n y = Add (t, e)",
        ["Conv", "Pad", "Conv", "Relu", "Conv", "Add"],
    ),
    "pads-that-are-computed-from-constants": (
        "l = Slice (backwards, minus1, far, zero, minus1)\n p = Pad (x, l)\n a = Conv (p, w3)\n"
        f" c = Conv <{PAD}> (x, v3)\n y = Add (a, c)",
        ["Conv"],
    ),
    "padded-with-ones": (
        f"p = Pad (x, pads1, unit)\n a = Conv (p, w3)\n b0 = Conv <{PAD}> (x, v3)\n y = Add (a, b0)",
        ["Pad", "Conv", "Conv", "Add"],
    ),
    "padded-by-reflection": (
        f'p = Pad <mode="reflect"> (x, pads1)\n a = Conv (p, w3)\n b0 = Conv <{PAD}> (x, v3)\n y = Add (a, b0)',
        ["Pad", "Conv", "Conv", "Add"],
    ),
    "cropped": (
        "p = Pad (x, crop)\n a = Conv (p, w1)\n b0 = Conv (x, w3)\n y = Add (a, b0)",
        ["Pad", "Conv", "Conv", "Add"],
    ),
    "point-before-and-behind": (
        f"s = Conv (x, w1)\n a = Conv <{PAD}> (s, w3)\n c = Conv <{PAD}> (x, v3, b)\n e = Conv (c, v1)\n y = Add (a, e)",
        ["Conv"],
    ),
    "point-with-bias-before-padding": (
        f"s = Conv (x, w1, b)\n a = Conv <{PAD}> (s, w3)\n c = Conv <{PAD}> (x, v3)\n y = Add (a, c)",
        ["Conv", "Conv", "Conv", "Add"],
    ),
    "expansion": (f"s = Conv (x, wide)\n a = Conv <{PAD}> (s, narrow)\n y = Add (a, x)", ["Conv"]),
    "bottleneck-would-grow": (
        f"s = Conv (x, less)\n a = Conv <{PAD}> (s, more)\n y = Add (a, x)",
        ["Conv", "Conv", "Add"],
    ),
    "sum-below-a-point": (
        f"a = Conv (x, w1)\n c = Conv <{PAD}> (x, w3)\n t = Add (a, c)\n e = Conv (t, v1)\n f = Conv <{PAD}> (x, v3)"
        "\n y = Add (e, f)",
        ["Conv"],
    ),
    "sum-below-a-shifted-padding": (
        f"a = Conv (x, w1, b)\n c = Conv (x, v1)\n t = Add (a, c)\n e = Conv <{PAD}> (t, w3)\n f = Conv <{PAD}> (x, v3)"
        "\n y = Add (e, f)",
        ["Conv", "Conv", "Conv", "Add"],
    ),
    # pools
    "pool-without-padding": (
        "a = AveragePool <kernel_shape=[3,3]> (x)\n c = Conv (x, w3)\n y = Add (a, c)",
        ["Conv"],
    ),
    "pool-that-counts-padding": (
        f"a = AveragePool <kernel_shape=[3,3], {PAD}, count_include_pad=1> (x)\n c = Conv <{PAD}> (x, w3)\n y = Sub (c, a)",
        ["Conv"],
    ),
    "pool-that-does-not-count-padding": (
        f"a = AveragePool <kernel_shape=[3,3], {PAD}> (x)\n c = Conv <{PAD}> (x, w3)\n y = Add (a, c)",
        ["AveragePool", "Conv", "Add"],
    ),
    "pool-that-rounds-up": (
        "a = AveragePool <kernel_shape=[2,2], strides=[2,2], ceil_mode=1> (x)\n c = Conv <strides=[2,2]> (x, w1)"
        "\n y = Add (a, c)",
        ["AveragePool", "Conv", "Add"],
    ),
    "pool-behind-a-point": (
        f"s = Conv (x, w1)\n a = AveragePool <kernel_shape=[3,3], {PAD}, count_include_pad=1> (s)"
        f"\n c = Conv <{PAD}> (x, w3)\n y = Add (a, c)",
        ["Conv"],
    ),
    "pool-with-nothing-to-carry-it": (
        f"a = AveragePool <kernel_shape=[3,3], {PAD}, count_include_pad=1> (x)\n y = Sub (a, x)",
        ["AveragePool", "Sub"],
    ),
    # matrix products
    "matmuls": ("a = MatMul (x, m)\n c = MatMul (x, m2)\n t = Add (a, c)\n y = Add (t, last)", ["MatMul", "Add"]),
    "matmul-and-identity": ("a = MatMul (x, m)\n y = Add (a, x)", ["MatMul"]),
    "matmul-and-per-channel-of-axis-1": (
        "a = MatMul (x, m)\n u = Mul (x, c_s)\n c = MatMul (x, m2)\n t = Add (a, u)\n y = Add (t, c)",
        ["Mul", "MatMul", "Add"],
    ),
    "matmul-from-the-left": ("a = MatMul (m, x)\n c = MatMul (x, m2)\n y = Add (a, c)", ["MatMul", "MatMul", "Add"]),
    "matmul-with-conv": ("a = MatMul (x, m)\n c = Conv (x, w1)\n y = Add (a, c)", ["MatMul", "Conv", "Add"]),
    # others
    "n-ary-sum": (f"a = Conv (x, w1)\n c = Conv <{PAD}> (x, w3)\n y = Sum (a, x, c)", ["Conv"]),
    "identity-and-dropout-nodes": (
        f"i = Identity (x)\n d = Dropout (i)\n c = Conv <{PAD}> (x, w3)\n e = Identity (c)\n y = Add (d, e)",
        ["Conv"],
    ),
    "divided": (f"a = Div (x, c_s)\n c = Conv <{PAD}> (x, w3)\n y = Add (a, c)", ["Conv"]),
    "constant-divided-by-data": (
        f"a = Div (c_s, x)\n c = Conv <{PAD}> (x, w3)\n e = Conv (x, w1)\n t = Add (a, c)\n y = Add (t, e)",
        ["Div", "Conv", "Add"],
    ),
}
VALUES = {
    "pads1": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    "crop": np.array([0, 0, -1, -1, 0, 0, -1, -1]),
    "backwards": np.array([1, 1, 0, 0, 1, 1, 0, 0]),
    "minus1": np.array([-1]),
    "far": np.array([-(2**63) + 1]),
    "zero": np.array([0]),
    "unit": np.ones(1, np.float32),
    "ones": np.array([1, 1]),
    "sixes": np.array([6, 6]),
    "axes23": np.array([2, 3]),
    "w2b": np.random.default_rng(3).standard_normal((4, 4, 2, 2)).astype(np.float32),
}


def named(nodes: str, names: object) -> list[str]:
    words = "".join(letter if letter.isalnum() or letter == "_" else " " for letter in nodes).split()
    return [name for name in names if name in words]  # type: ignore[attr-defined]


def build(
    nodes: str, inputs: str = X, outputs: str = Y, dtype: str = "float32", **values: np.ndarray
) -> onnx.ModelProto:
    """The parameters that the nodes name become initializers."""
    shapes = {name: SHAPES[name] for name in named(nodes, SHAPES) if name not in values}
    values = {**{name: VALUES[name] for name in named(nodes, VALUES)}, **values}
    return model(f"g ({inputs}) => ({outputs}) {{ {nodes} }}", shapes, values=values, dtype=dtype)


def check(
    proto: onnx.ModelProto, expected: list[str], oracle: Callable[..., list[np.ndarray]] = exact, **options: object
) -> onnx.ModelProto:
    """Folds; these operators are left, and the outputs are those of the source, to float64's eye."""
    untouched, inputs = proto.SerializeToString(), make_inputs(proto)
    result = fold(proto, verify=False, **options)  # type: ignore[arg-type]
    folded = to_proto(result.model)
    assert proto.SerializeToString() == untouched
    onnx.checker.check_model(folded)
    for value, got, right in zip(folded.graph.output, run(folded, inputs), oracle(proto, inputs), strict=True):
        assert_near(got, right, value.name)
    reasons = [(site.nodes, site.summary or site.reason) for site in result.report.sites]
    assert sorted(operators(folded)) == sorted(expected), reasons
    assert len(folded.graph.node) <= len(proto.graph.node)
    return folded


@pytest.mark.parametrize("case", CASES)
def test_case(case: str) -> None:
    nodes, expected = CASES[case]
    # ONNX's reference implementation cannot crop by a Pad.
    check(build(nodes), expected, run if case == "cropped" else exact)


BLOCK = f"a = Conv (x, w1)\n c = Conv <{PAD}> (x, w3, b)\n t = Add (a, c)\n y = Add (t, x)"
STAYS = ["Conv", "Conv", "Add", "Add"]


def reasons(proto: onnx.ModelProto, **options: object) -> list[str]:
    """Codes of the refusals of the rule."""
    report = fold(proto, verify=False, **options).report  # type: ignore[arg-type]
    return [refusal.code for site in report.sites for refusal in site.refusals if refusal.rule == "parallel"]


def test_the_sum_is_a_graph_output() -> None:
    nodes = f"a = Conv (x, w1)\n c = Conv <{PAD}> (x, w3)\n y = Add (a, c)\n z = Relu (y)"
    folded = check(build(nodes, outputs=f"{Y}, float[N,A,B,D] z"), ["Conv", "Relu"])
    assert [value.name for value in folded.graph.output] == ["y", "z"]


def test_a_branch_is_a_graph_output() -> None:
    nodes = f"a = Conv (x, w1)\n c = Conv <{PAD}> (x, w3)\n y = Add (a, c)"
    check(build(nodes, outputs=f"{Y}, float[N,A,B,D] a"), ["Conv", "Conv", "Add"])


def test_the_base_is_a_graph_output() -> None:
    nodes = f"r = Relu (x)\n a = Conv (r, w1)\n c = Conv <{PAD}> (r, w3)\n y = Add (a, c)"
    check(build(nodes, outputs=f"{Y}, float[N,A,B,D] r"), ["Relu", "Conv"])


@pytest.mark.parametrize("computed", ["input", "node", "overridable"])
def test_a_weight_that_the_model_does_not_fix(computed: str) -> None:
    name = {"input": "k", "overridable": "w1", "node": "h"}[computed]
    weight = "" if computed == "overridable" else ", float[4,4,1,1] k"
    first = "h = Neg (k)\n" if computed == "node" else ""
    nodes = f"{first} a = Conv (x, {name})\n c = Conv <{PAD}> (x, w3)\n y = Add (a, c)"
    proto = build(nodes, inputs=X + weight)
    if computed == "overridable":
        proto.graph.input.append(onnx.helper.make_tensor_value_info("w1", onnx.TensorProto.FLOAT, (4, 4, 1, 1)))
    check(proto, ["Neg"] * (computed == "node") + ["Conv", "Conv", "Add"])
    assert reasons(proto) == ["overridable" if computed == "overridable" else "not-constant"]


def test_a_batch_norm_in_training_stays() -> None:
    nodes = f"a = Conv (x, w1)\n n, e, v = {BN} <training_mode=1> (x, p_s, p_b, p_m, p_v)\n y = Add (a, n)"
    result = fold(build(nodes), verify=False)
    assert operators(to_proto(result.model)) == ["Conv", BN, "Add"]


def test_contradicting_sizes_stay() -> None:
    """Results of 2 and of 4 channels: no input can make it run, and nothing certain says so before."""
    nodes = "r = Relu (x)\n a = Conv (r, w1)\n c = Conv (r, less)\n y = Add (a, c)"
    proto = build(nodes, inputs="float[N,C,H,W] x")
    result = fold(proto, verify=False)
    assert operators(to_proto(result.model)) == ["Relu", "Conv", "Conv", "Add"]
    assert reasons(proto) == ["shape"]


def test_channels_that_contradict_each_other_stay() -> None:
    nodes = "r = Relu (x)\n a = Conv (r, w1)\n c = Conv (r, narrow1)\n y = Add (a, c)"
    weight = np.ones((4, 8, 1, 1), np.float32)
    proto = build(nodes, inputs="float[N,C,H,W] x", narrow1=weight)
    assert operators(to_proto(fold(proto, verify=False).model)) == ["Relu", "Conv", "Conv", "Add"]
    assert reasons(proto) == ["shape"]


def test_matmuls_of_unknown_rank_stay() -> None:
    nodes = "r = other.Thing (x)\n a = MatMul (r, m)\n c = MatMul (r, m2)\n y = Add (a, c)"
    header = '<ir_version: 8, opset_import: ["": 17, "other": 1]>'
    proto = model(f"g ({X}) => ({Y}) {{ {nodes} }}", {"m": (7, 7), "m2": (7, 7)}, header=header)
    assert operators(to_proto(fold(proto, verify=False).model)) == ["Thing", "MatMul", "MatMul", "Add"]
    assert reasons(proto) == ["rank"]


def test_a_later_fold_scales_a_weight_of_another_shape() -> None:
    """The depthwise carrier becomes a convolution of two groups, which a batch norm behind another sum scales."""
    nodes = (
        f"a = Conv <group=4, {PAD}> (x, d3)\n c = Conv <group=4, {PAD}> (x, e3)\n e = Conv <group=2> (x, g1)"
        f"\n r = Relu (x)\n f = Conv (r, w1)\n t = Sum (a, c, e)\n u = Add (t, f)\n y = {BN} (u, p_s, p_b, p_m, p_v)"
    )
    random = np.random.default_rng(0).standard_normal
    weights = {"e3": random((4, 1, 3, 3)).astype(np.float32), "g1": random((4, 2, 1, 1)).astype(np.float32)}
    check(build(nodes, **weights), ["Conv", "Relu", "Conv", "Add"])


HUGE = {
    "shifted": (
        "a = Conv <pads=[0,0,1000000,1000000]> (x, w1)\n c = Conv <pads=[1000000,1000000,0,0]> (x, v1)\n t = Add (a, c)"
        f"\n n = {BN} (t, p_s, p_b, p_m, p_v)\n e = Conv <pads=[1000000,1000000,0,0]> (x, w1)\n y = Add (n, e)"
    ),
    "pool": "a = AveragePool <kernel_shape=[1000000,1000000]> (x)\n c = Conv (x, w1)\n y = Add (a, c)",
    "outer-product": "a = Conv (x, to_one)\n c = Conv (a, from_one)\n y = Add (c, x)",
}


@pytest.mark.parametrize("case", HUGE)
def test_a_size_that_a_file_may_claim_is_not_allocated(case: str) -> None:
    channels = 20_000 if case == "outer-product" else 4
    values = {"to_one": np.ones((1, channels, 1, 1), np.float32), "from_one": np.ones((channels, 1, 1, 1), np.float32)}
    proto = build(
        HUGE[case], X.replace("4", str(channels)), **{name: values[name] for name in named(HUGE[case], values)}
    )
    report = fold(proto, verify=False).report
    assert not any(site.summary for site in report.sites)


def test_half_precision() -> None:
    proto = build(BLOCK, X.replace("float", "float16"), Y.replace("float", "float16"), dtype="float16")
    inputs = make_inputs(proto)
    folded = to_proto(fold(proto).model)
    assert operators(folded) == ["Conv"]
    assert_near(run(folded, inputs)[0], run(proto, inputs)[0])


def test_half_precision_that_overflows_stays() -> None:
    """Each weight is finite, their sum is not."""
    large = np.full((4, 4, 1, 1), 60000, np.float16)
    nodes = "a = Conv (x, u)\n c = Conv (x, v)\n y = Add (a, c)"
    proto = build(nodes, X.replace("float", "float16"), Y.replace("float", "float16"), u=large, v=large)
    assert operators(to_proto(fold(proto, verify=False).model)) == ["Conv", "Conv", "Add"]
    assert reasons(proto) == ["overflow"]
    small = build(nodes, X.replace("float", "float16"), Y.replace("float", "float16"), u=large, v=-large)
    assert operators(to_proto(fold(small, verify=False).model)) == ["Conv"]


def test_half_precision_bias_that_overflows_stays() -> None:
    large = np.full(4, 60000, np.float16)
    nodes = "a = Conv (x, w1, u)\n c = Conv (x, v1, u)\n y = Add (a, c)"
    proto = build(nodes, X.replace("float", "float16"), Y.replace("float", "float16"), dtype="float16", u=large)
    assert operators(to_proto(fold(proto, verify=False).model)) == ["Conv", "Conv", "Add"]
    assert reasons(proto) == ["overflow"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_stays(value: float) -> None:
    proto = build(BLOCK, w1=np.full((4, 4, 1, 1), value, np.float32))
    folded = to_proto(fold(proto, verify=False).model)
    assert operators(folded) == ["Conv", "Conv", "Add"], "the other two are merged"
    assert any(np.isnan(tensor) or np.isinf(tensor) for tensor in weights(folded))


def weights(proto: onnx.ModelProto) -> list[float]:
    return [float(onnx.numpy_helper.to_array(tensor).reshape(-1)[0]) for tensor in proto.graph.initializer]


def test_a_quantized_weight_stays() -> None:
    nodes = f"k = DequantizeLinear (q8, s8)\n a = Conv (x, k)\n c = Conv <{PAD}> (x, w3)\n y = Add (a, c)"
    values = {"q8": np.full((4, 4, 1, 1), 3, np.int8), "s8": np.float32(0.5)}
    proto = build(nodes, **values)  # type: ignore[arg-type]
    assert operators(to_proto(fold(proto, verify=False).model)) == ["DequantizeLinear", "Conv", "Conv", "Add"]
    assert reasons(proto) == ["quantized"]


def test_a_weight_that_others_read_is_copied() -> None:
    nodes = f"{BLOCK.replace('y = ', 's = ')}\n e = Conv <{PAD}> (s, w3)\n y = Relu (e)"
    folded = check(build(nodes), ["Conv", "Conv", "Relu"])
    source = build(nodes)
    kept = {tensor.name: tensor for tensor in folded.graph.initializer}["w3"]
    assert kept.raw_data == {tensor.name: tensor for tensor in source.graph.initializer}["w3"].raw_data


def test_weights_in_constant_nodes() -> None:
    first = "k = Constant <value_floats=[0.5, 1.0, 2.0, 4.0]> ()\n g = Reshape (k, s4)\n"
    nodes = f"{first} a = Conv <group=4> (x, g)\n c = Conv <group=4, {PAD}> (x, d3)\n y = Add (a, c)"
    check(build(nodes, s4=np.array([4, 1, 1, 1])), ["Conv"])


@pytest.mark.parametrize("rank", [1, 3])
def test_other_ranks(rank: int) -> None:
    axes, size = ",".join("AB D".replace(" ", "")[:rank]), (4, 4, *[1] * rank)
    inputs = f"float[N,4,{','.join(['H'] * rank)}] x"
    pads = ",".join("1" * 2 * rank)
    nodes = f"a = Conv (x, u)\n c = Conv <pads=[{pads}]> (x, v)\n n = {BN} (x, p_s, p_b, p_m, p_v)\n y = Sum (a, c, n)"
    random = np.random.default_rng(0).standard_normal
    values = {"u": random(size).astype(np.float32), "v": random((4, 4, *[3] * rank)).astype(np.float32)}
    check(build(nodes, inputs, f"float[N,4,{axes}] y", **values), ["Conv"])


GEMMS = {
    "two": ("a = Gemm (x, m)\n c = Gemm (x, m2)\n y = Add (a, c)", ["Gemm"]),
    "alpha-beta-transposed": (
        "a = Gemm <alpha=0.5, beta=2.0, transB=1> (x, m, last)\n c = Gemm <alpha=2.0> (x, m2)\n y = Sub (a, c)",
        ["Gemm"],
    ),
    "with-matmul-and-identity": (
        "a = Gemm (x, m, last)\n c = MatMul (x, m2)\n t = Add (a, c)\n y = Add (x, t)",
        ["Gemm"],
    ),
    "batch-norm-in-front": (
        f"n = {BN} (x, r_s, r_b, r_m, r_v)\n a = Gemm (n, m, last)\n o = {BN} (x, u_s, u_b, u_m, u_v)\n c = Gemm (o, m2)"
        "\n t = Add (a, c)\n y = Mul (t, scalar)",
        ["Gemm"],
    ),
    "low-rank": (
        "a = MatMul (x, m)\n s = MatMul (x, down)\n c = MatMul (s, up)\n d = Mul (c, scalar)\n y = Add (a, d)",
        ["MatMul"],
    ),
    "low-rank-and-identity-would-grow": (
        "s = MatMul (x, down)\n c = MatMul (s, up)\n y = Add (x, c)",
        ["MatMul", "MatMul", "Add"],
    ),
    "transposed-data": ("a = Gemm <transA=1> (x, m)\n c = Gemm (x, m2)\n y = Add (a, c)", ["Gemm", "Gemm", "Add"]),
    "matrix-of-constants": ("a = Gemm (x, m, m2)\n c = Gemm (x, m2)\n y = Add (a, c)", ["Gemm", "Gemm", "Add"]),
    "vector-weight": ("a = MatMul (x, last)\n c = MatMul (x, scale7)\n y = Add (a, c)", ["MatMul", "MatMul", "Add"]),
}


@pytest.mark.parametrize("case", GEMMS)
def test_gemm(case: str) -> None:
    nodes, expected = GEMMS[case]
    extra = {**batch_norm("r", 7), **batch_norm("u", 7), "down": (7, 2), "up": (2, 7), "scale7": (7,)}
    values = {
        name: np.abs(np.random.default_rng(5).standard_normal(extra[name])).astype(np.float32)
        for name in named(nodes, extra)
    }
    output = "float[A] y" if case == "vector-weight" else "float[A,B] y"
    check(build(nodes, "float[M,7] x".replace("M", "7"), output, **values), expected)


def test_in_the_branches_of_an_if() -> None:
    nodes = f"""y = If (c) <then_branch = one () => (float[N,A,B,D] y1) {{
            a = Conv (x, w1)
            d = Conv <{PAD}> (x, w3)
            y1 = Add (a, d) }},
        else_branch = two () => (float[N,A,B,D] y2) {{ y2 = Conv (x, v1) }}>"""
    proto = build(nodes, f"{X}, bool c")
    folded = check(proto, ["If"])
    (body, _) = (attribute.g for attribute in folded.graph.node[0].attribute)
    assert [node.op_type for node in body.node] == ["Conv"]


def test_a_sum_that_a_body_reads() -> None:
    nodes = f"""a = Conv (x, w1)
        d = Conv <{PAD}> (x, w3)
        t = Add (a, d)
        y = If (c) <then_branch = one () => (float[N,A,B,D] y1) {{ y1 = Relu (t) }},
        else_branch = two () => (float[N,A,B,D] y2) {{ y2 = Conv (a, v1) }}>"""
    check(build(nodes, f"{X}, bool c"), ["Conv", "Conv", "Add", "If"])
    check(build(nodes.replace("(a, v1)", "(t, v1)"), f"{X}, bool c"), ["Conv", "If"])


def test_in_a_function() -> None:
    """Constants inside, so that no call has to be inlined."""
    body = f"""<ir_version: 8, opset_import: ["": 17, "local": 1]>
        g ({X}) => ({Y}) {{ y = local.block (x) }}
        <domain: "local", opset_import: ["": 17]> block (x) => (y) {{
            k = Constant <value = float[1, 4, 1, 1] {{1.0, 2.0, 3.0, 4.0}}> ()
            s = Constant <value_ints=[4, 4, 1, 1]> ()
            w = Expand (k, s)
            a = Conv (x, w)
            y = Sub (a, x)
        }}"""
    proto = onnx.parser.parse_model(body)
    inputs = make_inputs(proto)
    folded = to_proto(fold(proto, verify=False).model)
    assert_near(run(folded, inputs)[0], run(proto, inputs)[0])
    (function,) = folded.functions
    assert [node.op_type for node in function.node] == ["Constant", "Conv"]


@pytest.mark.parametrize("opset", [6, 7, 9, 13, 21])
def test_opsets(opset: int) -> None:
    proto = model(f"g ({X}) => ({Y}) {{ {BLOCK} }}", {name: SHAPES[name] for name in ("w1", "w3", "b")}, opset=opset)
    inputs = make_inputs(proto)
    folded = to_proto(fold(proto, verify=False).model)
    assert operators(folded) == ["Conv"]
    assert_near(exact(folded, inputs)[0].astype(np.float32), exact(proto, inputs)[0])


def test_a_broadcasting_add_before_opset_7_stays() -> None:
    nodes = "a = Conv (x, w1)\n c = Conv (x, one)\n d = Flatten (c)\n y = Add <broadcast=1, axis=0> (a, x)"
    proto = model(f"g ({X}) => ({Y}) {{ {nodes} }}", {"w1": (4, 4, 1, 1), "one": (1, 4, 1, 1)}, opset=6)
    assert "Add" in operators(to_proto(fold(proto, verify=False).model))


def test_a_new_batch_norm_is_never_written() -> None:
    """Layer scale around a pool, as in PoolFormer: no batch norm before, none after."""
    nodes = (
        f"a = AveragePool <kernel_shape=[3,3], {PAD}> (x)\n d = Sub (a, x)\n u = Mul (d, c_s)\n t = Add (x, u)"
        "\n e = Mul (t, c_s)\n y = Add (e, c_s)"
    )
    folded = check(build(nodes), ["AveragePool", "Sub", "Mul", "Add", "Mul", "Add"])
    assert BN not in operators(folded)


NORMS = (
    f"n = {BN} (x, p_s, p_b, p_m, p_v)\n c = Conv <{PAD}> (x, w3)\n d = {BN} (c, q_s, q_b, q_m, q_v)\n y = Add (n, d)"
)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, ["Conv"]),
        ({"rules": ["parallel"]}, ["Conv"]),
        ({"only": ["parallel"]}, ["Conv"]),
        ({"skip": ["parallel"]}, [BN, "Conv", "Add"]),
        ({"rules": ["conv"]}, [BN, "Conv", "Add"]),
        ({"skip": [f"{BN} -> n"]}, [BN, "Conv", "Add"]),
        ({"skip": [f"{BN} -> d"]}, [BN, BN, "Conv", "Add"]),
        ({"only": [f"{BN} -> d"]}, [BN, "Conv", "Add"]),
        ({"only": [f"{BN} -> n", f"{BN} -> d"]}, ["Conv"]),
    ],
)
def test_selection(options: dict[str, list[str]], left: list[str]) -> None:
    check(build(NORMS), left, **options)  # type: ignore[arg-type]


def test_the_report_has_a_line_for_each_merge() -> None:
    result = fold(build(f"{NORMS.replace('y = ', 's = ')}\n r = Relu (s)\n y = Add (r, s)"))
    (site,) = result.report.sites
    assert site.summary == "2 branches, 2 batch norms -> 1 Conv 3x3"
    assert (site.outcome, site.rules, site.channels) == ("folded", ("parallel",), 4)
    assert set(site.nodes) == {f"{BN} -> n", "Conv -> c", f"{BN} -> d", "Add -> s"}
    names = [node.name for node in to_proto(result.model).graph.node]
    assert set(site.targets) <= set(names)
    assert result.report.verification is not None and result.report.verification.passed


def test_names_are_kept() -> None:
    """The convolution that carries the sum keeps its name and its weight's, the sum's value its name."""
    proto = build(f"{BLOCK.replace('y = ', 's = ')}\n y = Relu (s)")
    proto.graph.node[1].name = "block.conv3"
    folded = to_proto(fold(proto, verify=False).model)
    assert folded.graph.node[0].name == "block.conv3"
    assert folded.graph.node[0].output[0] == "s"
    assert {tensor.name for tensor in folded.graph.initializer} == {"w3", "b"}


def test_folding_again_changes_nothing() -> None:
    for nodes, _ in CASES.values():
        once = fold(build(nodes), verify=False).model
        assert not fold(once, verify=False).report.changed
