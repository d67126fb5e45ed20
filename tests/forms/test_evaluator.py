"""What the evaluator of nodes answers for is what ONNX Runtime computes: a sample here, all forms in the slow run."""

from __future__ import annotations

import pytest

from bnexport.graph import evaluate
from tests.forms.engine import newest_opset
from tests.forms.evaluated import EVALUATED, counts


def test_every_operator_of_the_table_has_forms() -> None:
    assert set(evaluate.ANSWERED) <= set(EVALUATED)
    assert newest_opset() == evaluate.LAST_OPSET


@pytest.mark.parametrize("op_type", sorted(evaluate.ANSWERED))
def test_a_sample_of_the_forms(op_type: str) -> None:
    found, wrong = counts(op_type, 1, 2)
    if not found["confirmed"]:  # of some operators ONNX Runtime has few kernels
        found, wrong = counts(op_type, 1, None)
    assert wrong == []
    assert found["confirmed"]


@pytest.mark.slow
@pytest.mark.parametrize("op_type", sorted(evaluate.ANSWERED))
def test_all_forms(op_type: str) -> None:
    found, wrong = counts(op_type, 2, None)
    assert wrong == []
    assert found["confirmed"] > found["opaque"]
