"""An export at other sizes than the example's, against the module."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from bnexport.errors import VerificationError
from bnexport.exporting import dimensions
from bnexport.exporting.dimensions import (
    Changes,
    DimensionGroup,
    Dimensions,
    Limit,
    Shapes,
    SizeConditions,
    shapes,
)
from bnexport.verification.verdict import Verification

# Check of the dynamic dimensions of an exported model: those with wrong or unverified results are reported.
#
# A dimension stays dynamic only if the exported model was right at another value of it. Batch and images change at once, to
# keep the number of runs small; where the exported model differs from its reference, or does not run, each is changed
# alone to find which is at fault. Sizes at which the reference itself does not run say nothing.

Tensors = tuple[torch.Tensor, ...]
Judge = Callable[[Sequence[Tensors], Sequence[Tensors]], list[Verification]]

# Sizes for one condition or limit that are tried until the reference runs.
_TRIES = 4
# Runs for the conditions of a program: each costs one of the reference and one of the exported model.
_MOST_CONDITIONS = 4


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of the reference at other sizes."""

    changes: Changes
    inputs: Tensors
    expected: Tensors


@dataclasses.dataclass(frozen=True)
class Fault:
    """Dimensions that cannot be dynamic.

    axes: (input, dimension). run, outcome: where the exported model is wrong, and how; None where the reference ran at
    no other size that was tried, or a condition of the model's code, `cause`, holds at none of them.
    """

    axes: tuple[tuple[int, int], ...]
    run: Run | None = None
    outcome: Verification | None = None
    cause: str = ""

    @property
    def reason(self) -> str:
        if self.run is None or self.outcome is None:
            return (
                "sizes beyond a limit are too large to try"
                if self.cause
                else "the model ran at no other size that was tried"
            )
        size = next(size for group, size in self.run.changes.items() if set(group.axes) >= set(self.axes))
        return f"the exported model {'differs from torch' if self.outcome.ran else 'does not run'} at {size}"


class OtherSizes:
    """Runs of the reference at other sizes of the dynamic dimensions.

    reference: the outputs for any inputs; it raises where the model does not run. guarded: the exported model refuses sizes
    that it is not for; that says nothing as long as it is right at others. allows: whether the exported model says that it
    is for these inputs; there is none at first.
    """

    def __init__(self, inputs: Tensors, reference: Callable[[Tensors], Tensors], *, guarded: bool = False) -> None:
        self._inputs = inputs
        self._reference = reference
        self._guarded = guarded
        self.allows: Callable[[Tensors], bool] = lambda inputs: True
        self._known: dict[Shapes, Tensors | None] = {}
        self.runs: list[Run] = []
        self.unseen: list[Fault] = []

    def plan(self, dynamic: Sequence[Collection[int]]) -> None:
        """Make the `runs` of these dimensions, of each input; `unseen` are those that none changes."""
        groups = dimensions.groups(self._inputs, dynamic)
        wanted, larger = dimensions.plan(self._inputs, groups)
        found = [self._first([changes]) for changes in wanted]
        grown = {group for run in found if run is not None for group, size in run.changes.items() if size > group.size}
        if not grown.issuperset(groups):
            found += [self._first([changes]) for changes in larger]
        self.runs = [run for run in found if run is not None]
        seen = {group for run in self.runs for group in run.changes}
        self.unseen = [Fault(group.axes) for group in groups if group not in seen and group.size > 0]

    def add(self, conditions: SizeConditions, dynamic: Sequence[Collection[int]]) -> None:
        """Add runs that break those conditions of the exported program that no run breaks yet."""
        groups = dimensions.groups(self._inputs, dynamic)
        example = conditions.broken(dimensions.shapes(self._inputs, {}))
        known = example.union(*(conditions.broken(self.shapes(run)) for run in self.runs))
        added = 0
        for condition in conditions.all:
            if condition in known or added == _MOST_CONDITIONS:
                continue
            candidates = dimensions.allowed(self._inputs, conditions.candidates(condition, groups))
            breaking = (
                changes
                for changes in candidates
                if conditions.breaks(condition, dimensions.shapes(self._inputs, changes))
            )
            run = self._first(breaking)
            if run is not None:
                added += 1
                self.runs.append(run)
                known |= conditions.broken(self.shapes(run))

    def exceed(self, limits: Iterable[Limit], dynamic: Sequence[Collection[int]]) -> None:
        """Add runs beyond limits that the exported model does not keep, wherever the reference runs there."""
        if self._guarded:
            return
        groups = dimensions.groups(self._inputs, dynamic)
        for limit in limits:
            (group,) = (group for group in groups if limit.axis in group.axes)
            for size, line in limit.beyond:
                if size < 1 or any(_beyond(run.changes.get(group, group.size), size, group.size) for run in self.runs):
                    continue
                alternatives = dimensions.beyond(self._inputs, group, size, groups)
                run = self._first(alternatives)
                if run is not None:
                    self.runs.append(run)
                elif line and not alternatives:
                    self.unseen.append(Fault(group.axes, cause=f"at {line}"))

    def within(self, limits: Iterable[Limit]) -> list[Limit]:
        """Return the limits that no run is beyond."""
        return [
            limit
            for limit in limits
            if limit.counts and all(self.shapes(run)[limit.axis[0]][limit.axis[1]] in limit for run in self.runs)
        ]

    def faults(self, outcomes: Sequence[Verification], judge: Judge) -> list[Fault]:
        """Return the dimensions in which the exported model is wrong, or was not verified.

        outcomes: its comparisons for `runs`. judge: makes more of them.
        """
        for run, outcome in zip(self.runs, outcomes, strict=True):
            if outcome.status == "failed" and (outcome.ran or not self._guarded):
                return self._at_fault(run, outcome, judge)
        refused: dict[DimensionGroup, Fault] = {}
        for run, outcome in zip(self.runs, outcomes):
            if outcome.status == "failed":
                refused.update({group: Fault(group.axes, run, outcome) for group in run.changes})
        right = {group for run, outcome in zip(self.runs, outcomes) if outcome.passed for group in run.changes}
        return [*self.unseen, *(fault for group, fault in refused.items() if group not in right)]

    def shapes(self, run: Run) -> Shapes:
        return dimensions.shapes(self._inputs, run.changes)

    def _first(self, alternatives: Iterable[Changes]) -> Run | None:
        """Return the reference at the first of the alternatives at which it runs; it runs once at each."""
        for changes in itertools.islice(alternatives, _TRIES):
            key = dimensions.shapes(self._inputs, changes)
            feed = dimensions.resized(self._inputs, changes)
            if not self.allows(feed):
                continue
            if key not in self._known:
                self._known[key] = None
                with contextlib.suppress(Exception):  # what the model's code raises at sizes that it does not take
                    self._known[key] = self._reference(feed)
            expected = self._known[key]
            if expected is not None:
                return Run(changes, feed, expected)
        return None

    def _at_fault(self, wrong: Run, outcome: Verification, judge: Judge) -> list[Fault]:
        """Return the groups among the changes that make the exported model wrong: batches, or the others, or both."""
        parts = [
            {group: size for group, size in wrong.changes.items() if (group.place == 0) is batch}
            for batch in (True, False)
        ]
        faulty = []
        if all(parts):
            runs = [run for part in parts if (run := self._first([part])) is not None]
            outcomes = judge([run.inputs for run in runs], [run.expected for run in runs])
            faulty = [(run, own) for run, own in zip(runs, outcomes) if own.status == "failed"]
        # The fault may be in how two go together.
        return [Fault(group.axes, run, own) for run, own in faulty or [(wrong, outcome)] for group in run.changes]


def _beyond(size: int, limit: int, example: int) -> bool:
    """Whether a size is at or beyond a limit, seen from the example."""
    return size >= limit if limit > example else size <= limit


def without_faults(
    dimensions: Dimensions, faults: Sequence[Fault], conditions: SizeConditions | None = None
) -> Dimensions:
    """Make the dimensions at fault static, with notes that name a condition of the model's code where one is known.

    Raises VerificationError where none of them is dynamic: the exported model has sizes that were not asked for.
    """
    left = dimensions
    for fault in faults:
        condition = fault.cause
        if fault.run is not None and conditions is not None:
            other = shapes(dimensions.inputs, fault.run.changes)
            condition = conditions.asked_for(fault.axes, other, dimensions.free)
        left = left.without(fault.axes, "static", fault.reason, condition)
    if left.free == dimensions.free:
        raise VerificationError(f"{faults[0].reason}, in a dimension that was to be static; nothing was written")
    return left
