"""Every producer that takes a batch norm in, against float64."""

from __future__ import annotations

import pytest

from tests.support.onnx_text import batch_norm, fold_and_check, model, operators

X2, X3, X4, X5 = "float[N,6] x", "float[N,6,L] x", "float[N,6,H,W] x", "float[N,6,D,H,W] x"
BN = "y = BatchNormalization <epsilon=0.001> (z, p_s, p_b, p_m, p_v)"

# id: (inputs, output type, nodes before the batch norm, parameters, operators that must be left)
CASES = {
    "conv-padded-strided-dilated": (X4, "float[N,8,A,B]",
        "z = Conv <pads=[1,2,0,1], strides=[2,1], dilations=[1,2]> (x, w, c)", {"w": (8, 6, 3, 3), "c": (8,)},
        ["Conv"]),
    "conv-transpose-1d-groups-3": (X3, "float[N,9,A]", "z = ConvTranspose <group=3> (x, w)", {"w": (6, 3, 2)},
        ["ConvTranspose"]),
    "conv-transpose-add": (X4, "float[N,8,A,B]", "t = ConvTranspose <strides=[2,2]> (x, w)\n z = Add (t, c)",
        {"w": (6, 8, 2, 2), "c": (1, 8, 1, 1)}, ["ConvTranspose"]),
    "conv-add-mul-sub-div": (X4, "float[N,8,A,B]",
        "t = Conv (x, w)\n t1 = Add (t, c)\n t2 = Mul (d_s, t1)\n t3 = Sub (t2, c)\n z = Div (t3, d_s)",
        {"w": (8, 6, 1, 1), "c": (8, 1, 1), "d_s": (8, 1, 1)}, ["Conv"]),
    "conv-reversed-sub": (X4, "float[N,8,A,B]", "t = Conv (x, w)\n z = Sub (c, t)", {"w": (8, 6, 1, 1), "c": (8, 1, 1)},
        ["Conv"]),
    "gemm-trans-b-alpha-beta": (X2, "float[N,8]", "z = Gemm <transB=1, alpha=0.5, beta=-2.0> (x, w, c)",
        {"w": (8, 6), "c": (8,)}, ["Gemm"]),
    "gemm-trans-a": ("float[6,N] x", "float[N,8]", "z = Gemm <transA=1> (x, w, c)", {"w": (6, 8), "c": (8,)}, ["Gemm"]),
    "gemm-column-constant": ("float[2,6] x", "float[2,8]", "z = Gemm (x, w, c)", {"w": (6, 8), "c": (2, 1)}, ["Gemm"]),
    "gemm-full-constant": ("float[2,6] x", "float[2,8]", "z = Gemm <beta=0.5> (x, w, c)", {"w": (6, 8), "c": (2, 8)},
        ["Gemm"]),
    "gemm-beta-zero": (X2, "float[N,8]", "z = Gemm <beta=0.0> (x, w, c)", {"w": (6, 8), "c": (8,)}, ["Gemm"]),
    "matmul-transpose": ("float[N,L,6] x", "float[N,8,L]",
        "t = MatMul (x, w)\n a = Add (t, c)\n z = Transpose <perm=[0,2,1]> (a)", {"w": (6, 8), "c": (8,)},
        ["MatMul", "Add", "Transpose"]),
    "matmul-left-batched": ("float[3,6,L] x", "float[3,8,L]", "z = MatMul (w, x)", {"w": (3, 8, 6)}, ["MatMul", "Add"]),
    "reshape-keeps-channels": ("float[N,6,4,4] x", "float[N,8,16]",
        "t = Conv (x, w)\n s = Constant <value = int64[3] {0, 8, -1}> ()\n z = Reshape (t, s)", {"w": (8, 6, 1, 1)},
        ["Conv", "Constant", "Reshape"]),
    "flatten-of-1x1": (X4, "float[N,8]", "t = Conv (x, w)\n g = GlobalAveragePool (t)\n z = Flatten (g)",
        {"w": (8, 6, 1, 1)}, ["Conv", "GlobalAveragePool", "Flatten"]),
    "reshape-of-linear": ("float[N,5,6] x", "float[A,8]",
        "t = MatMul (x, w)\n b = Add (t, c)\n s = Constant <value = int64[2] {-1, 8}> ()\n z = Reshape (b, s)",
        {"w": (6, 8), "c": (8,)}, ["MatMul", "Add", "Constant", "Reshape"]),
    "average-pool-counting-padding": (X4, "float[N,8,A,B]",
        "t = Conv (x, w)\n z = AveragePool <kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1> (t)",
        {"w": (8, 6, 1, 1)}, ["Conv", "AveragePool", "Add"]),
    "reduce-mean": (X4, "float[N,8]", "t = Conv (x, w)\n z = ReduceMean <axes=[2,3], keepdims=0> (t)",
        {"w": (8, 6, 1, 1)}, ["Conv", "ReduceMean"]),
    "mean-of-tokens": ("float[N,L,6] x", "float[N,8]",
        "t = MatMul (x, w)\n a = Add (t, c)\n z = ReduceMean <axes=[1], keepdims=0> (a)", {"w": (6, 8), "c": (8,)},
        ["MatMul", "Add", "ReduceMean"]),
    "difference-of-two": (X4, "float[N,8,A,B]", "t = Conv (x, w)\n u = Conv (x, w2, c)\n z = Sub (t, u)",
        {"w": (8, 6, 1, 1), "w2": (8, 6, 1, 1), "c": (8,)}, ["Conv", "Conv", "Sub"]),
    "sum-with-position-constant": ("float[N,6,7,7] x", "float[N,8,7,7]", "t = Conv (x, w)\n z = Add (t, c)",
        {"w": (8, 6, 1, 1), "c": (1, 8, 7, 7)}, ["Conv", "Add"]),
    "concat-of-channels": (X4, "float[N,8,A,B]", "t = Conv (x, w)\n u = Conv (x, w2)\n z = Concat <axis=1> (t, u)",
        {"w": (5, 6, 1, 1), "w2": (3, 6, 1, 1)}, ["Conv", "Conv", "Concat"]),
    "concat-with-constant": ("float[2,6,3,3] x", "float[2,8,3,3]", "t = Conv (x, w)\n z = Concat <axis=1> (t, c)",
        {"w": (5, 6, 1, 1), "c": (2, 3, 3, 3)}, ["Conv", "Concat"]),
    "pixel-shuffle-crd": (X4, "float[N,2,A,B]", 't = Conv (x, w)\n z = DepthToSpace <blocksize=2, mode="CRD"> (t)',
        {"w": (8, 6, 1, 1)}, ["Conv", "DepthToSpace"]),
    "pixel-shuffle-dcr": (X4, "float[N,2,A,B]", 't = Conv (x, w)\n z = DepthToSpace <blocksize=2, mode="DCR"> (t)',
        {"w": (8, 6, 1, 1)}, ["Conv", "DepthToSpace"]),
    "split-of-channels": (X4, "float[N,5,A,B]",
        "t = Conv (x, w)\n s = Constant <value_ints = [3, 5]> ()\n u, z = Split <axis=1> (t, s)\n v = Relu (u)",
        {"w": (8, 6, 1, 1)}, ["Conv", "Constant", "Split", "Relu"]),
    "slice-of-channels": (X4, "float[N,3,A,B]",
        "t = Conv (x, w)\n a = Constant <value_ints = [1]> ()\n e = Constant <value_ints = [-1]> ()\n"
        " i = Constant <value_ints = [2]> ()\n z = Slice (t, a, e, a, i)", {"w": (8, 6, 1, 1)},
        ["Conv", "Constant", "Constant", "Constant", "Slice"]),
    "slice-of-positions": (X4, "float[N,8,A,B]",
        "t = Conv (x, w)\n a = Constant <value_ints = [1]> ()\n e = Constant <value_ints = [9223372036854775807]> ()\n"
        " i = Constant <value_ints = [-1]> ()\n z = Slice (t, a, e, i)", {"w": (8, 6, 1, 1)},
        ["Conv", "Constant", "Constant", "Constant", "Slice"]),
    "pad-with-zeros": (X4, "float[N,8,A,B]",
        "t = Conv (x, w)\n p = Constant <value_ints = [0,0,1,0,0,0,1,1]> ()\n z = Pad (t, p)", {"w": (8, 6, 1, 1)},
        ["Conv", "Constant", "Pad", "Add"]),
    "gemm-into-reshape-to-channels": (X2, "float[N,8,1,1]",
        "t = Gemm (x, w, c)\n s = Constant <value_ints = [0, 8, 1, 1]> ()\n z = Reshape (t, s)",
        {"w": (6, 8), "c": (8,)}, ["Gemm", "Constant", "Reshape"]),
    "concat-through-pool-and-shuffle": (X4, "float[N,2,A,B]",
        "t = Conv (x, w)\n u = Conv (x, w2)\n v = AveragePool <kernel_shape=[2,2]> (u)\n"
        " p = AveragePool <kernel_shape=[2,2]> (t)\n c = Concat <axis=1> (p, v)\n" ' z = DepthToSpace <blocksize=2, mode="CRD"> (c)',
        {"w": (5, 6, 1, 1), "w2": (3, 6, 1, 1)},
        ["Conv", "Conv", "AveragePool", "AveragePool", "Concat", "DepthToSpace"]),
    "second-batch-norm": (X4, "float[N,8,A,B]", "t = Conv (x, w)\n z = BatchNormalization (t, q_s, q_b, q_m, q_v)",
        {"w": (8, 6, 1, 1), **batch_norm("q", 8)}, ["Conv"]),
}  # fmt: skip


def channels(output: str) -> int:
    return int(output.split("[")[1].split(",")[1].rstrip("]"))


@pytest.mark.parametrize("case", CASES)
def test_folds_into_the_producer(case: str) -> None:
    inputs, output, nodes, shapes, left = CASES[case]
    count = channels(output)
    proto = model(f"g ({inputs}) => ({output} y) {{ {nodes}\n {BN} }}", {**shapes, **batch_norm("p", count)})
    # Branches that are merged leave no map to place.
    folded, result = fold_and_check(proto, skip=["parallel"])
    assert operators(folded) == left
    assert result.report.folded


def test_the_last_of_uneven_parts_is_the_smaller() -> None:
    nodes = "t = Conv (x, w)\n z, u = Split <axis=1, num_outputs=2> (t)\n v = Relu (u)"
    shapes = {"w": (5, 6, 1, 1), **batch_norm("p", 3)}
    proto = model(f"g ({X4}) => (float[N,3,A,B] y, float[N,2,A,B] v) {{ {nodes}\n {BN} }}", shapes, opset=18)
    folded, _ = fold_and_check(proto)
    assert operators(folded) == ["Conv", "Split", "Relu"]
