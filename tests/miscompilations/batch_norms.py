"""Mistakes in folding a batch norm into the operator in front of it."""

from __future__ import annotations

import numpy as np

from tests.miscompilations.mistake import OURS, Mistake, affine, column, floats
from tests.support.onnx_text import batch_norm, parameters

_P = parameters(
    {
        **{"w": (4, 4, 3, 3), "u": (4, 4, 3, 3), "c": (4,), "d": (4, 2, 3, 3), "m": (4, 4), "r": (4, 4)},
        **batch_norm("p", 4),
        **batch_norm("q", 4),
    }
)
# Statistics as training leaves them, of a Conv of normal data.
_TRAINED = {
    **{"w": _P["w"], "p_s": floats(np.ones(4)), "p_b": floats(np.ones(4))},
    **{"p_m": floats(0.1 * _P["p_m"]), "p_v": floats((_P["w"] ** 2).sum(axis=(1, 2, 3)))},
}
_K, _H = affine(_P)
_K2, _H2 = affine(_P, "q")
_X = "float[N,4,7,7] x"
_Y = "float[N,4,5,5] y"
_BN = "(z, p_s, p_b, p_m, p_v)"

_E = parameters({"e": (1, 4, 3, 3)})["e"]


def _normal(array: np.ndarray, share: float) -> np.ndarray:
    """Normalise with a share of the array's own statistics."""
    axes = (0, 2, 3)
    mean = (1 - share) * _P["p_m"] + share * array.mean(axis=axes)
    var = (1 - share) * _P["p_v"] + share * array.var(axis=axes)
    k, h = affine({**_P, "p_m": mean, "p_v": var})
    return array * column(k, 3) + column(h, 3)


_FOLDED = {**_P, "f": floats(_P["w"] * column(_K)), "h": floats(_H)}
_BOTH = {**_FOLDED, "e": floats(_P["u"] * column(_K2)), "g": floats(_H2)}

MISTAKES: list[Mistake] = [
    Mistake("conv_transpose_axis", "ultralytics/ultralytics#25364", "ConvTranspose, BatchNormalization",
        "The scale multiplies axis 0 of the weight, its input channels, instead of axis 1.", graph=f"{_X} => float[N,4,9,9] y",
        values={**_P, "wrong_w": floats(_P["w"] * column(_K)), "right_w": floats(_P["w"] * _K[None, :, None, None]), "h": floats(_H)},
        original=f"z = ConvTranspose (x, w) y = BatchNormalization {_BN}", wrong="y = ConvTranspose (x, wrong_w, h)",
        right="y = ConvTranspose (x, right_w, h)"),
    Mistake("conv_transpose_groups", "pytorch/pytorch#180995", "ConvTranspose, BatchNormalization",
        "Every group gets the scales of the first one.", graph=f"{_X} => float[N,4,9,9] y", values={**_P,
        "wrong_d": floats(_P["d"] * np.tile(_K[:2], (4, 1))[:, :, None, None]),
        "right_d": floats(_P["d"] * np.repeat(_K.reshape(2, 2), 2, axis=0)[:, :, None, None]), "h": floats(_H)},
        original=f"z = ConvTranspose <group=2> (x, d) y = BatchNormalization {_BN}",
        wrong="y = ConvTranspose <group=2> (x, wrong_d, h)", right="y = ConvTranspose <group=2> (x, right_d, h)"),
    Mistake("conv_groups", "intel/ipex-llm#2826", "Conv, BatchNormalization",
        "Channels of a second group are folded with the parameters of the first one.", graph=f"{_X} => {_Y}",
        values={**_P, "wrong_d": floats(_P["d"] * column(np.tile(_K[:2], 2))), "right_d": floats(_P["d"] * column(_K)),
        "wrong_h": floats(np.tile(_H[:2], 2)), "h": floats(_H)},
        original=f"z = Conv <group=2> (x, d) y = BatchNormalization {_BN}",
        wrong="y = Conv <group=2> (x, wrong_d, wrong_h)", right="y = Conv <group=2> (x, right_d, h)"),
    Mistake("conv_bias_not_scaled", "ultralytics/yolov3#807", "Conv, BatchNormalization",
        "The convolution's own bias is added without the scale.", graph=f"{_X} => {_Y}",
        values={**_P, "f": floats(_P["w"] * column(_K)), "h": floats(_P["c"] + _H), "g": floats(_P["c"] * _K + _H)},
        original=f"z = Conv (x, w, c) y = BatchNormalization {_BN}", wrong="y = Conv (x, f, h)", right="y = Conv (x, f, g)"),
    Mistake("shift_dropped", "tenstorrent/tt-metal#5317", "Conv, BatchNormalization",
        "Mean and shift are lost where the convolution has no bias of its own.", graph=f"{_X} => {_Y}", values=_FOLDED,
        original=f"z = Conv (x, w) y = BatchNormalization {_BN}", wrong="y = Conv (x, f)", right="y = Conv (x, f, h)"),
    Mistake("negative_scale", "LeelaChessZero/lc0#779", "Conv, BatchNormalization", "The sign of negative scales is lost.",
        graph=f"{_X} => {_Y}",
        values={**_P, "wrong_f": floats(_P["w"] * column(np.abs(_K))), "f": floats(_P["w"] * column(_K)), "h": floats(_H)},
        original=f"z = Conv (x, w) y = BatchNormalization {_BN}", wrong="y = Conv (x, wrong_f, h)", right="y = Conv (x, f, h)"),
    Mistake("batch_norm_removed", "THU-MIG/RepViT#39", "Conv, BatchNormalization", "A batch norm whose module has no function to fuse "
        "becomes an Identity.", graph=f"{_X} => {_Y}", values=_FOLDED,
        original=f"z = Conv (x, w) n = BatchNormalization {_BN} y = Relu (n)", wrong="z = Conv (x, w) n = Identity (z) y = Relu (n)",
        right="n = Conv (x, f, h) y = Relu (n)"),
    Mistake("bias_name_of_two_convs", "pytorch/pytorch#166797", "Conv, BatchNormalization",
        "Two convolutions of one value get one bias, since its name is made of the value's.",
        graph=f"{_X} => {_Y}, float[N,4,5,5] t", values=_BOTH,
        original=f"z = Conv (x, w) y = BatchNormalization {_BN} a = Conv (x, u) t = BatchNormalization (a, q_s, q_b, q_m, q_v)",
        wrong="y = Conv (x, f, h) t = Conv (x, e, h)", right="y = Conv (x, f, h) t = Conv (x, e, g)"),
    Mistake("bias_name_of_a_shortcut", "pytorch/pytorch#169178", "Conv, BatchNormalization, Add",
        "ResNet-18's accuracy falls to zero; the cause is not published. Here: a block adds its first branch's bias twice.",
        graph=f"{_X} => {_Y}", values=_BOTH, original=f"z = Conv (x, w) n = BatchNormalization {_BN} a = Conv (x, u) "
        "b = BatchNormalization (a, q_s, q_b, q_m, q_v) s = Add (n, b) y = Relu (s)",
        wrong="n = Conv (x, f, h) b = Conv (x, e, h) s = Add (n, b) y = Relu (s)",
        right="n = Conv (x, f, h) b = Conv (x, e, g) s = Add (n, b) y = Relu (s)"),
    Mistake("bias_name_of_two_matmuls", "pytorch/pytorch#174042", "MatMul, BatchNormalization",
        "Two MatMul of one value get one bias, since its name is made of the value's.", graph="float[N,4] x => float[N,4] y, float[N,4] t",
        values={**_P, "f": floats(_P["m"] * _K), "e": floats(_P["r"] * _K2), "h": floats(_H), "g": floats(_H2)},
        original=f"z = MatMul (x, m) y = BatchNormalization {_BN} a = MatMul (x, r) t = BatchNormalization (a, q_s, q_b, q_m, q_v)",
        wrong="y = Gemm (x, f, h) t = Gemm (x, e, h)", right="y = Gemm (x, f, h) t = Gemm (x, e, g)"),
    Mistake("gemm_beta", "microsoft/onnxscript#3027", "Gemm, BatchNormalization", "The fold takes beta as 1, and leaves the attribute to "
        "scale the new bias.", graph="float[N,4] x => float[N,4] y",
        values={**_P, "f": floats(_P["m"] * _K), "h": floats(_P["c"] * _K + _H), "g": floats(2 * _P["c"] * _K + _H)},
        original=f"z = Gemm <beta=2.0> (x, m, c) y = BatchNormalization {_BN}", wrong="y = Gemm <beta=2.0> (x, f, h)",
        right="y = Gemm (x, f, g)"),
    Mistake("matmul_of_rank_3", "microsoft/onnxruntime#22762", "MatMul, BatchNormalization",
        "The fold scales columns of the product, whose channels are axis 1 at rank 3.", graph="float[N,4,4] x => float[N,4,4] y",
        values={**_P, "f": floats(_P["m"] * _K), "h": floats(_H), "k": floats(column(_K, 2)), "g": floats(column(_H, 2))},
        original=f"z = MatMul (x, m) y = BatchNormalization {_BN}", wrong="z = MatMul (x, f) y = Add (z, h)",
        right="z = MatMul (x, m) s = Mul (z, k) y = Add (s, g)"),
    Mistake("shared_weight", "Tencent/TNN#808", "Conv, BatchNormalization", "A weight that two convolutions share is folded in place for "
        "one of them.", graph=f"{_X} => {_Y}, float[N,4,5,5] t", values=_FOLDED,
        original=f"z = Conv (x, w) y = BatchNormalization {_BN} a = Relu (x) t = Conv (a, w)",
        wrong="y = Conv (x, f, h) a = Relu (x) t = Conv (a, f)", right="y = Conv (x, f, h) a = Relu (x) t = Conv (a, w)"),
    Mistake("reused_conv", "pytorch/pytorch#197539", "Conv, BatchNormalization", "A convolution that is normalised on one path only is "
        "folded on both.", graph=f"{_X}, float[N,4,7,7] v => {_Y}, float[N,4,5,5] t", values=_FOLDED,
        original=f"z = Conv (x, w) y = BatchNormalization {_BN} t = Conv (v, w)", wrong="y = Conv (x, f, h) t = Conv (v, f, h)",
        right="y = Conv (x, f, h) t = Conv (v, w)"),
    Mistake("conv_with_another_reader", "onnx/tensorflow-onnx#1498", "Conv, BatchNormalization, Relu",
        "Another reader of the convolution's output gets the folded values.", graph=f"{_X} => {_Y}, float[N,4,5,5] t", values=_FOLDED,
        original=f"z = Conv (x, w) y = BatchNormalization {_BN} t = Relu (z)", wrong="y = Conv (x, f, h) t = Relu (y)",
        right="y = Conv (x, f, h) z = Conv (x, w) t = Relu (z)"),
    Mistake("factors_of_columns", "onnx/tensorflow-onnx#2152", "Conv, Mul", "Factors of the last axis are folded as if they were those of "
        "the channels.", graph="float[N,4,6,6] x => float[N,4,4,4] y", values={**_P, "f": floats(_P["w"] * column(_K)), "k": floats(_K)},
        original="z = Conv (x, w) y = Mul (z, k)", wrong="y = Conv (x, f)", right="z = Conv (x, w) y = Mul (k, z)"),
    Mistake("factor_that_widens", OURS, "Mul, Conv", "A factor of four channels, which widens a value of one, is folded into the weights "
        "behind it: no engine runs it.", graph="float[N,1,7,7] x => float[N,4,5,5] y",
        values={**_P, "k": _P["c"].reshape(1, 4, 1, 1), "f": floats(_P["w"] * _P["c"].reshape(1, 4, 1, 1))},
        original="a = Mul (x, k) y = Conv (a, w)", wrong="y = Conv (x, f)", right="a = Mul (k, x) y = Conv (a, w)", runs=False),
    Mistake("norm_of_a_constant", OURS, "BatchNormalization, Add", "A batch norm of a constant at opset 11 is computed with a tenth of "
        "the constant's own statistics.", graph="float[1,4,3,3] x => float[1,4,3,3] y",
        values={**_P, "e": _E, "f": floats(_normal(_E, 0.1)), "g": floats(_normal(_E, 0.0))}, opset=11,
        original="n = BatchNormalization (e, p_s, p_b, p_m, p_v) y = Add (x, n)", wrong="y = Add (x, f)", right="y = Add (x, g)"),
    Mistake("weights_at_opset_11", OURS, "Conv, BatchNormalization", "Weights off by a hundredth pass at opset 11, where the float64 "
        "model is evaluated as one that trains.", graph=f"{_X} => {_Y}", values={**_TRAINED, "f": floats(1.01 * _P["w"])}, opset=11,
        original=f"z = Conv (x, w) n = BatchNormalization {_BN} y = Relu (n)",
        wrong=f"z = Conv (x, f) n = BatchNormalization {_BN} y = Relu (n)",
        right=f"i = Identity (x) z = Conv (i, w) n = BatchNormalization {_BN} y = Relu (n)"),
]  # fmt: skip
