"""Mistakes with Softmax and its relatives, and with the indices of the largest numbers."""

from __future__ import annotations

import numpy as np

from tests.miscompilations.mistake import OURS, Mistake, floats, ints
from tests.support.onnx_text import parameters

_P = parameters({"e": (2, 3, 4), "k": (4, 10)})
_ROW = "float[N,4] x => float[N,4] y"


def _softmax(array: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    powers = np.exp(array.astype(np.float64))
    return floats(powers / powers.sum(axis=axes, keepdims=True))


MISTAKES: list[Mistake] = [
    Mistake("softmax_11_as_13", "apache/tvm#20183", "Softmax", "A Softmax of opset 11, over all axes from 1 on, is read as one of opset "
        "13, over the last axis.", graph="float[N,3,4] x => float[N,3,4] y", values={"s": ints(0, 12), "t": ints(0, 3, 4)}, opset=11,
        original="y = Softmax (x)", wrong="y = Softmax (x)", wrong_opset=13, right="r = Reshape (x, s) n = Softmax (r) y = Reshape (n, t)",
        right_opset=13),
    Mistake("log_softmax_12_as_13", "apache/tvm#19420", "LogSoftmax", "A LogSoftmax of opset 12 is read as one of opset 13.",
        graph="float[N,3,4] x => float[N,3,4] y", values={"s": ints(0, 12), "t": ints(0, 3, 4)}, opset=12, original="y = LogSoftmax (x)",
        wrong="y = LogSoftmax (x)", wrong_opset=13, right="r = Reshape (x, s) n = LogSoftmax (r) y = Reshape (n, t)", right_opset=13),
    Mistake("axis_of_hardmax_11", "apache/tvm#19420", "Hardmax",
        "A Hardmax of opset 11 takes the default axis of opset 13.", graph="float[N,3,4] x => float[N,3,4] y", opset=11,
        original="y = Hardmax (x)", wrong="y = Hardmax <axis=-1> (x)", right="y = Hardmax <axis=1> (x)"),
    Mistake("axis_of_softmax_11", "onnx/onnx-mlir#832", "Softmax", "The default axis of opset 13 is used at opset 11.",
        graph="float[N,3,4] x => float[N,3,4] y", opset=11, original="y = Softmax (x)",
        wrong="y = Softmax <axis=-1> (x)", right="y = Softmax <axis=1> (x)"),
    Mistake("softmax_of_a_constant", OURS, "Softmax, Add", "A Softmax of a constant at opset 11 was evaluated as one of opset 13.",
        graph="float[2,3,4] x => float[2,3,4] y", values={"e": _P["e"], "f": _softmax(_P["e"], (2,)), "r": _softmax(_P["e"], (1, 2))},
        opset=11, original="s = Softmax (e) y = Add (x, s)", wrong="y = Add (x, f)", right="y = Add (x, r)"),
    Mistake("opset_of_an_alias", OURS, "Softmax", "One model names its opset under ai.onnx, the other under the empty domain; they were "
        "not compared.", graph="float[N,3,4] x => float[N,3,4] y", opset=11, original="y = Softmax <axis=1> (x)",
        wrong="y = Softmax <axis=1> (x)", wrong_opset=13, wrong_domain="ai.onnx"),
    Mistake("last_of_equal_numbers", "ROCm/AMDMIGraphX#556", "ArgMax",
        "select_last_index is not read: of equal numbers the first one is taken.", graph="float[N,4] x => int64[N,1] y",
        original="y = ArgMax <axis=1, select_last_index=1> (x)", wrong="y = ArgMax <axis=1> (x)", inputs={"x": floats([[1, 3, 3, 0]])}),
    Mistake("weights_in_front_of_argmax", OURS, "MatMul, ArgMax", "An output of indices hides weights that are off by up to three "
        "hundredths.", graph="float[N,4] x => int64[N,1] y", values={"m": _P["k"], "f": floats(_P["k"] * np.linspace(0.97, 1.03, 10))},
        original="z = MatMul (x, m) y = ArgMax <axis=1> (z)", wrong="z = MatMul (x, f) y = ArgMax <axis=1> (z)",
        inputs={"x": parameters({"x": (400, 4)}, 5)["x"]}),
    Mistake("mask_of_attention", OURS, "Add, Where, Softmax",
        "Another position is masked. The right rewrite masks with minus infinity instead of -1e9.", graph=_ROW,
        values={**{"mask": floats([0, 0, -1e9, 0]), "other": floats([0, -1e9, 0, 0]), "low": floats(-np.inf)},
        "seen": np.asarray([True, True, False, True])}, original="a = Add (x, mask) y = Softmax (a)",
        wrong="a = Add (x, other) y = Softmax (a)", right="a = Where (seen, x, low) y = Softmax (a)"),
]  # fmt: skip
