"""The one judge, on engines that are functions: what files do not show."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from bnexport.errors import UnsupportedModelError, VerificationError
from bnexport.runtime.engine import failures
from bnexport.verification.comparison import SCALES, is_same
from bnexport.verification.file_job import FileJob
from bnexport.verification.inputs import FeedGroup
from bnexport.verification.judge import Rules, judge
from bnexport.verification.verdict import Verification

Function = Callable[[np.ndarray], Any]
X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)


class Engine:
    """Runs a function of one input."""

    name = "function"

    def __init__(self, function: Function) -> None:
        self.function = function
        self.largest: list[float] = []

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str]) -> list[Any]:
        x = np.asarray(feeds["x"])
        self.largest.append(float(np.abs(x).max()))
        with failures(self.name, "run"), np.errstate(all="ignore"):
            return [self.function(x)]

    def exact(self, feeds: Sequence[Mapping[str, Any]], outputs: Sequence[str]) -> list[list[Any]]:
        return [[self.function(np.asarray(feed["x"], np.float64))] for feed in feeds]


def compare(reference: Function, candidate: Function, x: Any = X, **rules: Any) -> tuple[Verification, Engine]:
    first, second = Engine(reference), Engine(candidate)
    group = FeedGroup([{"x": x}], [first.run({"x": x}, ["y"])])
    return judge(first, second, [group], Rules(["y"], **rules)), second


def overflowing(factor: float) -> Function:
    """A multiple of x, and a number that is infinite for the first inputs alone."""
    return lambda x: (factor * x + np.exp(800 * np.abs(x).max()).astype(x.dtype) * 1e-30).astype(x.dtype)


@pytest.mark.parametrize("make", [np.asarray, torch.tensor], ids=["array", "tensor"])
def test_smaller_inputs_decide(make: Callable[[np.ndarray], Any]) -> None:
    """Arrays and tensors alike; what differs there has failed."""
    verdict, candidate = compare(overflowing(2.0), overflowing(2.0), make(X))
    assert (verdict.status, verdict.input_scale) == ("passed", SCALES[1])
    assert candidate.largest[-1] == pytest.approx(SCALES[1] * np.abs(X).max())
    assert compare(overflowing(2.0), overflowing(2.1), make(X))[0].status == "failed"


def test_float64_decides_between_rounding_errors() -> None:
    """Both are off by what cancels; the truth is near both."""

    def off(large: float) -> Function:
        return lambda x: x + x.dtype.type(large) - x.dtype.type(large)

    verdict, _ = compare(off(3e5), off(1.5e5), X * np.float32(100))
    assert (verdict.status, verdict.outputs[0].bound) == ("passed", "float64")


def test_a_truth_that_does_not_run_leaves_the_bound() -> None:
    def one(x: np.ndarray) -> np.ndarray:
        if x.dtype == np.float64:
            raise UnsupportedModelError("no float64")
        return x

    assert compare(one, lambda x: x * np.float32(1.1))[0].status == "failed"


def test_another_number_of_outputs_is_an_error() -> None:
    reference = Engine(np.abs)
    group = FeedGroup([{"x": X}], [[np.abs(X)]])
    with pytest.raises(VerificationError, match="the exported model returns 1 tensors, torch 1"):
        judge(reference, reference, [group], Rules(["y", "z"]))


def test_a_model_that_does_not_run_again_draws_no_random_numbers() -> None:
    """Then a difference stays one."""

    def refuses(x: np.ndarray) -> np.ndarray:
        raise ValueError("not again")

    job, turns = object.__new__(FileJob), types.SimpleNamespace(close=lambda: None)
    job._rules = Rules(["y"])  # type: ignore[assignment]
    group = FeedGroup([{"x": X}], [[np.abs(X)]])
    assert not job._is_random(turns, Engine(refuses), group, ["y"])  # type: ignore[arg-type]
    assert job._is_random(turns, Engine(lambda x: x), group, ["y"])  # type: ignore[arg-type]


def test_outputs_are_the_same_array_by_array() -> None:
    x, nan = np.arange(3.0), np.full(3, np.nan)
    for one, two in ((x, x), (nan, nan), ([x, nan], (x, nan)), ({1: x}, {1: x}), ([{"a": x}], [{"a": x}])):
        assert is_same(one, two)
    for one, two in (
        (x, nan),
        (x, [x]),
        ([x], {0: x}),
        ([x], [x, x]),
        ({1: x}, {2: x}),
        (x, x.astype(np.float32)),
        ([], [[]]),
    ):
        assert not is_same(one, two) and not is_same(two, one)
