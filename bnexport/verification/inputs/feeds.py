"""Sets of inputs for two models.

The caller's, or random ones. Of these the first group decides, at the first sizes at which the reference runs. The rest
can only refute: floats of other sizes, all integers, one row, other sizes of dynamic dimensions, some beyond the graph's
constants (`size_bounds`), floats that an operator asks for (`further_sets`), smaller ones where an output does not change
with half of its input, each where the reference runs. What they leave undecided is not counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bnexport.errors import BnexportError
from bnexport.runtime.engine import ENGINES, Engine
from bnexport.verification.inputs.samples import (
    FREE_SIZES,
    LARGER,
    LARGEST,
    SMALLER,
    Draw,
    FloatSet,
    InputSpec,
    Range,
    Sizes,
    draw,
    other_sizes,
    shapes,
)
from bnexport.verification.inputs.smaller_inputs import is_finite, is_float, scaled

# Bytes of a model whose runs take longer than everything else: it has fewer of them.
_LARGE = 1 << 26
# Elements of inputs of sizes beyond constants.
_MOST_ELEMENTS = 1 << 18
# Factors of floats at which a saturated output may show its inputs, and the share of it that then changes.
_SHOWING = tuple(2.0**-power for power in (6, 12, 18, 24))
_SHOWN = 1e-3

Inputs = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class FeedGroup:
    """Sets of inputs, the reference's outputs for each, and what float inputs were multiplied by."""

    inputs: Sequence[Inputs]
    expected: list[list[Any]]
    scale: float = 1.0


class Feeds:
    """The inputs that a request gives, or asks to be drawn: the sizes and integers at which a reference runs.

    names: of the values that are compared. nbytes: of the reference. array: reads an array of the request.
    """

    def __init__(
        self,
        request: Mapping[str, Any],
        reference: Engine,
        names: Sequence[str],
        nbytes: int,
        array: Callable[[dict[str, Any]], np.ndarray],
    ) -> None:
        self._request, self._reference, self._names, self._array = request, reference, names, array
        self._specs = [InputSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in request["inputs"]]
        self._seed, count = request["seed"], request["count"]
        self._slow = nbytes > _LARGE or reference.name != ENGINES[0]
        # Bounds of the caller's are for values of some size; truth values and texts have none.
        bounded = request["atol"] is not None or request["rtol"] is not None
        self._scalable = not bounded and any(spec.kind in ("float", "integer") for spec in self._specs)
        self._has_floats = any(spec.kind == "float" for spec in self._specs)
        further = [FloatSet(**each) for each in request["further"]]
        self._further = [
            each for each in further if (self._has_floats or each.kind == "full") and (each.scale == 1.0 or not bounded)
        ]
        # One set has another scale.
        self._count = max(1, count - 1) if self._scalable else count

    def run(self) -> list[FeedGroup]:
        """Return the group that decides, then those that only refute. Raises BnexportError where the reference runs on none."""
        if self._request["given"] is not None:
            given = self._request["given"]
            return [self._with_outputs([{each["name"]: self._array(each) for each in sample} for sample in given], 1.0)]
        first, sizes, ranges = self._first()
        return [first, *self._others(sizes, ranges), *self._beyond(sizes, ranges), *self._showing(first, sizes, ranges)]

    def _first(self) -> tuple[FeedGroup, tuple[int, int], dict[str, Range]]:
        sizes = FREE_SIZES if any(spec.is_free for spec in self._specs) else FREE_SIZES[:1]
        for index, (first, other) in enumerate(sizes):
            draws = [Draw(self._seed + step, first, (other,)) for step in range(self._count)]
            try:
                ranges, group = self._widest(draws)
                return group, (first, other), ranges
            except BnexportError:
                if index == len(sizes) - 1:
                    raise
        raise AssertionError("FREE_SIZES is empty")

    def _widest(self, draws: Sequence[Draw]) -> tuple[dict[str, Range], FeedGroup]:
        """Return the widest range of each integer input at which the reference runs, and what it returns there."""
        widest = {spec.name: spec.ranges[0] for spec in self._specs}
        narrow = {spec.name: spec.ranges[-1] for spec in self._specs}
        if widest != narrow:
            with contextlib.suppress(BnexportError):
                return widest, self._group(draws, widest)
        group = self._group(draws, narrow)
        for spec in self._specs:
            for limits in spec.ranges[:-1]:
                with contextlib.suppress(BnexportError):
                    wider = {**narrow, spec.name: limits}
                    group, narrow = self._group(draws, wider), wider
                    break
        return narrow, group

    def _others(self, sizes: tuple[int, int], ranges: dict[str, Range]) -> Iterator[FeedGroup]:
        """Yield the groups that only refute, each with a scale and sizes of its own: runs are what verification costs."""
        same = (sizes[0], (sizes[1],))
        row, changed = other_sizes(*sizes) if any(spec.is_free for spec in self._specs) else ([], [])
        plan: list[tuple[float, list[Sizes]]] = [(1.0, row), (1.0, changed)]
        if self._scalable:
            plan = [(LARGEST, [same]), (SMALLER, [*row, same]), (LARGER, [*changed, same])]
            if self._slow:
                plan = [(LARGER, [*row, same]), (1.0, changed)]
        known = shapes(self._specs, Draw(0, *same))
        for step, (scale, alternatives) in enumerate(plan):
            draws = (
                Draw(self._seed + self._count + step, *chosen, scale, whole)
                for chosen in alternatives
                for whole in ((True, False) if any(spec.whole for spec in self._specs) else (False,))
            )
            found = (how for how in draws if how.scale != 1.0 or shapes(self._specs, how) != known)
            yield from self._first_that_runs(found, ranges)
        for step, floats in enumerate(self._further, self._count + len(plan)):
            how = Draw(self._seed + step, *same, floats.scale, kind=floats.kind, numbers=tuple(floats.numbers))
            yield from self._first_that_runs([how], ranges)

    def _beyond(self, sizes: tuple[int, int], ranges: dict[str, Range]) -> Iterator[FeedGroup]:
        """Yield groups of sizes beyond the graph's constants, of the first dimension and of the others in turn."""
        bounds, (first, other) = self._request["bounds"], sizes
        if self._slow:
            return
        known = shapes(self._specs, Draw(0, first, (other,)))
        for chosen in ([(size, (other,)) for size in bounds], [(1, (size, other)) for size in bounds]):
            draws = [Draw(self._seed + 101, *each) for each in chosen]
            fitting = (
                how for how in draws if shapes(self._specs, how) != known and self._elements(how) <= _MOST_ELEMENTS
            )
            yield from self._first_that_runs(fitting, ranges)

    def _elements(self, how: Draw) -> float:
        return sum(math.prod(map(float, shape)) for shape in shapes(self._specs, how))

    def _showing(self, first: FeedGroup, sizes: tuple[int, int], ranges: dict[str, Range]) -> Iterator[FeedGroup]:
        """Yield groups of smaller floats, where outputs that hide their inputs in the first one show them."""
        if not (self._scalable and self._has_floats) or self._slow:
            return
        hidden = self._hidden(first)
        for step, scale in enumerate(_SHOWING):
            if not hidden:
                return
            for group in self._first_that_runs([Draw(self._seed + 201 + step, sizes[0], (sizes[1],), scale)], ranges):
                still = hidden & self._hidden(group)
                if still != hidden:
                    yield group
                hidden = still

    def _hidden(self, group: FeedGroup) -> set[int]:
        """Return the places of outputs that do not change where the floats of a group are halved: saturated ones."""
        names = self._request["outputs"]
        try:
            halved = self._reference.run(scaled(group.inputs[0], 0.5), names)
        except BnexportError:
            return set()
        pairs = enumerate(zip(group.expected[0], halved))
        return {
            place for place, (one, two) in pairs if is_float(one) and one.shape == two.shape and _is_hidden(one, two)
        }

    def _first_that_runs(self, draws: Iterable[Draw], ranges: dict[str, Range]) -> Iterator[FeedGroup]:
        for how in draws:
            with contextlib.suppress(BnexportError):
                group = self._group([how], ranges)
                # Where the inputs are not finite, what becomes finite counts.
                if how.kind in ("nan", "infinite") or all(map(is_finite, group.expected)):
                    yield group
                    return

    def _group(self, draws: Sequence[Draw], ranges: dict[str, Range]) -> FeedGroup:
        return self._with_outputs([draw(self._specs, how, ranges) for how in draws], draws[0].scale)

    def _with_outputs(self, inputs: Sequence[Inputs], scale: float) -> FeedGroup:
        return FeedGroup(inputs, [self._reference.run(sample, self._names) for sample in inputs], scale)


def _is_hidden(one: np.ndarray, two: np.ndarray) -> bool:
    wide = one.astype(np.float64)
    if not one.size or not np.isfinite(wide).all():
        return False
    return bool(np.abs(wide - two).max() <= _SHOWN * np.abs(wide).max())
