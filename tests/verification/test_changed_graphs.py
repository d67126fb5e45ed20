"""Folded random graphs, changed in one place: what ONNX Runtime tells apart never passes, what is equal never fails."""

from __future__ import annotations

import os

import numpy as np
import onnx
import pytest

from bnexport import verify
from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.support.onnx_text import array_of, with_arrays
from tests.verification import changed_graphs
from tests.verification.changed_graphs import Result, Truth, graph
from tests.verification.changes import CHANGES


def run(count: int, seed: int) -> Result:
    *_, (last, _) = changed_graphs.run(count, seed)
    return last


@pytest.mark.parametrize("seed", [25, 27, 28, 29, 32])
def test_a_sample_of_changed_graphs(seed: int) -> None:
    """No different graph passes, no equal graph fails, none ends in an error."""
    sample = run(8, seed)
    assert [words for _, words, *_ in sample.findings] == []
    assert sample.different >= 2
    assert sample.equal >= 1
    assert len(sample.kinds) >= 4


def test_a_shift_has_the_error_of_a_computed_scale() -> None:
    """The fold multiplies weight and bias by (c + d) - d, as an engine rounds it; the proof has it exact, with a bound."""
    source = graph(5100063)
    folded = fold(source, verify=False).model
    assert verify(source, folded, method="local").status == "passed"


def test_a_weight_of_what_is_always_zero_fails_no_fold() -> None:
    """The second turn of the Loop takes the Relu of negative numbers; a weight behind it is off by a thousandth of the largest."""
    source = graph(7300238)
    wrong = to_proto(fold(source, verify=False).model)
    array = array_of(wrong, "c17")
    array[4, 5] *= np.float32(2)
    wrong = with_arrays(wrong, {"c17": array})
    assert verify(source, wrong, method="local").status == "failed"
    assert verify(source, wrong).status == "not_verified"


@pytest.mark.slow
def test_thousands_of_changed_graphs() -> None:
    everything = run(int(os.environ.get("BNEXPORT_FUZZ_CASES", "3000")), seed=1000)
    assert [words for _, words, *_ in everything.findings] == []
    assert set(everything.kinds) == {*CHANGES, "fold"}
    assert min(everything.kinds.values()) >= 30


def test_the_truth_knows_equal_from_different() -> None:
    source = graph(3)
    folded = to_proto(fold(source, verify=False).model)
    truth = Truth(source)
    assert len(truth.runs) >= 4
    assert truth.compare(folded) == "equal"
    floats = [each.name for each in folded.graph.initializer if each.data_type == onnx.TensorProto.FLOAT]
    wrong = with_arrays(folded, {name: np.asarray(array_of(folded, name) * np.float32(1.1)) for name in floats})
    assert truth.compare(wrong) == "different"
    wrong.graph.node[0].op_type = "NoSuchOperator"
    assert truth.compare(wrong) == "refused"


def test_each_kind_of_change_changes_a_graph() -> None:
    for name, change in CHANGES.items():
        assert any(change(graph(seed), np.random.default_rng(seed)) is not None for seed in range(12)), name
