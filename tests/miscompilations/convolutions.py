"""Mistakes next to convolutions and pools: additions, factors and padding that move into an attribute or a weight."""

from __future__ import annotations

import numpy as np

from tests.miscompilations.mistake import OURS, Mistake, column, floats, ints
from tests.support.onnx_text import parameters

_P = parameters({"w": (4, 4, 3, 3), "d": (4, 2, 3, 3), "c": (4,), "m": (6, 1, 3, 3), "k": (4, 1, 1), "a": (1, 4, 5, 5)})
_X = "float[N,4,7,7] x"
_Y = "float[N,4,5,5] y"
_ONE_AROUND = {"pads": ints(0, 0, 1, 1, 0, 0, 1, 1)}
_FIRST_GROUP = np.asarray([1, 1, 0, 0]).reshape(1, 4, 1, 1)

MISTAKES: list[Mistake] = [
    Mistake("conv_add_groups", "microsoft/onnxruntime#12498", "Conv, Add",
        "A constant that is fused into a grouped convolution reaches the first group only.", graph=f"{_X} => {_Y}",
        values={**_P, "b": floats(_P["a"] * _FIRST_GROUP)}, original="z = Conv <group=2> (x, d) y = Add (z, a)",
        wrong="z = Conv <group=2> (x, d) y = Add (z, b)", right="z = Conv <group=2> (x, d) y = Add (a, z)"),
    Mistake("conv_mul_groups", "openvinotoolkit/openvino#1882", "Conv, Mul", "The factors of a grouped convolution are those of its first "
        "group.", graph=f"{_X} => {_Y}",
        values={**_P, "f": floats(_P["d"] * column(np.tile(_P["k"][:2].ravel(), 2))), "e": floats(_P["d"] * column(_P["k"].ravel()))},
        original="z = Conv <group=2> (x, d) y = Mul (z, k)", wrong="y = Conv <group=2> (x, f)", right="y = Conv <group=2> (x, e)"),
    Mistake("mul_with_its_constant_first", "microsoft/onnxruntime#27879", "Conv, Mul",
        "MobileCLIP's cosine similarity falls to 0.96; the cause is not published. Here: the bias keeps its size.", graph=f"{_X} => {_Y}",
        values={**_P, "f": floats(_P["w"] * column(_P["k"].ravel())), "b": floats(_P["c"] * _P["k"].ravel())},
        original="z = Conv (x, w, c) y = Mul (k, z)", wrong="y = Conv (x, f, c)", right="y = Conv (x, f, b)"),
    Mistake("conv_mul_name_of_a_node", "microsoft/onnxruntime#28540", "Conv, Mul", "A reader of the fused convolution names its node "
        "instead of its output: no engine loads it.", graph=f"{_X} => {_Y}", values={**_P, "f": floats(_P["w"] * column(_P["k"].ravel()))},
        original="z = Conv (x, w) s = Mul (z, k) y = Relu (s)", wrong="z = Conv (x, f) y = Relu (conv_node)",
        right="z = Conv (x, f) y = Relu (z)", runs=False, verdict="refused"),
    Mistake("depthwise_multiplier", "onnx/onnx-tensorflow#306", "Conv", "Output channels of a depthwise multiplier of two are stored in "
        "the other order.", graph="float[N,3,7,7] x => float[N,6,5,5] y",
        values={**_P, "f": _P["m"].reshape(3, 2, 1, 3, 3).transpose(1, 0, 2, 3, 4).reshape(6, 1, 3, 3)},
        original="y = Conv <group=3> (x, m)", wrong="y = Conv <group=3> (x, f)", right="y = Conv <group=3, strides=[1,1]> (x, m)"),
    Mistake("pad_value_into_conv", "inisis/OnnxSlim#53", "Pad, Conv",
        "Padding with another number than 0 becomes the convolution's.", graph="float[N,4,7,7] x => float[N,4,7,7] y",
        values={**_P, **_ONE_AROUND, "v": floats(1.0)}, original="z = Pad (x, pads, v) y = Conv (z, w)",
        wrong="y = Conv <pads=[1,1,1,1]> (x, w)", right='z = Pad <mode="constant"> (x, pads, v) y = Conv (z, w)'),
    Mistake("pad_mode_into_conv", "inisis/OnnxSlim#21", "Pad, Conv", "Padding by reflection becomes the convolution's zeros.",
        graph="float[N,4,7,7] x => float[N,4,7,7] y", values={**_P, **_ONE_AROUND}, original='z = Pad <mode="reflect"> (x, pads) y = Conv '
        "(z, w)", wrong="y = Conv <pads=[1,1,1,1]> (x, w)"),
    Mistake("pad_with_two_readers", "tsingmicro-toolchain/OnnxSlim#29", "Pad, Conv, GlobalMaxPool",
        "A padding goes into one convolution although something else reads it, too.",
        graph="float[N,4,7,7] x => float[N,4,7,7] y, float[N,4,1,1] t", values={**_P, **_ONE_AROUND},
        original="n = Softplus (x) v = Neg (n) z = Pad (v, pads) y = Conv (z, w) t = GlobalMaxPool (z)",
        wrong="n = Softplus (x) v = Neg (n) y = Conv <pads=[1,1,1,1]> (v, w) t = GlobalMaxPool (v)",
        right="n = Softplus (x) v = Neg (n) y = Conv <pads=[1,1,1,1]> (v, w) z = Pad (v, pads) t = GlobalMaxPool (z)"),
    Mistake("negative_pads_into_conv", "microsoft/onnxscript#2838", "Pad, Conv", "Negative padding, which cuts, becomes the "
        "convolution's, where it is not allowed.", graph="float[N,4,9,9] x => float[N,4,5,5] y",
        values={**_P, "pads": ints(0, 0, -1, -1, 0, 0, -1, -1), "two": ints(1, 1), "end": ints(-1, -1), "axes": ints(2, 3)},
        original="z = Pad (x, pads) y = Conv (z, w)", wrong="y = Conv <pads=[-1,-1,-1,-1]> (x, w)",
        right="z = Slice (x, two, end, axes) y = Conv (z, w)", runs=False),
    Mistake("pad_beside_auto_pad", "onnx/optimizer#33", "Pad, Conv", "A padding in front of a convolution with auto_pad is dropped: the "
        "attribute decides.", graph="float[N,4,8,8] x => float[N,4,5,5] y", values={**_P, **_ONE_AROUND},
        original='z = Pad (x, pads) y = Conv <auto_pad="SAME_UPPER", strides=[2,2]> (z, w)',
        wrong='y = Conv <auto_pad="SAME_UPPER", strides=[2,2]> (x, w)', right="z = Pad (x, pads) y = Conv <pads=[0,0,1,1], strides=[2,2]> "
        "(z, w)"),
    Mistake("pad_into_max_pool", "onnxsim/onnxsim#290", "Pad, MaxPool", "Zeros in front of a maximum become padding, which never is the "
        "maximum.", graph="float[N,4,6,6] x => float[N,4,4,4] y", values=_ONE_AROUND,
        original="z = Pad (x, pads) y = MaxPool <kernel_shape=[2,2], strides=[2,2]> (z)",
        wrong="y = MaxPool <kernel_shape=[2,2], strides=[2,2], pads=[1,1,1,1]> (x)",
        right='z = Pad <mode="constant"> (x, pads) y = MaxPool <kernel_shape=[2,2], strides=[2,2]> (z)'),
    Mistake("pad_into_average_pool", "microsoft/onnxruntime#23190", "Pad, AveragePool",
        "Zeros in front of a mean become padding that the mean does not count.", graph="float[N,4,6,6] x => float[N,4,4,4] y",
        values=_ONE_AROUND, original="z = Pad (x, pads) y = AveragePool <kernel_shape=[2,2], strides=[2,2]> (z)",
        wrong="y = AveragePool <kernel_shape=[2,2], strides=[2,2], pads=[1,1,1,1]> (x)",
        right="y = AveragePool <kernel_shape=[2,2], strides=[2,2], pads=[1,1,1,1], count_include_pad=1> (x)"),
    Mistake("count_include_pad", "VeriSilicon/TIM-VX#423", "AveragePool", "An absent count_include_pad is taken as 1.",
        graph="float[N,4,6,6] x => float[N,4,4,4] y", original="y = AveragePool <kernel_shape=[2,2], strides=[2,2], pads=[1,1,1,1]> (x)",
        wrong="y = AveragePool <kernel_shape=[2,2], strides=[2,2], pads=[1,1,1,1], count_include_pad=1> (x)",
        right="y = AveragePool <kernel_shape=[2,2], strides=[2,2], pads=[1,1,1,1], count_include_pad=0> (x)"),
    Mistake("average_pool_ceil_mode", "pytorch/pytorch#183528", "AveragePool",
        "Windows that ceil_mode adds are divided by their whole size, not by the elements that torch counts.",
        graph="float[N,1,4,4] x => float[N,1,3,3] y", values={"ones": floats(np.ones((1, 1, 3, 3))),
        "count": floats(1 / np.outer([3, 3, 2], [3, 3, 2])), "pads": ints(0, 0, 1, 1, 0, 0, 2, 2),
        "ratio": floats(9 / np.outer([3, 3, 2], [3, 3, 2]))},
        original="z = Pad (x, pads) s = Conv <strides=[2,2]> (z, ones) y = Mul (s, count)",
        wrong="z = Pad (x, pads) y = AveragePool <kernel_shape=[3,3], strides=[2,2]> (z)",
        right="z = Pad (x, pads) s = AveragePool <kernel_shape=[3,3], strides=[2,2]> (z) y = Mul (s, ratio)"),
    Mistake("ceil_mode", "Xilinx/onnx-mlir#560", "MaxPool", "Sizes are rounded down whatever ceil_mode says, which only odd ones show.",
        graph="float[N,4,H,W] x => float[N,4,A,B] y", original="y = MaxPool <kernel_shape=[2,2], strides=[2,2], ceil_mode=1> (x)",
        wrong="y = MaxPool <kernel_shape=[2,2], strides=[2,2]> (x)"),
    Mistake("same_upper_by_the_kernel", "root-project/root#21793", "Conv", "SAME_UPPER pads by half of the kernel, whatever the sizes and "
        "the stride are.", graph="float[N,4,8,8] x => float[N,4,4,4] y", values=_P, original="y = Conv <strides=[2,2], "
        'auto_pad="SAME_UPPER"> (x, w)', wrong="y = Conv <strides=[2,2], pads=[1,1,1,1]> (x, w)",
        right="y = Conv <strides=[2,2], pads=[0,0,1,1]> (x, w)"),
    Mistake("same_upper_beside_a_fold", OURS, "Conv, Mul", "Beside a fold SAME_UPPER becomes the padding of odd sizes, where the declared "
        "one is even.", graph="float[N,4,8,8] x => float[N,4,8,4] y",
        values={**{"r": _P["w"][:, :, :1].copy(), "f": floats(_P["w"][:, :, :1] * column(_P["k"].ravel()))}, "k": _P["k"]},
        original='z = Conv <strides=[1,2], auto_pad="SAME_UPPER"> (x, r) y = Mul (z, k)',
        wrong="y = Conv <strides=[1,2], pads=[0,1,0,1]> (x, f)", right="y = Conv <strides=[1,2], pads=[0,0,0,1]> (x, f)"),
    Mistake("conv_transpose_same_upper", "microsoft/onnxruntime#9370", "ConvTranspose",
        "SAME_UPPER puts the larger half of an odd padding in front, as SAME_LOWER should.", graph="float[N,4,4,4] x => float[N,4,8,8] y",
        values=_P, original='y = ConvTranspose <strides=[2,2], auto_pad="SAME_UPPER"> (x, w)',
        wrong="y = ConvTranspose <strides=[2,2], pads=[1,1,0,0]> (x, w)", right="y = ConvTranspose <strides=[2,2], pads=[0,0,1,1]> (x, "
        "w)"),
    Mistake("kernel_turned", OURS, "Conv", "A kernel of 1 x 3 became one of 3 x 1; only the product of its sizes was compared.",
        graph="float[N,4,7,7] x => float[N,4,7,7] y",
        values={**_P, "r": _P["w"][:, :, :1].copy(), "e": _P["w"][:, :, :1].reshape(4, 4, 3, 1), "two": floats(2.0)},
        original="z = Conv <pads=[1,1,1,1], kernel_shape=[1,3]> (x, r) y = Mul (z, two)",
        wrong="z = Conv <pads=[1,1,1,1], kernel_shape=[3,1]> (x, e) y = Mul (z, two)",
        right="z = Conv <pads=[1,1,1,1]> (x, r) y = Mul (two, z)"),
    Mistake("uint8_image", OURS, "Cast, Conv", "Kernels upside down in a network that takes a uint8 image; samples of 0 and 1 hardly show "
        "it.", graph="uint8[N,4,7,7] x => float[N,4,5,5] y", values={**_P, "f": _P["w"][:, :, ::-1].copy(), "s": floats(1 / 255)},
        original="i = Cast <to=1> (x) n = Mul (i, s) z = Conv (n, w) y = Sigmoid (z)",
        wrong="i = Cast <to=1> (x) n = Mul (i, s) z = Conv (n, f) y = Sigmoid (z)", right="i = Cast <to=1> (x) n = Mul (s, i) z = Conv "
        "(n, w) y = Sigmoid (z)", inputs={"x": np.arange(2 * 4 * 49, dtype=np.uint8).reshape(2, 4, 7, 7)}),
    Mistake("pool_before_sigmoid", OURS, "GlobalAveragePool, Sigmoid", "A mean became a maximum in front of a gate; inputs near 0, where "
        "each gate is a half, do not show it.", graph="float[N,4,7,7] x => float[N,4,5,5] y", values=_P,
        original="z = Conv (x, w) p = GlobalAveragePool (z) g = Sigmoid (p) y = Mul (z, g)",
        wrong="z = Conv (x, w) p = GlobalMaxPool (z) g = Sigmoid (p) y = Mul (z, g)",
        right="z = Conv (x, w) p = GlobalAveragePool (z) g = Sigmoid (p) y = Mul (g, z)"),
]  # fmt: skip
