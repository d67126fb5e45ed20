"""Sums of branches, and the operators that are left of each: merged right, or not at all.

Every case is compared with ONNX's reference implementation in float64 and names the operators that are left, so that a
case which is right only because nothing was merged shows.
"""

from __future__ import annotations

import pytest

from bnexport.folding import fold
from tests.folding.parallel.sums import BN, PAD, build, check
from tests.support.onnx_text import exact, run

# What the sum is made of, and the operators that are left.
CASES: dict[str, tuple[str, list[str]]] = {
    # geometry
    "sizes-1-3-5": (f"a = Conv <pads=[2,2,2,2]> (x, w5)\n b0 = Conv <{PAD}> (x, w3)\n c = Conv (x, w1)"
        "\n t = Add (a, b0)\n y = Add (t, c)", ["Conv"]),
    "cross-in-a-square": (f"a = Conv <{PAD}> (x, w3)\n h = Conv <pads=[0,1,0,1]> (x, w13)\n v = Conv <pads=[1,0,1,0]> (x, w31)"
        "\n t = Add (a, h)\n y = Add (t, v)", ["Conv"]),
    "cross-alone-would-grow": ("h = Conv <pads=[0,1,0,1]> (x, w13)\n v = Conv <pads=[1,0,1,0]> (x, w31)\n y = Add (h, v)",
        ["Conv", "Conv", "Add"]),
    "different-strides-of-one-size": (
        # Both make 4 x 4 of 7 x 7.
        f"a = Conv <{PAD}, strides=[2,2]> (x, w3)\n b0 = Conv <dilations=[3,3], strides=[1,1]> (x, w2)\n y = Add (a, b0)",
        ["Conv", "Conv", "Add"],
    ),
    "stride-2": (f"a = Conv <{PAD}, strides=[2,2]> (x, w3)\n b0 = Conv <strides=[2,2]> (x, w1)\n y = Add (a, b0)",
        ["Conv"]),
    "stride-2-without-padding-before": (
        "a = Conv <strides=[2,2]> (x, w2)\n b0 = Conv <strides=[2,2], pads=[0,0,1,1]> (x, w3)\n y = Add (a, b0)",
        ["Conv"],
    ),
    "stride-2-equal-only-at-odd-sizes": (
        # (H - 2) // 2 against (H - 3) // 2: at 7 both are 2.
        "a = Conv <strides=[2,2]> (x, w2)\n b0 = Conv <strides=[2,2]> (x, w3)\n y = Add (a, b0)",
        ["Conv", "Conv", "Add"],
    ),
    "dilated-and-point": ("a = Conv <dilations=[2,2], pads=[2,2,2,2]> (x, w3)\n b0 = Conv <dilations=[3,3]> (x, w1)\n y = Add (a, b0)",
        ["Conv"]),
    "different-dilations": (f"a = Conv <dilations=[2,2], pads=[2,2,2,2]> (x, w3)\n b0 = Conv <{PAD}> (x, v3)\n y = Add (a, b0)",
        ["Conv", "Conv", "Add"]),
    "different-dilations-and-identity": (
        f"a = Conv <dilations=[2,2], pads=[2,2,2,2]> (x, w3)\n b0 = Conv <{PAD}> (x, v3)\n t = Add (a, b0)\n y = Add (t, x)",
        ["Conv", "Conv", "Add"],
    ),
    "shifted-by-its-pads": (
        # The 1x1 reads the upper left corner of the 3x3.
        f"a = Conv <{PAD}> (x, w3)\n b0 = Conv <pads=[1,1,-0,0]> (x, w2)\n y = Add (a, b0)",
        ["Conv"],
    ),
    "asymmetric-pads": ("a = Conv <pads=[0,2,2,0]> (x, w3)\n b0 = Conv <pads=[2,0,0,2]> (x, v3)\n y = Add (a, b0)",
        ["Conv", "Conv", "Add"]),
    "asymmetric-pads-and-point": ("a = Conv <pads=[0,2,2,0]> (x, w3)\n b0 = Conv (x, w1)\n y = Add (a, b0)", ["Conv"]),
    "auto-pad-same-upper": ("""a = Conv <auto_pad="SAME_UPPER"> (x, w2)\n b0 = Conv <pads=[0,0,1,1]> (x, w2b)\n y = Add (a, b0)""",
        ["Conv"]),
    "auto-pad-same-lower": ("""a = Conv <auto_pad="SAME_LOWER"> (x, w2)\n b0 = Conv <auto_pad="SAME_UPPER"> (x, w3)\n y = Add (a, b0)""",
        ["Conv"]),
    "auto-pad-valid": ("""a = Conv <auto_pad="VALID"> (x, w3)\n b0 = Conv <auto_pad="VALID"> (x, v3)\n y = Add (a, b0)""",
        ["Conv"]),
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
    "one-channel-is-broadcast": ("a = Conv (x, w1)\n b0 = Conv (x, one)\n y = Add (a, b0)", ["Conv", "Conv", "Add"]),
    "positions-are-broadcast": (
        # The second makes 1 x 1 of 7 x 7.
        "a = Conv (x, w1)\n b0 = Conv <dilations=[6,6]> (x, w2)\n y = Add (a, b0)",
        ["Conv", "Conv", "Add"],
    ),
    "depthwise": (f"a = Conv <group=4, {PAD}> (x, d3)\n b0 = Conv <group=4> (x, d1)\n t = Add (a, b0)\n y = Add (x, t)",
        ["Conv"]),
    "depthwise-with-dense-would-grow": (f"a = Conv <group=4, {PAD}> (x, d3)\n b0 = Conv (x, w1)\n y = Add (a, b0)",
        ["Conv", "Conv", "Add"]),
    "depthwise-into-dense": (f"a = Conv <group=4, {PAD}> (x, d3)\n b0 = Conv <{PAD}> (x, w3)\n y = Sub (a, b0)",
        ["Conv"]),
    "groups-refined": (f"a = Conv <group=2, {PAD}> (x, g3)\n b0 = Conv <group=4, {PAD}> (x, d3)\n y = Add (a, b0)",
        ["Conv"]),
    # signs and constants
    "subtracted": (f"a = Conv (x, w1)\n b0 = Conv <{PAD}> (x, w3)\n t = Sub (a, b0)\n y = Sub (x, t)", ["Conv"]),
    "constants-in-the-tree": (f"a = Conv (x, w1, b)\n u = Add (a, c_s)\n b0 = Conv <{PAD}> (x, w3)\n t = Sub (scalar, b0)\n y = Add (u, t)",
        ["Conv"]),
    "constant-that-varies-by-position": (f"a = Conv (x, w1)\n u = Add (a, full)\n b0 = Conv <{PAD}> (x, w3)\n y = Sub (u, b0)",
        ["Conv", "Add"]),
    "vector-meets-the-last-axis": (f"a = Conv (x, w1)\n u = Add (a, last)\n b0 = Conv <{PAD}> (x, w3)\n y = Add (u, b0)",
        ["Conv", "Add"]),
    "scale-along-the-last-axis": (f"a = Conv (x, w1)\n u = Mul (a, last)\n b0 = Conv <{PAD}> (x, w3)\n y = Add (u, b0)",
        ["Conv", "Mul", "Conv", "Add"]),
    "layer-scale-of-a-difference": (
        f"a = Conv <group=4, {PAD}> (x, d3)\n n = {BN} (x, p_s, p_b, p_m, p_v)\n d = Sub (a, n)\n u = Mul (d, c_s)"
        "\n y = Add (x, u)",
        ["Conv"],
    ),
    "batch-norm-of-the-sum": (f"a = Conv <group=4, {PAD}> (x, d3)\n t = Add (a, x)\n y = {BN} (t, p_s, p_b, p_m, p_v)",
        ["Conv"]),
    "twice-the-same": ("t = Add (x, x)\n a = Conv (x, w1)\n y = Add (t, a)", ["Conv"]),
    # terms that stay outside
    "not-linear": (f"a = Conv (x, w1)\n r = Relu (x)\n t = Add (a, r)\n b0 = Conv <{PAD}> (x, w3)\n y = Add (t, b0)",
        ["Relu", "Conv", "Add"]),
    "subtracted-and-not-linear": (f"a = Conv (x, w1)\n r = Relu (x)\n t = Sub (r, a)\n b0 = Conv <{PAD}> (x, w3)\n y = Sub (b0, t)",
        ["Relu", "Conv", "Sub"]),
    "two-inputs": (f"r = Relu (x)\n a = Conv (x, w1)\n c = Conv (r, v1)\n b0 = Conv <{PAD}> (x, w3)\n e = Conv <{PAD}> (r, v3)"
        "\n t = Add (a, c)\n u = Add (b0, e)\n y = Add (t, u)", ["Relu", "Conv", "Conv", "Add"]),
    "branch-read-elsewhere": (f"a = Conv (x, w1)\n b0 = Conv <{PAD}> (x, w3)\n t = Add (a, b0)\n r = Relu (a)\n y = Mul (t, r)",
        ["Conv", "Conv", "Add", "Relu", "Mul"]),
    "sum-in-between-read-elsewhere": (f"a = Conv (x, w1)\n b0 = Conv <{PAD}> (x, w3)\n t = Add (a, b0)\n c = Conv (x, v1)\n u = Add (t, c)"
        "\n y = Mul (t, u)", ["Conv", "Conv", "Add", "Mul"]),
    "affine-of-a-mixed-sum": (f"r = Relu (x)\n t = Add (x, r)\n u = Mul (t, c_s)\n a = Conv (x, w1)\n b0 = Conv <{PAD}> (x, w3)"
        "\n v = Add (a, u)\n y = Add (v, b0)", ["Relu", "Add", "Mul", "Conv", "Add"]),
    # padding behind a shift
    "shift-before-padding": (f"n = {BN} (x, p_s, p_b, p_m, p_v)\n a = Conv <{PAD}> (n, w3)\n b0 = Conv <{PAD}> (x, v3)\n y = Add (a, b0)",
        [BN, "Conv", "Conv", "Add"]),
    "shift-before-no-padding": (f"n = {BN} (x, p_s, p_b, p_m, p_v)\n a = Conv (n, w3)\n b0 = Conv (x, v3)\n y = Add (a, b0)",
        ["Conv"]),
    "scale-before-padding": (f"n = Mul (x, c_s)\n a = Conv <{PAD}> (n, w3)\n b0 = Conv <{PAD}> (x, v3)\n y = Add (a, b0)",
        ["Conv"]),
    "padded-before-the-shift": (f"p = Pad (x, pads1)\n s = Conv (p, w1)\n n = {BN} (s, p_s, p_b, p_m, p_v)\n a = Conv (n, w3)"
        f"\n b0 = Conv <{PAD}> (x, v3)\n y = Add (a, b0)", ["Conv"]),
    "one-pad-for-two-branches": (f"p = Pad (x, pads1)\n a = Conv (p, w3)\n c = Conv (p, v3)\n e = Conv <{PAD}> (x, w3)\n t = Add (a, c)"
        "\n y = Add (t, e)", ["Conv"]),
    "one-pad-for-a-branch-and-something-else": (
        f"p = Pad (x, pads1)\n a = Conv (p, w3)\n e = Conv <{PAD}> (x, v3)\n t = Add (a, e)\n r = MaxPool <kernel_shape=[3,3]> (p)"
        "\n y = Add (t, r)",
        ["Pad", "MaxPool", "Conv", "Add"],
    ),
    "one-pad-of-a-point-for-two-branches": ("s = Conv (x, w1)\n p = Pad (s, pads1)\n a = Conv (p, w3)\n c = Conv (p, v3)\n y = Add (a, c)",
        ["Conv", "Conv"]),
    "one-pad-of-a-point-for-other-sums": (
        "s = Conv (x, w1)\n p = Pad (s, pads1)\n a = Conv (p, w3)\n c = Conv (p, v3)\n t = Add (a, c)\n r = Relu (p)"
        "\n e = Conv (r, w3)\n y = Add (t, e)",
        ["Conv", "Pad", "Conv", "Relu", "Conv", "Add"],
    ),
    "pads-that-are-computed-from-constants": ("l = Slice (backwards, minus1, far, zero, minus1)\n p = Pad (x, l)\n a = Conv (p, w3)\n"
        f" c = Conv <{PAD}> (x, v3)\n y = Add (a, c)", ["Conv"]),
    "padded-with-ones": (f"p = Pad (x, pads1, unit)\n a = Conv (p, w3)\n b0 = Conv <{PAD}> (x, v3)\n y = Add (a, b0)",
        ["Pad", "Conv", "Conv", "Add"]),
    "padded-by-reflection": (f'p = Pad <mode="reflect"> (x, pads1)\n a = Conv (p, w3)\n b0 = Conv <{PAD}> (x, v3)\n y = Add (a, b0)',
        ["Pad", "Conv", "Conv", "Add"]),
    "cropped": ("p = Pad (x, crop)\n a = Conv (p, w1)\n b0 = Conv (x, w3)\n y = Add (a, b0)",
        ["Pad", "Conv", "Conv", "Add"]),
    "point-before-and-behind": (
        f"s = Conv (x, w1)\n a = Conv <{PAD}> (s, w3)\n c = Conv <{PAD}> (x, v3, b)\n e = Conv (c, v1)\n y = Add (a, e)",
        ["Conv"],
    ),
    "point-with-bias-before-padding": (f"s = Conv (x, w1, b)\n a = Conv <{PAD}> (s, w3)\n c = Conv <{PAD}> (x, v3)\n y = Add (a, c)",
        ["Conv", "Conv", "Conv", "Add"]),
    "expansion": (f"s = Conv (x, wide)\n a = Conv <{PAD}> (s, narrow)\n y = Add (a, x)", ["Conv"]),
    "bottleneck-would-grow": (f"s = Conv (x, less)\n a = Conv <{PAD}> (s, more)\n y = Add (a, x)",
        ["Conv", "Conv", "Add"]),
    "sum-below-a-point": (f"a = Conv (x, w1)\n c = Conv <{PAD}> (x, w3)\n t = Add (a, c)\n e = Conv (t, v1)\n f = Conv <{PAD}> (x, v3)"
        "\n y = Add (e, f)", ["Conv"]),
    "sum-below-a-shifted-padding": (
        f"a = Conv (x, w1, b)\n c = Conv (x, v1)\n t = Add (a, c)\n e = Conv <{PAD}> (t, w3)\n f = Conv <{PAD}> (x, v3)"
        "\n y = Add (e, f)",
        ["Conv", "Conv", "Conv", "Add"],
    ),
    # pools
    "pool-without-padding": ("a = AveragePool <kernel_shape=[3,3]> (x)\n c = Conv (x, w3)\n y = Add (a, c)", ["Conv"]),
    "pool-that-counts-padding": (
        f"a = AveragePool <kernel_shape=[3,3], {PAD}, count_include_pad=1> (x)\n c = Conv <{PAD}> (x, w3)\n y = Sub (c, a)",
        ["Conv"],
    ),
    "pool-that-does-not-count-padding": (f"a = AveragePool <kernel_shape=[3,3], {PAD}> (x)\n c = Conv <{PAD}> (x, w3)\n y = Add (a, c)",
        ["AveragePool", "Conv", "Add"]),
    "pool-that-rounds-up": ("a = AveragePool <kernel_shape=[2,2], strides=[2,2], ceil_mode=1> (x)\n c = Conv <strides=[2,2]> (x, w1)"
        "\n y = Add (a, c)", ["AveragePool", "Conv", "Add"]),
    "pool-behind-a-point": (f"s = Conv (x, w1)\n a = AveragePool <kernel_shape=[3,3], {PAD}, count_include_pad=1> (s)"
        f"\n c = Conv <{PAD}> (x, w3)\n y = Add (a, c)", ["Conv"]),
    "pool-with-nothing-to-carry-it": (f"a = AveragePool <kernel_shape=[3,3], {PAD}, count_include_pad=1> (x)\n y = Sub (a, x)",
        ["AveragePool", "Sub"]),
    # matrix products
    "matmuls": ("a = MatMul (x, m)\n c = MatMul (x, m2)\n t = Add (a, c)\n y = Add (t, last)", ["MatMul", "Add"]),
    "matmul-and-identity": ("a = MatMul (x, m)\n y = Add (a, x)", ["MatMul"]),
    "matmul-and-per-channel-of-axis-1": ("a = MatMul (x, m)\n u = Mul (x, c_s)\n c = MatMul (x, m2)\n t = Add (a, u)\n y = Add (t, c)",
        ["Mul", "MatMul", "Add"]),
    "matmul-from-the-left": ("a = MatMul (m, x)\n c = MatMul (x, m2)\n y = Add (a, c)", ["MatMul", "MatMul", "Add"]),
    "matmul-with-conv": ("a = MatMul (x, m)\n c = Conv (x, w1)\n y = Add (a, c)", ["MatMul", "Conv", "Add"]),
    # others
    "n-ary-sum": (f"a = Conv (x, w1)\n c = Conv <{PAD}> (x, w3)\n y = Sum (a, x, c)", ["Conv"]),
    "identity-and-dropout-nodes": (f"i = Identity (x)\n d = Dropout (i)\n c = Conv <{PAD}> (x, w3)\n e = Identity (c)\n y = Add (d, e)",
        ["Conv"]),
    "divided": (f"a = Div (x, c_s)\n c = Conv <{PAD}> (x, w3)\n y = Add (a, c)", ["Conv"]),
    "constant-divided-by-data": (f"a = Div (c_s, x)\n c = Conv <{PAD}> (x, w3)\n e = Conv (x, w1)\n t = Add (a, c)\n y = Add (t, e)",
        ["Div", "Conv", "Add"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_case(case: str) -> None:
    nodes, expected = CASES[case]
    # ONNX's reference implementation cannot crop by a Pad.
    check(build(nodes), expected, run if case == "cropped" else exact)


def test_folding_again_changes_nothing() -> None:
    for nodes, _ in CASES.values():
        once = fold(build(nodes), verify=False).model
        assert not fold(once, verify=False).report.changed
