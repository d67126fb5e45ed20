"""Sets of inputs for two models.

The caller's, or random ones. Of these the first group decides, at the first sizes at which the reference runs. The rest
can only refute: floats of other sizes, all integers, one row, other sizes of dynamic dimensions, floats that an operator
asks for (`further_sets`), each where the reference runs. What they leave undecided is not counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from bnexport.verification.inputs.smaller_inputs import is_finite

# Bytes of a model whose runs take longer than everything else: it has fewer of them.
_LARGE = 1 << 26

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
        has_floats = any(spec.kind == "float" for spec in self._specs)
        further = [FloatSet(**each) for each in request["further"]] if has_floats else []
        self._further = [each for each in further if each.scale == 1.0 or not bounded]
        # One set has another scale.
        self._count = max(1, count - 1) if self._scalable else count

    def run(self) -> list[FeedGroup]:
        """Return the group that decides, then those that only refute. Raises BnexportError where the reference runs on none."""
        if self._request["given"] is not None:
            given = self._request["given"]
            return [self._with_outputs([{each["name"]: self._array(each) for each in sample} for sample in given], 1.0)]
        first, sizes, ranges = self._first()
        return [first, *self._others(sizes, ranges)]

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
            how = Draw(self._seed + step, *same, floats.scale, kind=floats.kind)
            yield from self._first_that_runs([how], ranges)

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
