"""Check of the dynamic dimensions of an exported model: those with wrong or unverified results are reported.

A dimension stays dynamic only if the exported model was right at another value of it. All dimensions change at once, to
keep the number of runs small; where the exported model differs from its reference, or does not run, each is changed
alone to find those at fault. Sizes at which the reference itself does not run say nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from bnexport.exporting.dimensions import sizes
from bnexport.exporting.dimensions.size_conditions import Limit, SizeConditions
from bnexport.exporting.dimensions.sizes import Changes, DimensionGroup, Shapes
from bnexport.verification.verdict import Verification

Tensors = tuple[torch.Tensor, ...]
Judge = Callable[[Sequence[Tensors], Sequence[Tensors]], list[Verification]]

# Alternatives that are tried until the reference runs.
_TRIES = 8
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
        self.runs: list[Run] = []
        self.unseen: list[Fault] = []

    def plan(self, dynamic: Sequence[Collection[int]]) -> None:
        """Find `runs` that change each of these dimensions, of each input; `unseen` are those that none changes."""
        inputs, groups = self._inputs, sizes.groups(self._inputs, dynamic)
        one = self._first(sizes.smallest_batch(inputs, groups))
        found = [one]
        always_one = all(group.size == 1 for group in groups if group.place == 0)
        found += map(self._first, sizes.stages(inputs, groups, one=one is not None or always_one))
        for group in groups:
            if not any(run is not None and group in run.changes for run in found):
                alternatives = [sizes.alone(inputs, group), sizes.together(inputs, group, groups)]
                found.append(next((run for each in alternatives if (run := self._first(each)) is not None), None))
        self.runs = [run for run in found if run is not None]
        seen = {group for run in self.runs for group in run.changes}
        self.unseen = [Fault(group.axes) for group in groups if group not in seen and group.size > 0]

    def add(self, conditions: SizeConditions, dynamic: Sequence[Collection[int]]) -> None:
        """Add runs that break those conditions of the exported program that no run breaks yet."""
        groups = sizes.groups(self._inputs, dynamic)
        example = conditions.broken(sizes.shapes(self._inputs, {}))
        known = example.union(*(conditions.broken(self.shapes(run)) for run in self.runs))
        added = 0
        for condition in conditions.all:
            if condition in known or added == _MOST_CONDITIONS:
                continue
            candidates = sizes.allowed(self._inputs, conditions.candidates(condition, groups))
            breaking = (
                changes for changes in candidates if conditions.breaks(condition, sizes.shapes(self._inputs, changes))
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
        groups = sizes.groups(self._inputs, dynamic)
        for limit in limits:
            (group,) = (group for group in groups if limit.axis in group.axes)
            for size, line in limit.beyond:
                if size < 1 or any(_beyond(run.changes.get(group, group.size), size, group.size) for run in self.runs):
                    continue
                alternatives = sizes.beyond(self._inputs, group, size, groups)
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
        seen: dict[DimensionGroup, list[bool]] = {}
        for run, outcome in zip(self.runs, outcomes):
            for group in run.changes if outcome.passed or not outcome.ran else ():
                seen.setdefault(group, []).append(outcome.passed)
        right = {group for group, passed in seen.items() if _mostly(passed)}
        rest = dict.fromkeys(group for run in self.runs for group in run.changes if group not in right)
        return [*self.unseen, *self._not_right(list(rest), judge)]

    def _not_right(self, groups: list[DimensionGroup], judge: Judge) -> list[Fault]:
        """Check groups that no comparison has verified once more: each changed alone, at several sizes.

        Comparisons that decide nothing show no fault either.
        """
        runs = [
            (group, run)
            for group in groups
            for changes in sizes.alone(self._inputs, group)
            if (run := self._first([changes])) is not None
        ]
        outcomes = judge([run.inputs for _, run in runs], [run.expected for _, run in runs])
        faults = []
        for group in groups:
            own = [(run, outcome) for (changed, run), outcome in zip(runs, outcomes) if changed == group]
            wrong = next((pair for pair in own if pair[1].status == "failed"), None)
            if wrong is not None and not _mostly([outcome.passed for _, outcome in own]):
                faults.append(Fault(group.axes, *wrong))
        return faults

    def shapes(self, run: Run) -> Shapes:
        return sizes.shapes(self._inputs, run.changes)

    def _first(self, alternatives: Iterable[Changes]) -> Run | None:
        """Return the reference at the first of the alternatives at which it runs."""
        for changes in itertools.islice(alternatives, _TRIES):
            feed = sizes.resized(self._inputs, changes)
            with contextlib.suppress(Exception):  # what the model's code raises at sizes that it does not take
                if self.allows(feed):
                    return Run(changes, feed, self._reference(feed))
        return None

    def _at_fault(self, wrong: Run, outcome: Verification, judge: Judge) -> list[Fault]:
        """Return the groups among the changes that make the exported model wrong."""
        tried: dict[DimensionGroup, Run] = {}
        if len(wrong.changes) > 1:
            for group, size in wrong.changes.items():
                run = self._first([{group: size}, *sizes.alone(self._inputs, group)])
                if run is not None:
                    tried[group] = run
        outcomes = judge([run.inputs for run in tried.values()], [run.expected for run in tried.values()])
        faulty = {group: (run, own) for (group, run), own in zip(tried.items(), outcomes) if own.status == "failed"}
        if not faulty:
            # Tied to others, the model runs at no change of one alone; or the fault is in how two go together.
            rest = [group for group in wrong.changes if group not in tried]
            rest = rest or [group for group in wrong.changes if group.place != 0] or list(wrong.changes)
            faulty = dict.fromkeys(rest, (wrong, outcome))
        return [Fault(group.axes, run, own) for group, (run, own) in faulty.items()]


def _beyond(size: int, limit: int, example: int) -> bool:
    """Whether a size is at or beyond a limit, seen from the example."""
    return size >= limit if limit > example else size <= limit


def _mostly(passed: Sequence[bool]) -> bool:
    """Whether a program mostly refuses the changed sizes; one that takes them only now and then is for the example's
    size.
    """
    return 2 * sum(passed) > len(passed)
