"""Outputs that are indices or sequences: what rounding explains is no difference."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from bnexport import verify
from bnexport.folding import fold
from tests.support.onnx_text import array_of, model, with_arrays

HEAD = """g (float16[N,3,H,W] x) => (int64[{}] y) {{ c = Conv <pads = [1, 1, 1, 1]> (x, w:16.3.3.3) b = Norm (c, p:16)
    r = Relu (b) z = Conv (r, u:5.16.1.1) {} }}"""
MAXIMUM = "ArgMax <axis = 1, keepdims = 0> (z)"
SELECTIONS = {
    "argmax": ("N,H,W", f"y = {MAXIMUM}"),
    "argmin": ("N,1,H,W", "y = ArgMin <axis = 1> (z)"),
    "transposed": ("N,H,W", f"a = {MAXIMUM} t = Transpose <perm = [0, 2, 1]> (a) y = Identity (t)"),
    "top": ("N,2,H,W", "v, y = TopK <axis = 1> (z, k)"),
    "cast": ("N,H,W", f"a = {MAXIMUM} i = Cast <to = 6> (a) y = Cast <to = 7> (i)"),
}


def head(name: str) -> onnx.ModelProto:
    return model(HEAD.format(*SELECTIONS[name]), values={"k": np.array([2])}, dtype="float16")


@pytest.mark.parametrize("name", SELECTIONS)
def test_ties_of_a_float16_head(name: str) -> None:
    report = fold(head(name), verify="whole").report
    assert report.folded and report.verification
    outputs = {output.name: output for output in report.verification.outputs}
    assert outputs["y"].bound == "ties"
    assert any("before" in each and output.max_abs_diff > 0 for each, output in outputs.items())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ArgMax <axis = 1> (z)", "ArgMin <axis = 1> (z)"),
        ("ArgMax <axis = 1> (z)", "ArgMax <axis = 1, select_last_index = 1> (z)"),
        ("ArgMax <axis = 2> (z)", "ArgMax <axis = 3> (z)"),
    ],
)
def test_another_selection_fails(first: str, second: str) -> None:
    """Half of the values are 0, exactly: which of them is selected is no matter of rounding."""
    body = "g (float[N,6,8,8] x) => (int64[N,A,B,C] y) {{ h = Relu (x)\n z = Neg (h)\n y = {} }}"
    assert verify(model(body.format(first)), model(body.format(second))).status == "failed"


def test_wrong_values_fail() -> None:
    wrong = with_arrays(head("argmax"), {"u": array_of(head("argmax"), "u") * np.float16(1.1)})
    assert verify(head("argmax"), wrong, method="whole").status == "failed"


SEQUENCE = """g (float[N,3,H,W] x) => (seq(float[N,16,A,B]) y) {{ c = Conv (x, w:16.3.3.3) b = Norm (c, p:16)
    y = SequenceConstruct {} }}"""


def test_a_right_fold_of_a_sequence_passes() -> None:
    result = fold(model(SEQUENCE.format("(b, b)")), verify="whole").report.verification
    assert result and result.outputs[0].max_abs_diff > 0


@pytest.mark.parametrize(
    ("items", "text"), [("(b)", "sequences or maps differ in length or keys"), ("(c, b)", "differs by")]
)
def test_other_sequences_fail(items: str, text: str) -> None:
    result = verify(model(SEQUENCE.format("(b, c)")), model(SEQUENCE.format(items)), method="whole")
    assert result.status == "failed" and text in result.reason
