"""Operators as they were in each opset."""

from __future__ import annotations

import numpy as np

from tests.folding.corpus.case import Case

CONV, NORM = "t = Conv (x, w:8.6.1.1)", "y = Norm (z, p:8)"
CASES: dict[str, Case] = {
    "pad-2": Case(f'{CONV} z = Pad <pads=[0,0,1,1,0,0,1,1], mode="edge"> (t) y = Norm <is_test=1, consumed_inputs=[0,0,0,1,1], spatial=1> '
        "(z, p:8)", "Conv Pad", opset=2, judge="proof"),
    "pad-10": Case(f'{CONV} z = Pad <pads=[0,0,1,2,0,0,1,1], mode="reflect"> (t) {NORM}', "Conv Pad", opset=10, judge="run"),
    "pad-10-value": Case(f"{CONV} z = Pad <pads=[0,0,1,1,0,0,1,1], value=0.0> (t) {NORM}", "Conv Pad Add", opset=10, judge="run"),
    "pad-crops": Case(f"{CONV} p = Constant <value_ints=[0,0,-1,-1,0,0,0,-2]> () z = Pad (t, p) {NORM}", "Conv Constant Pad", judge="run"),
    "pad-18": Case(f"{CONV} p = Constant <value_ints=[1,0,1,1]> () i = Constant <value_ints=[-2,3]> () z = Pad (t, p, , i) y = Norm "
        "<training_mode=0> (z, p:8)", "Conv Constant Constant Pad Add", opset=18),
    "split-2": Case("t = Conv (x, w:12.6.1.1) z, u = Split <axis=1, split=[8,4]> (t) v = Abs (u) "
        "y = Norm <is_test=1, consumed_inputs=[0,0,0,1,1], spatial=1> (z, p:8)", "Conv Split Abs", opset=2, judge="proof"),
    "split-11": Case(f"t = Conv (x, w:12.6.1.1) u, z = Split <axis=-3, split=[4,8]> (t) v = Abs (u) {NORM}",
        "Conv Split Abs", opset=11, judge="run"),
    "split-18": Case("t = Conv (x, w:16.6.1.1) z, u = Split <axis=1, num_outputs=2> (t) v = Abs (u) "
        "y = Norm <training_mode=0> (z, p:8)", "Conv Split Abs", opset=18),
    "slice-1": Case("t = Conv (x, w:12.6.1.1) z = Slice <starts=[2], ends=[10], axes=[1]> (t) y = Norm <is_test=1, "
        "consumed_inputs=[0,0,0,1,1], spatial=1> (z, p:8)", "Conv Slice", opset=1, judge="proof"),
    "slice-9": Case(f"{CONV} z = Slice <starts=[0,0,1], ends=[99,8,99]> (t) {NORM}", "Conv Slice", opset=9, judge="run"),
    "squeeze-11": Case(f"{CONV} u = Unsqueeze <axes=[2]> (t) z = Squeeze <axes=[-3]> (u) {NORM}",
        "Conv Unsqueeze Squeeze", opset=11, judge="run"),
    "squeeze-order": Case(f"u = MatMul (x, w:3.8) i = Constant <value_ints=[2,0]> () z = Squeeze (u, i) {NORM}",
        "MatMul Constant Squeeze Add", ins="float[1,N,1,3] x"),
    "mean-13": Case(f"{CONV} z = ReduceMean <axes=[-1], keepdims=1> (t) {NORM}", "Conv ReduceMean", opset=13, judge="run"),
    "mean-18": Case(f"{CONV} i = Constant <value_ints=[2,3]> () z = ReduceMean <keepdims=1> (t, i) y = Norm <training_mode=0> (z, p:8)",
        "Conv Constant ReduceMean", opset=18),
    "upsample-7": Case(f'{CONV} z = Upsample <mode="nearest", scales=[1.0,1.0,2.0,2.0]> (t) y = Norm <spatial=1> (z, p:8)',
        "Conv Upsample", opset=7, judge="run"),
    "upsample-9": Case(f'{CONV} s = Constant <value = float[4] {{1, 1, 2, 2}}> () z = Upsample <mode="linear"> (t, s) {NORM}',
        "Conv Constant Upsample", opset=9, judge="run"),
    "resize-10": Case(f'{CONV} s = Constant <value = float[4] {{1, 1, 2, 2}}> () z = Resize <mode="nearest"> (t, s) {NORM}',
        "Conv Constant Resize", opset=10, judge="run"),
    "resize-19": Case(f'{CONV} s = Constant <value = float[2] {{2, 1.5}}> () z = Resize <mode="linear", axes=[2,3]> (t, , s) y = Norm '
        "<training_mode=0> (z, p:8)", "Conv Constant Resize", opset=19),
    # Before opset 7 an average was over the padding, too.
    "average-pool-6": Case(f"{CONV} z = AveragePool <kernel_shape=[3,3], pads=[1,1,1,1]> (t) y = Norm <is_test=1> (z, p:8)",
        "Conv AveragePool Add", opset=6, judge="proof", method="not_run"),
    "average-pool-6-of-a-scale": Case(f"{CONV} z = AveragePool <kernel_shape=[3,3], pads=[1,1,1,1]> (t) y = Norm <is_test=1> (z, p:8)",
        "Conv AveragePool", opset=6, judge="proof", values={"p_b": np.zeros(8, np.float32), "p_m": np.zeros(8, np.float32)}),
    "another-axis-by-attribute": Case("z = Conv (x, w:8.6.1.1) t = Mul <broadcast=1, axis=2> (z, k:8) "
        "y = Add <broadcast=1, axis=2> (t, k)", "Conv Mul Add", opset=6, ins="float[2,6,8,3] x", judge="proof"),
    "dropout-1-test": Case(f"{CONV} z = Dropout <is_test=1, consumed_inputs=[0], ratio=0.3> (t) y = Norm <is_test=1> (z, p:8)",
        "Conv Dropout", opset=1, judge="proof"),
    "dropout-1-training": Case(f"{CONV} z = Dropout (t) y = Norm <is_test=1> (z, p:8)", refused="training", opset=1),
    "dropout-6-test": Case(f"{CONV} z, m = Dropout <is_test=1> (t) y = Norm <is_test=1> (z, p:8)", "Conv Dropout", opset=6, judge="proof"),
    "dropout-6-training": Case(f"{CONV} z = Dropout <is_test=0> (t) y = Norm <is_test=1> (z, p:8)", refused="training", opset=6),
    "dropout-7": Case(f"{CONV} z = Dropout <ratio=0.9> (t) {NORM}", "Conv Dropout", opset=7, judge="run"),
    "dropout-10": Case(f"{CONV} z, m = Dropout (t) {NORM}", "Conv Dropout", opset=10, judge="run"),
    "dropout-10-mask": Case(f"{CONV} z, m = Dropout (t) q = Not (m) {NORM}", refused="mask", opset=10, outs="y, q"),
    "dropout-12": Case(f"{CONV} r = Constant <value_float=0.5> () z = Dropout <seed=3> (t, r) {NORM}", "Conv Constant Dropout", opset=12,
        judge="run"),
    "dropout-13-training": Case(f"{CONV} r = Constant <value_float=0.5> () m = Constant <value = bool {{1}}> () z = Dropout (t, r, m) "
        f"{NORM}", refused="training", opset=13),
    "dropout-22-inference": Case(f"{CONV} r = Constant <value_float=0.5> () m = Constant <value = bool {{0}}> () z = Dropout (t, r, m) "
        f"{NORM}", "Conv Constant Constant Dropout", opset=22),
    "dropout-13-mode-from-outside": Case(f"{CONV} r = Constant <value_float=0.5> () z = Dropout (t, r, b) {NORM}", refused="not-constant",
        opset=13, ins="float[N,6,H,W] x, bool b"),
}  # fmt: skip
