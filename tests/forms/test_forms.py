"""Every legal form of every operator that a rule or a lemma names: a sample here, all of them in the slow run."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from benchmarks.page import RESULTS
from bnexport.graph import evaluate
from tests.forms import malformed
from tests.forms.__main__ import QUOTA
from tests.forms.case import Setting, form, schema, versions
from tests.forms.engine import newest_opset
from tests.forms.evaluated import EVALUATED, counts
from tests.forms.recipes import RECIPES
from tests.forms.session import EXCLUDED, Row, judge, named, of_operator

# What a form cannot use: gone before opset 7, or without meaning there.
UNUSED = {"consumed_inputs", "is_test"}


def findings(op_type: str, quota: int, sizes: int | None, step: int = 1) -> tuple[list[str], int]:
    """Run every `step`th form of one operator; return what was found, and how many ran."""
    row, found = Row(), []
    for one in itertools.islice(of_operator(op_type, quota, sizes), 0, None, step):
        found += [f"{it.kind}: {one.describe()}, {place}: {it.text}" for place, it in judge(one, row)]
    return found, row.forms


def test_every_named_operator_has_forms() -> None:
    assert named() - EXCLUDED <= set(RECIPES)


@pytest.mark.parametrize("op_type", sorted(RECIPES))
def test_the_forms_use_every_attribute_and_leave_out_every_optional_input(op_type: str) -> None:
    for first, _ in versions(op_type, newest_opset()):
        declared = schema(op_type, first)
        cases = [
            case
            for shape in ((2, 4), (2, 4, 3), (2, 4, 3, 5), (1, 1, 1, 1))
            for case in RECIPES[op_type](Setting(op_type, first, shape, np.random.default_rng(0)))
        ]
        used = {name for case in cases for name in case.attributes}
        assert used == set(declared.attributes) - UNUSED, (op_type, first)
        for name in form().absent(declared):
            assert {name in case.absent(declared) for case in cases} == {True, False}, (op_type, first, name)


@pytest.mark.parametrize("op_type", sorted(RECIPES))
def test_a_sample_of_the_forms(op_type: str) -> None:
    found, count = findings(op_type, 1, 1, step=3)
    if not count:  # of few forms, every third may be one that ONNX Runtime refuses
        found, count = findings(op_type, 1, 1)
    assert found == []
    assert count


@pytest.mark.slow
@pytest.mark.parametrize("op_type", sorted(RECIPES))
def test_all_forms(op_type: str) -> None:
    found, _ = findings(op_type, QUOTA, None)
    assert found == []


def test_the_result_has_every_operator() -> None:
    stored = json.loads((RESULTS / "forms.json").read_text())
    assert set(stored["operators"]) == set(RECIPES)
    assert stored["total"]["forms"] >= 5000
    assert stored["newest_opset"] == newest_opset()


@pytest.mark.parametrize("op_type", sorted(RECIPES))
def test_malformed_forms_end_in_no_error_of_the_package(op_type: str) -> None:
    assert malformed.findings(op_type, 12) == []


@pytest.mark.slow
@pytest.mark.parametrize("op_type", sorted(RECIPES))
def test_all_malformed_forms(op_type: str) -> None:
    assert malformed.findings(op_type, 1) == []


def test_every_operator_of_the_table_has_forms() -> None:
    assert set(evaluate.ANSWERED) <= set(EVALUATED)
    assert newest_opset() == evaluate.LAST_OPSET


@pytest.mark.parametrize("op_type", sorted(evaluate.ANSWERED))
def test_the_evaluator_on_a_sample(op_type: str) -> None:
    found, wrong = counts(op_type, 1, 2)
    if not found["confirmed"]:  # of some operators ONNX Runtime has few kernels
        found, wrong = counts(op_type, 1, None)
    assert wrong == []
    assert found["confirmed"]


@pytest.mark.slow
@pytest.mark.parametrize("op_type", sorted(evaluate.ANSWERED))
def test_the_evaluator_on_all_forms(op_type: str) -> None:
    found, wrong = counts(op_type, 2, None)
    assert wrong == []
    assert found["confirmed"] > found["opaque"]
