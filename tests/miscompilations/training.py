"""Mistakes that change whether a graph trains."""

from __future__ import annotations

import numpy as np

from tests.miscompilations.mistake import OURS, Mistake, affine, column, floats
from tests.support.onnx_text import batch_norm, parameters

_P = parameters({"w": (4, 4, 3, 3), **batch_norm("p", 4)})
_K, _H = affine(_P)
_FOLDED = {**_P, "f": floats(_P["w"] * column(_K)), "h": floats(_H)}
_X = "float[N,4,5,5] x"
_Y = "float[N,4,3,3] y"
_BN = "(z, p_s, p_b, p_m, p_v)"
_STATISTICS = f"{_Y}, float[4] u, float[4] v"

MISTAKES: list[Mistake] = [
    Mistake("trained_norm_folded", "pytorch/pytorch#52758", "Conv, BatchNormalization",
        "A batch norm that trains inside a model in eval mode is folded with its running statistics.", graph=f"{_X} => {_Y}",
        values=_FOLDED, original=f"z = Conv (x, w) y, u, v = BatchNormalization <training_mode=1> {_BN}", wrong="y = Conv (x, f, h)",
        right=f"i = Identity (x) z = Conv (i, w) y, u, v = BatchNormalization <training_mode=1> {_BN}"),
    Mistake("training_mode_removed", "NVIDIA/Model-Optimizer#277", "BatchNormalization",
        "training_mode is taken away, and the batch norm uses other statistics.", graph=f"{_X} => {_Y}", values=_P,
        original=f"z = Conv (x, w) y, u, v = BatchNormalization <training_mode=1> {_BN}",
        wrong=f"z = Conv (x, w) y = BatchNormalization {_BN}",
        right=f"z = Conv (x, w) y, u, v = BatchNormalization <training_mode=1, momentum=0.9> {_BN}"),
    Mistake("momentum_of_torch", "microsoft/onnxscript#1289", "BatchNormalization", "torch's momentum, the weight of the new value, is "
        "stored as ONNX's, the weight of the old one.", graph=f"{_X} => {_STATISTICS}", values=_P,
        original=f"z = Conv (x, w) y, u, v = BatchNormalization <training_mode=1, momentum=0.9> {_BN}",
        wrong=f"z = Conv (x, w) y, u, v = BatchNormalization <training_mode=1, momentum=0.1> {_BN}",
        right=f"i = Identity (x) z = Conv (i, w) y, u, v = BatchNormalization <training_mode=1, momentum=0.9> {_BN}"),
    Mistake("momentum_of_the_default", OURS, "BatchNormalization", "An absent momentum, 0.9, counted as equal to 0.1 in training, too.",
        graph=f"{_X} => {_STATISTICS}", values=_P, original=f"z = Conv (x, w) y, u, v = BatchNormalization <training_mode=1> {_BN}",
        wrong=f"z = Conv (x, w) y, u, v = BatchNormalization <training_mode=1, momentum=0.1> {_BN}",
        right=f"z = Conv (x, w) y, u, v = BatchNormalization <training_mode=1, momentum=0.9> {_BN}"),
    Mistake("five_outputs_of_opset_9", OURS, "Conv, BatchNormalization", "Five outputs mean training before opset 14, used or not; the "
        "batch norm was folded as in inference.", graph=f"{_X} => {_Y}", values=_FOLDED, opset=9,
        original=f"z = Conv (x, w) y, u, v, t, s = BatchNormalization {_BN}", wrong="y = Conv (x, f, h)",
        right=f"i = Identity (x) z = Conv (i, w) y, u, v, t, s = BatchNormalization {_BN}"),
    Mistake("dropout_that_trains", "microsoft/onnxruntime#5549", "Dropout", "A Dropout that was exported to drop at inference, too, is "
        "removed.", graph="float[N,64] x => float[N,64] y", values={"r": floats(0.5), "t": np.asarray(True)},
        original="y, m = Dropout <seed=3> (x, r, t)", wrong="y = Identity (x)"),
]  # fmt: skip
