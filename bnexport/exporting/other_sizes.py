"""An export at other sizes than the example's, against the module; the search for the operator that depends on them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from bnexport.errors import VerificationError
from bnexport.exporting import dimensions
from bnexport.exporting.dimensions import (
    Axis,
    Changes,
    DimensionGroup,
    Dimensions,
    Limit,
    Shapes,
    SizeConditions,
    resized,
    shapes,
)
from bnexport.exporting.wrapper import Traced
from bnexport.torch_versions import DispatchMode, pytree
from bnexport.verification.reference import Reference
from bnexport.verification.verdict import Verification

# Check of the dynamic dimensions of an exported model: those with wrong or unverified results are reported.
#
# A dimension stays dynamic only if the exported model was right at another value of it. All dimensions change at once, to
# keep the number of runs small; where the exported model differs from its reference, or does not run, each is changed
# alone to find those at fault. Sizes at which the reference itself does not run say nothing.

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
        inputs, groups = self._inputs, dimensions.groups(self._inputs, dynamic)
        one = self._first(dimensions.smallest_batch(inputs, groups))
        found = [one]
        always_one = all(group.size == 1 for group in groups if group.place == 0)
        found += map(self._first, dimensions.stages(inputs, groups, one=one is not None or always_one))
        for group in groups:
            if not any(run is not None and group in run.changes for run in found):
                alternatives = [dimensions.alone(inputs, group), dimensions.together(inputs, group, groups)]
                found.append(next((run for each in alternatives if (run := self._first(each)) is not None), None))
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
            for changes in dimensions.alone(self._inputs, group)
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
        return dimensions.shapes(self._inputs, run.changes)

    def _first(self, alternatives: Iterable[Changes]) -> Run | None:
        """Return the reference at the first of the alternatives at which it runs."""
        for changes in itertools.islice(alternatives, _TRIES):
            feed = dimensions.resized(self._inputs, changes)
            with contextlib.suppress(Exception):  # what the model's code raises at sizes that it does not take
                if self.allows(feed):
                    return Run(changes, feed, self._reference(feed))
        return None

    def _at_fault(self, wrong: Run, outcome: Verification, judge: Judge) -> list[Fault]:
        """Return the groups among the changes that make the exported model wrong."""
        tried: dict[DimensionGroup, Run] = {}
        if len(wrong.changes) > 1:
            for group, size in wrong.changes.items():
                run = self._first([{group: size}, *dimensions.alone(self._inputs, group)])
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


# Search for the operator that an exporter most likely wrote for the example's sizes only.

# Exporters reduce it to fixed windows; the one of torch.nn.functional is written out (adaptive_pooling.py).
_ADAPTIVE = ("adaptive_avg_pool", "adaptive_max_pool")
# Operators that exporters reduce to fixed scales.
_RESAMPLING = ("upsample_", "grid_sampler")
# Operators whose numbers a model computes from sizes; a traced graph keeps those of the example.
_SIZED = (
    *("view", "reshape", "expand", "repeat", "slice", "select", "split", "as_strided", "unfold", "roll", "cat"),
    *("arange", "linspace", "new_", "zeros", "ones", "full", "mul", "div", "add", "sub", "pow"),
    *("constant_pad", "reflection_pad", "replication_pad", "avg_pool", "max_pool", "im2col", "col2im"),
)


# Multiples of a size at which the cause of a fixed dimension is looked for.
_FACTORS = (2, 3, 5)


@dataclasses.dataclass(frozen=True)
class _RecordedCall:
    """A recorded call: the operator, the module that called it, and its numeric arguments."""

    operator: str
    module: str
    numbers: tuple[float, ...]

    @property
    def is_adaptive_pooling(self) -> bool:
        """Adaptive pooling to more than one value along some dimension: a global pooling is right at any size."""
        return self.operator.startswith(_ADAPTIVE) and set(self.numbers) != {1}

    def __str__(self) -> str:
        name = "interpolate" if self.operator.startswith("upsample_") else self.operator
        return f"{name} in {self.module!r}" if self.module else name


_Test = Callable[[_RecordedCall, _RecordedCall | None], bool]


def name_operator(module: nn.Module, inputs: Tensors, others: Tensors) -> str:
    """Return the operator and its module, as "adaptive_avg_pool2d in 'head.pool'"; empty if none is known to depend
    on size.

    That is the operator at which the module fails on `others`; or the first whose numbers depend on the size; or the first
    that it calls at one of the sizes only.

    module: runs on the inputs; it may change by it. others: inputs of other sizes.
    """
    calls, failed = _record(module, inputs)
    if failed:
        return ""
    changed, failed = _record(module, others)
    if failed:
        return f"it fails in {changed[-1]}" if changed else ""
    tests: list[_Test] = [
        lambda call, _: call.operator.startswith(_RESAMPLING),
        lambda call, other: other is not None and call.operator.startswith(_SIZED) and call.numbers != other.numbers,
        lambda call, _: call.is_adaptive_pooling,
    ]
    aligned = [(one.operator, one.module) for one in calls] == [(two.operator, two.module) for two in changed]
    if not aligned:
        return _first_difference(calls, changed)
    pairs: list[tuple[_RecordedCall, _RecordedCall | None]] = list(zip(calls, changed))
    return next((str(call) for test in tests for call, other in pairs if test(call, other)), "")


def _first_difference(calls: Sequence[_RecordedCall], others: Sequence[_RecordedCall]) -> str:
    """Name the first operator that is called at one of two sizes only."""
    pairs = zip_longest(calls, others)
    one, two = next((one, two) for one, two in pairs if one is None or two is None or _differ(one, two))
    longer = one if two is None or (one is not None and len(calls) > len(others)) else two
    return f"{longer}, which the model calls at some sizes only"


def _differ(one: _RecordedCall, two: _RecordedCall) -> bool:
    return (one.operator, one.module) != (two.operator, two.module)


def without_faults(
    dimensions: Dimensions, faults: Sequence[Fault], reference: Reference, conditions: SizeConditions | None = None
) -> Dimensions:
    """Make the dimensions at fault static, with notes that name a condition of the model's code, or an operator.

    Raises VerificationError where none of them is dynamic: the exported model has sizes that were not asked for.
    """

    def cause(fault: Fault) -> str:
        if fault.run is None:
            return fault.cause or name_at_any(dimensions, fault.axes, reference)
        other = shapes(dimensions.inputs, fault.run.changes)
        asked = conditions.asked_for(fault.axes, other, dimensions.free) if conditions is not None else ""
        return asked or name_operator(reference.module(), dimensions.inputs, fault.run.inputs)

    found = list(map(cause, faults))
    left = dimensions
    for fault, own in zip(faults, found):
        # Dimensions that are wrong together mostly have one cause.
        left = left.without(fault.axes, "static", fault.reason, own or next(filter(None, found), ""))
    if left.free == dimensions.free:
        raise VerificationError(f"{faults[0].reason}, in a dimension that was to be static; nothing was written")
    return left


def name_at_any(dimensions: Dimensions, axes: Collection[Axis], reference: Reference) -> str:
    """Return the operator at the first of some sizes of these dimensions that shows one."""
    inputs = dimensions.inputs
    groups = [DimensionGroup(0, inputs[place].shape[index], ((place, index),)) for place, index in axes]
    for factor in _FACTORS if groups else ():
        others = resized(inputs, {group: factor * group.size for group in groups})
        if found := name_operator(reference.module(), inputs, others):
            return found
    return ""


def _record(module: nn.Module, inputs: Tensors) -> tuple[list[_RecordedCall], bool]:
    """Return the calls of a run, and whether the last one failed."""
    path: list[str] = []
    recorder = _Recorder(path)
    handles = []
    root = module.model if isinstance(module, Traced) else module
    for name, child in root.named_modules():
        handles += [
            child.register_forward_pre_hook(functools.partial(_enter, path, name)),
            child.register_forward_hook(functools.partial(_leave, path), always_call=True),
        ]
    try:
        with torch.no_grad(), recorder:
            module(*(value.clone() for value in inputs))
    except Exception as error:  # what the model's code raises; a name is a help, not a result
        if type(error).__module__.startswith("torch._dynamo"):
            torch.compiler.reset()  # torch.cond compiles its branches, not below a recorder, and would fail from now on
        return recorder.calls, True
    finally:
        for handle in handles:
            handle.remove()
    return recorder.calls, False


def _enter(path: list[str], name: str, *_: Any) -> None:
    path.append(name)


def _leave(path: list[str], *_: Any) -> None:
    if path:
        path.pop()


class _Recorder(DispatchMode):
    def __init__(self, path: list[str]) -> None:
        super().__init__()
        self.calls: list[_RecordedCall] = []
        self._path = path

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        numbers = [_number(leaf) for leaf in pytree.tree_leaves((args, kwargs or {})) if _is_number(leaf)]
        operator = func.name().split("::")[-1].split(".")[0].lstrip("_")
        self.calls.append(_RecordedCall(operator, self._path[-1] if self._path else "", tuple(numbers)))
        return func(*args, **(kwargs or {}))


def _is_number(leaf: Any) -> bool:
    """Whether an argument is a number; torch wraps those of `x / 8` in tensors."""
    return isinstance(leaf, (int, float)) or (isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and not leaf.is_meta)


def _number(leaf: Any) -> float:
    return float(leaf)
