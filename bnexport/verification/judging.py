"""Runs an exported model in every engine that it is meant for and judges its outputs, for several sets of inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from bnexport.errors import VerificationError
from bnexport.verification.inputs import smaller_inputs
from bnexport.verification.reference import Reference
from bnexport.verification.torch_outputs import Array, compare, to_array
from bnexport.verification.verdict import OutputComparison

Tensors = tuple[torch.Tensor, ...]


class Candidate(Protocol):
    """Runs one exported model. name: for messages."""

    name: str

    def run(self, feeds: Sequence[Tensors]) -> list[list[Array] | str]:
        """Return the outputs for each set of inputs, or the engine's message where it cannot run it."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One set of inputs compared. scale: what float inputs were multiplied by. failure: why the model did not run."""

    errors: tuple[OutputComparison, ...] = ()
    scale: float = 1.0
    failure: str = ""

    @property
    def differs(self) -> bool:
        return bool(self.failure) or any(error.failed for error in self.errors)

    @property
    def passed(self) -> bool:
        return not self.failure and all(error.passed for error in self.errors)


def judge(
    engines: Sequence[Candidate],
    names: Sequence[str],
    reference: Reference,
    feeds: Sequence[Tensors],
    expected: Sequence[Tensors],
) -> list[Outcome]:
    """Compare the outputs for each set of inputs, or for smaller ones where these decide nothing.

    names: of the outputs. expected: what the reference makes of each set. Raises VerificationError where the number of
    outputs differs.
    """
    if not feeds:
        return []
    results = [engine.run(feeds) for engine in engines]
    outcomes = []
    for index, feed in enumerate(feeds):
        rows = [result[index] for result in results]
        failures = [f"{engine.name}: {row}" for engine, row in zip(engines, rows) if isinstance(row, str)]
        if failures:
            outcomes.append(Outcome(failure="; ".join(failures)))
        else:
            arrays = [row for row in rows if not isinstance(row, str)]
            outcomes.append(_Feed(engines, names, reference, feed, arrays).judge(expected[index]))
    return outcomes


class _Feed:
    """One set of inputs, and what the engines made of it times each factor that was asked for."""

    def __init__(
        self,
        engines: Sequence[Candidate],
        names: Sequence[str],
        reference: Reference,
        feed: Tensors,
        arrays: list[list[Array]],
    ) -> None:
        self._engines, self._names, self._reference, self._feed = engines, names, reference, feed
        self._got: dict[float, list[list[Array] | str]] = {1.0: list(arrays)}

    def judge(self, expected: Tensors) -> Outcome:
        def run(scale: float) -> list[list[Any]] | None:
            if scale == 1.0:
                return [[to_array(value) for value in expected]]
            try:
                return [[to_array(value) for value in self._reference(_scaled(self._feed, scale))]]
            except Exception:  # what the model's code raises on other values
                return None

        first: list[OutputComparison] = []
        scalable = any(value.is_floating_point() for value in self._feed)
        for attempt in smaller_inputs.attempts(run, scalable=scalable):
            (rows,) = attempt.expected
            errors = self._compare(attempt.scale, rows)
            if attempt.halved is not None:
                errors = _without_hidden(errors, rows, attempt.halved[0])
            decided = all(error.decided for error in errors) and not attempt.partial
            if decided or any(error.failed for error in errors):
                return Outcome(tuple(errors), attempt.scale)
            first = first or errors
        if scalable:
            first = [
                error if error.decided else dataclasses.replace(error, reason=smaller_inputs.with_smaller(error.reason))
                for error in first
            ]
        return Outcome(tuple(first))

    def _compare(self, scale: float, rows: Sequence[Array]) -> list[OutputComparison]:
        if scale not in self._got:  # an engine may take seconds to start: all smaller inputs at once
            smaller = [_scaled(self._feed, each) for each in smaller_inputs.SCALES]
            results = [engine.run(smaller) for engine in self._engines]
            self._got.update(
                (each, [result[index] for result in results]) for index, each in enumerate(smaller_inputs.SCALES)
            )
        errors = []
        for engine, got in zip(self._engines, self._got[scale]):
            if isinstance(got, str):
                raise VerificationError(f"{engine.name} cannot run the exported model on smaller inputs: {got}")
            if len(got) != len(rows) or len(got) != len(self._names):
                raise VerificationError(
                    f"{engine.name}: the exported model returns {len(got)} tensors, torch {len(rows)}"
                )
            errors += compare(self._names, got, rows, lambda: self._exact(scale), engine.name)
        return errors

    def _exact(self, scale: float) -> list[Array] | None:
        try:
            return [to_array(value) for value in self._reference.in_float64(_scaled(self._feed, scale))]
        except (RuntimeError, TypeError):  # code with a type of its own
            return None


def _scaled(inputs: Tensors, scale: float) -> Tensors:
    if scale == 1.0:
        return inputs
    return tuple(value * scale if value.is_floating_point() else value for value in inputs)


def _without_hidden(errors: list[OutputComparison], expected: list[Any], halved: list[Any]) -> list[OutputComparison]:
    """Passes are undecided where the bound hides what the inputs change. Engines follow one another in `errors`."""
    results = []
    for index, error in enumerate(errors):
        one, two = (rows[index % len(expected)] for rows in (expected, halved))
        shown = one.shape != two.shape or smaller_inputs.shows_inputs(error, [one], [two])
        results.append(error if shown else smaller_inputs.as_hidden(error))
    return results
