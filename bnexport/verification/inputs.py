"""Inputs of a verification: random samples, integers within range, further sets, feeds of an engine."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import ml_dtypes  # noqa: F401 - NumPy learns the names of its types
import numpy as np

from bnexport.errors import BnexportError, UnsupportedModelError
from bnexport.runtime.engine import ENGINES, Engine
from bnexport.verification.comparison import is_finite, is_float, scaled

# Random inputs that fit a model's declared types and shapes.

# (size of a free first dimension, size of every other free dimension), tried until the model runs:
# small ones first, larger ones for networks that reduce the resolution many times.
FREE_SIZES = ((2, 32), (2, 64), (1, 224), (2, 8), (1, 1))
# Further factors of float inputs. A clipped or nearly linear function shows on some of them only.
LARGER, LARGEST, SMALLER = 8.0, 64.0, 0.125
_ELEMENTS = 1 << 27
# Share of a set's floats that are NaN or infinite, where it has such.
_NOT_FINITE = 0.2

# Share of a set's floats that are equal to a threshold, where it has such.
_EQUAL = 0.25

Kind = Literal["normal", "rounded", "nan", "infinite", "full", "positive", "negative", "raised", "lowered"]
# Means of sets that have one, in standard deviations.
_MEANS = {"raised": 1.0, "lowered": -1.0}
Range = tuple[int, int]
# Of free first dimensions, and of those at other places in turn.
Sizes = tuple[int, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """An input that a caller has to give.

    kind: "float", "integer", "bool" or "string"; None for what is no tensor of a known rank. dtype: NumPy's
    name of the type. shape: free sizes are None, or a name. ranges: of integers, to try until the model runs. whole: all
    integers, where they may be drawn, too. texts: to draw from.
    """

    name: str
    kind: str | None = None
    dtype: str = ""
    shape: tuple[int | str | None, ...] = ()
    ranges: tuple[Range, ...] = ((0, 1),)
    whole: Range | None = None
    texts: tuple[str, ...] = ("a",)

    @property
    def is_free(self) -> bool:
        """Whether a size is for the caller to choose."""
        return any(not isinstance(size, int) for size in self.shape)


@dataclasses.dataclass(frozen=True)
class FloatSet:
    """Random floats. kind: normal ones, these rounded to multiples of 1/2, or with NaN or infinities among them; "full" are
    normal ones beside truth values that are all true; "positive" and "negative" have one sign, "raised" and "lowered" a
    mean. scale: factor. numbers: to put among rounded ones.
    """

    kind: Kind = "normal"
    scale: float = 1.0
    numbers: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Draw:
    """One set of random inputs.

    first: size of free first dimensions. others: sizes of free dimensions at other places, in turn. scale: factor of
    floats. whole: draw from all integers, not from a range. kind, numbers: of floats (`FloatSet`).
    """

    seed: int
    first: int
    others: tuple[int, ...]
    scale: float = 1.0
    whole: bool = False
    kind: Kind = "normal"
    numbers: tuple[float, ...] = ()


def draw(inputs: Sequence[InputSpec], how: Draw, ranges: Mapping[str, Range]) -> dict[str, np.ndarray]:
    """Draw one set of inputs. Raises UnsupportedModelError where one cannot be made up."""
    generator = np.random.default_rng(how.seed)
    chosen = zip(inputs, shapes(inputs, how))
    return {spec.name: _random(spec, generator, shape, how, ranges.get(spec.name, (0, 1))) for spec, shape in chosen}


def shapes(inputs: Sequence[InputSpec], how: Draw) -> list[tuple[int, ...]]:
    """Return the shape of each input. The same name of a dimension gets the same size everywhere."""
    named: dict[str, int] = {}

    def size(axis: int, declared: int | str | None) -> int:
        if isinstance(declared, int):
            return declared
        default = how.others[(axis - 1) % len(how.others)] if axis else how.first
        return named.setdefault(declared, default) if declared else default

    return [tuple(size(axis, declared) for axis, declared in enumerate(spec.shape)) for spec in inputs]


def other_sizes(first: int, other: int) -> tuple[list[Sizes], list[Sizes]]:
    """Return lists of alternatives to sizes at which a model runs; the first that it runs at, too, is for use.

    One row; then another batch with dimensions that differ from one another: smaller ones, which cost least, both odd
    first, since few numbers divide their product, then larger ones, multiples of 8 and 32, equal ones.
    """
    smaller, larger = (other * 5 // 8 + 1, (other + 1) // 2), (other + 9, other + 4)
    odd = (smaller[0] | 1, smaller[1] | 1)
    changed = [odd, smaller, larger, (other + 16, other + 8), (other + 32, other), (2 * other, 2 * other)]
    return [(1, (other,))], [*((3, sizes) for sizes in changed), (first, larger), (3, (other,))]


def _random(
    spec: InputSpec, generator: np.random.Generator, shape: tuple[int, ...], how: Draw, limits: Range
) -> np.ndarray:
    if spec.kind is None:
        raise UnsupportedModelError(f"input {spec.name!r} is no tensor of a known rank; give the inputs yourself")
    if np.prod([float(size) for size in shape]) > _ELEMENTS:
        raise UnsupportedModelError(
            f"input {spec.name!r} of shape {list(shape)} is too large to make up; give the inputs yourself"
        )
    if spec.kind == "string":
        return np.resize(generator.permutation(np.array(spec.texts, dtype=object)), shape)
    if spec.kind == "bool":
        if how.kind == "full":
            return np.ones(shape, bool)
        return generator.integers(0, 2, shape).astype(bool)
    dtype = np.dtype(spec.dtype)
    if spec.kind == "float":
        return _floats(generator, shape, how).astype(dtype)
    return _integers(generator, shape, spec.whole if how.whole and spec.whole else limits).astype(dtype)


def _floats(generator: np.random.Generator, shape: tuple[int, ...], how: Draw) -> np.ndarray:
    values = np.asarray((generator.standard_normal(shape) + _MEANS.get(how.kind, 0.0)) * how.scale)
    if how.kind in ("normal", "full", *_MEANS):
        return values
    if how.kind in ("positive", "negative"):
        return np.abs(values) if how.kind == "positive" else -np.abs(values)
    flat = values.reshape(-1)
    if how.kind == "rounded":
        flat = np.round(2 * flat) / 2
        places = generator.permutation(flat.size)[: max(1, int(flat.size * _EQUAL)) if how.numbers else 0]
        flat[places] = np.resize(how.numbers, places.size)
        values = flat.reshape(shape)
    else:
        places = generator.permutation(flat.size)[: max(2, int(flat.size * _NOT_FINITE))]
        flat[places] = np.resize(np.nan if how.kind == "nan" else (np.inf, -np.inf), places.size)
    return values


def _integers(generator: np.random.Generator, shape: tuple[int, ...], limits: Range) -> np.ndarray:
    """Draw integers; both limits are among them."""
    low, high = limits
    wide = np.uint64 if high > np.iinfo(np.int64).max else np.int64
    values = generator.integers(low, high, shape, dtype=wide, endpoint=True)
    flat = values.reshape(-1)
    flat[-1:], flat[:1] = low, high
    return flat.reshape(shape)


# Sets of inputs for two models.
#
# The caller's, or random ones. Of these the first group decides, at the first sizes at which the reference runs. The rest
# can only refute: floats of other sizes, all integers, one row, other sizes of dynamic dimensions, some beyond the graph's
# constants (`size_bounds`), floats that an operator asks for (`further_sets`), smaller ones where an output does not change
# with half of its input, each where the reference runs. What they leave undecided is not counted.

# Bytes of a model whose runs take longer than everything else: it has fewer of them.
_LARGE = 1 << 26
# Elements of inputs of sizes beyond constants.
_MOST_ELEMENTS = 1 << 18
# Other sizes beside them, where those of the first run are too large.
_BESIDE = (8, 2)
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
        # Bounds of the caller's are for values of some size, and what is beside its inputs is like them; truth values and texts
        # have no size.
        bounded = request["atol"] is not None or request["rtol"] is not None or request["beside"]
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
        if self._request["given"] is None:
            return self._drawn()
        samples = [{each["name"]: self._array(each) for each in sample} for sample in self._request["given"]]
        groups = [self._with_outputs(samples, 1.0)]
        if self._request["beside"]:
            with contextlib.suppress(BnexportError):
                groups += self._drawn([value.shape for value in samples[0].values() if value.ndim > 1])
        return groups

    def _drawn(self, like: Sequence[tuple[int, ...]] = ()) -> list[FeedGroup]:
        """Return groups of random inputs. like: shapes whose sizes are tried first."""
        first, sizes, ranges = self._first([(shape[0], shape[-1]) for shape in like])
        return [first, *self._others(sizes, ranges), *self._beyond(sizes, ranges), *self._showing(first, sizes, ranges)]

    def _first(self, known: list[tuple[int, int]]) -> tuple[FeedGroup, tuple[int, int], dict[str, Range]]:
        own = [(2, size) for size in self._request["operands"]]
        sizes = (
            [*known, *FREE_SIZES[:-1], *own, FREE_SIZES[-1]]
            if any(spec.is_free for spec in self._specs)
            else FREE_SIZES[:1]
        )
        for each in sizes[:-1]:
            with contextlib.suppress(BnexportError):
                return self._at(each)
        return self._at(sizes[-1])

    def _at(self, sizes: tuple[int, int]) -> tuple[FeedGroup, tuple[int, int], dict[str, Range]]:
        draws = [Draw(self._seed + step, sizes[0], (sizes[1],)) for step in range(self._count)]
        ranges, group = self._widest(draws)
        return group, sizes, ranges

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
        # Beside a size beyond, the others may have to be smaller.
        beside = sorted({other, *(each for each in _BESIDE if each < other)}, reverse=True)
        pairs = [(size, each) for size in bounds for each in beside]
        ways = (
            [(size, (each,)) for size, each in pairs],
            [(1, (size, each)) for size, each in pairs],
            [(1, (each, size)) for size, each in pairs],
        )
        for chosen in ways:
            draws = [Draw(self._seed + 101, *each) for each in chosen]
            others = (how for how in draws if shapes(self._specs, how) != known)
            fitting = (
                how
                for how in others
                if sum(math.prod(map(float, shape)) for shape in shapes(self._specs, how)) <= _MOST_ELEMENTS
            )
            yield from self._first_that_runs(fitting, ranges)

    def _showing(self, first: FeedGroup, sizes: tuple[int, int], ranges: dict[str, Range]) -> Iterator[FeedGroup]:
        """Yield groups of smaller floats, where values that hide their inputs in the first one show them."""
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
        """Return the places of values that do not change where the floats of a group are halved: saturated ones."""
        try:
            halved = self._reference.run(scaled(group.inputs[0], 0.5), self._names)
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
