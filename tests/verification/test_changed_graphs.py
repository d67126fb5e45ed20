"""Folded random graphs, changed in one place: what ONNX Runtime tells apart never passes, what is equal never fails."""

from __future__ import annotations

import collections

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from bnexport import verify
from bnexport.folding import fold
from tests.verification import changed_graphs
from tests.verification.changed_graphs import Result, Truth, graph
from tests.verification.changes import CHANGES


def run(count: int, seed: int) -> Result:
    for result, _ in changed_graphs.run(count, seed):
        last = result
    return last


def found(result: Result, word: str) -> list[str]:
    return [words for kind, words, *_ in result.findings if kind.split()[0] == word]


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
    wrong = fold(source, verify=False).model
    tensor = next(each for each in wrong.graph.initializer if each.name == "c17")
    array = onnx.numpy_helper.to_array(tensor).copy()
    array[4, 5] *= np.float32(2)
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, "c17"))
    assert verify(source, wrong, method="local").status == "failed"
    assert verify(source, wrong).status == "not_verified"


@pytest.fixture(scope="module")
def everything() -> Result:
    return run(3000, seed=1000)


@pytest.mark.slow
def test_no_different_graph_passes(everything: Result) -> None:
    assert found(everything, "passed") == []


@pytest.mark.slow
def test_no_equal_graph_fails(everything: Result) -> None:
    assert found(everything, "failed") == []


@pytest.mark.slow
def test_every_kind_of_change_is_tried(everything: Result) -> None:
    assert found(everything, "crash") == []
    assert set(everything.kinds) == set(CHANGES)
    assert min(everything.kinds.values()) >= 30
    assert everything.different + everything.equal >= 3000


def test_the_truth_knows_equal_from_different() -> None:
    source = graph(3)
    folded = fold(source, verify=False).model
    truth = Truth(source)
    assert len(truth.runs) >= 4
    assert truth.compare(folded) == "equal"
    wrong = onnx.ModelProto()
    wrong.CopyFrom(folded)
    for tensor in wrong.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            array = onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.asarray(array * np.float32(1.1)), tensor.name))
    assert truth.compare(wrong) == "different"
    wrong.graph.node[0].op_type = "NoSuchOperator"
    assert truth.compare(wrong) == "refused"


def test_each_kind_of_change_changes_a_graph() -> None:
    kinds: collections.Counter[str] = collections.Counter()
    for seed in range(12):
        good = graph(seed)
        for name, change in CHANGES.items():
            wrong = onnx.ModelProto()
            wrong.CopyFrom(good)
            if change(wrong, np.random.default_rng(seed)) is not None:
                kinds[name] += wrong != good
    assert set(kinds) == set(CHANGES)
