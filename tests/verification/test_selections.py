"""Outputs that are indices or sequences: what rounding explains is no difference."""

from __future__ import annotations

import numpy as np
import pytest

from bnexport import verify
from bnexport.folding import fold
from bnexport.verification.verdict import Verification
from tests.support.onnx_text import batch_norm, model, parameters

HEAD = """g (float16[N,3,H,W] x) => (int64[{}] y) {{
    c = Conv <pads = [1, 1, 1, 1]> (x, w)
    b = BatchNormalization (c, p_s, p_b, p_m, p_v)
    r = Relu (b)
    z = Conv (r, u)
    {} }}"""
SHAPES = {"w": (16, 3, 3, 3), **batch_norm("p", 16), "u": (5, 16, 1, 1)}
SELECTIONS = {
    "argmax": ("N,H,W", "y = ArgMax <axis = 1, keepdims = 0> (z)"),
    "argmin": ("N,1,H,W", "y = ArgMin <axis = 1> (z)"),
    "transposed": (
        "N,H,W",
        "a = ArgMax <axis = 1, keepdims = 0> (z)\n t = Transpose <perm = [0, 2, 1]> (a)\n y = Identity (t)",
    ),
    "top": ("N,2,H,W", "v, y = TopK <axis = 1> (z, k)"),
    "cast": ("N,H,W", "a = ArgMax <axis = 1, keepdims = 0> (z)\n i = Cast <to = 6> (a)\n y = Cast <to = 7> (i)"),
}
NUMBERS = {"k": np.array([2])}


def folded(name: str, seed: int = 0) -> Verification:
    sizes, nodes = SELECTIONS[name]
    values = parameters(SHAPES, seed, "float16")
    result = fold(model(HEAD.format(sizes, nodes), values={**values, **NUMBERS}), verify="whole")
    assert result.report.folded
    assert result.report.verification is not None
    return result.report.verification


@pytest.mark.parametrize("name", SELECTIONS)
def test_ties_of_a_float16_head(name: str) -> None:
    result = folded(name)
    assert result
    outputs = {output.name: output for output in result.outputs}
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
    sizes, nodes = SELECTIONS["argmax"]
    values = {**parameters(SHAPES, 0, "float16"), **NUMBERS}
    proto = model(HEAD.format(sizes, nodes), values=values)
    wrong = {**values, "u": (values["u"] * np.float16(1.1)).astype(np.float16)}
    result = verify(proto, model(HEAD.format(sizes, nodes), values=wrong), method="whole")
    assert result.status == "failed"


class TestSequences:
    BODY = """g (float[N,3,H,W] x) => (seq(float[N,16,A,B]) y) {
        c = Conv (x, w)
        b = BatchNormalization (c, p_s, p_b, p_m, p_v)
        y = SequenceConstruct (b, c) }"""

    def test_a_right_fold_passes(self) -> None:
        result = fold(model(self.BODY.replace("(b, c)", "(b, b)"), SHAPES), verify="whole").report.verification
        assert result
        assert result.outputs[0].max_abs_diff > 0

    @pytest.mark.parametrize(
        ("items", "text"), [("(b)", "sequences or maps differ in length or keys"), ("(c, b)", "differs by")]
    )
    def test_others_fail(self, items: str, text: str) -> None:
        result = verify(model(self.BODY, SHAPES), model(self.BODY.replace("(b, c)", items), SHAPES), method="whole")
        assert result.status == "failed"
        assert text in result.reason
