"""Dimensions of an export's inputs: the dynamic ones, their names, why others are fixed; other sizes to try; conditions on sizes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import sympy  # type: ignore[import-untyped]
import torch

import bnexport.errors
from bnexport.errors import UnsupportedModelError, UsageError

# Notes of an export: deviations from what was asked for, as records; their text is made where it is shown.

Kind = Literal[
    "constant",
    "static",
    "limited",
    "traced",
    "values",
    "scripting",
    "unfolded",
    "buffer",
    "operator",
    "argument",
    "unwrapped",
    "mode",
    "exporter",
    "quantised",
]


@dataclasses.dataclass(frozen=True)
class Note:
    """One thing to know about an exported file.

    kind: "constant" and "static" for a dimension that is not dynamic, since the model fixes it or for a reason; "limited" for
    one whose sizes the model limits; the others are about the whole file, and `reason` is their text. name, size: of the
    dimension. condition: of the model's code, with its line.
    """

    kind: Kind
    reason: str = ""
    input: str = ""
    dimension: int = 0
    name: str = ""
    size: int = 0
    condition: str = ""

    def __str__(self) -> str:
        if not self.input:
            return self.reason
        where = f"input {self.input!r}: dimension {self.dimension} ({self.name})"
        if self.kind == "limited":
            return f"{where} has to be {self.reason}"
        why = ", the model fixes it" if self.kind == "constant" else f": {self.reason}"
        return f"{where} stays {self.size}{why}{self.condition and f' ({self.condition})'}"


# The dimensions of an export's inputs: which are dynamic, under which names, and why others are not.

# An input, counted from 0, and one of its dimensions.
Axis = tuple[int, int]
Dynamic = bool | Mapping[str, Mapping[int, str] | Sequence[int]]

_SPATIAL = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """names, inputs: of the example. free: the dynamic dimensions of each input, with their names. static: a note for each that
    was chosen and had to become static. required: those that the caller names, which must not.
    """

    names: tuple[str, ...]
    inputs: tuple[torch.Tensor, ...]
    free: tuple[Mapping[int, str], ...]
    required: frozenset[Axis] = frozenset()
    static: Mapping[Axis, Note] = dataclasses.field(default_factory=dict)

    @classmethod
    def chosen(cls, names: Sequence[str], inputs: tuple[torch.Tensor, ...], dynamic: Dynamic) -> Dimensions:
        """Choose all or none, or those that a mapping lists by input: a mapping from each to its name, or a sequence.

        All are dimension 0 and those from 2 on of each input of rank 2 or more. Raises UsageError for an input or a dimension
        that is none.
        """
        names, everything = tuple(names), _all(names, inputs)
        if isinstance(dynamic, bool):
            return cls(names, inputs, everything if dynamic else tuple({} for _ in inputs))
        unknown = sorted(set(dynamic) - set(names))
        if unknown:
            raise UsageError(f"dynamic: got {', '.join(unknown)}, expected inputs among {', '.join(names)}")
        free = []
        for name, tensor, defaults in zip(names, inputs, everything):
            given = dynamic.get(name, ())
            wrong = [index for index in given if not (isinstance(index, int) and 0 <= index < tensor.dim())]
            if wrong:
                raise UsageError(
                    f"dynamic: {name}: got dimension {wrong[0]!r}, expected one from 0 to {tensor.dim() - 1}"
                )
            own = given if isinstance(given, Mapping) else {}
            free.append({index: own.get(index) or defaults.get(index, f"{name}_dim_{index}") for index in given})
        required = frozenset((place, index) for place, shape in enumerate(free) for index in shape)
        return cls(names, inputs, tuple(free), required)

    @property
    def axes(self) -> list[Axis]:
        """The dynamic dimensions."""
        return [(place, index) for place, shape in enumerate(self.free) for index in shape]

    def without(self, axes: Iterable[Axis], kind: Kind, reason: str = "", condition: str = "") -> Dimensions:
        """Make dimensions static, with a note for each that is not yet."""
        gone = {
            (place, index): Note(
                kind,
                reason,
                self.names[place],
                index,
                self.free[place][index],
                self.inputs[place].shape[index],
                condition,
            )
            for place, index in axes
            if index in self.free[place]
        }
        free = tuple(
            {index: name for index, name in shape.items() if (place, index) not in gone}
            for place, shape in enumerate(self.free)
        )
        return dataclasses.replace(self, free=free, static={**self.static, **gone})

    def narrower(self, reason: str) -> Iterator[Dimensions]:
        """Yield fewer dynamic dimensions: the batch alone, then the other sizes, then none."""
        for kept in (lambda index: index == 0, lambda index: index != 0, lambda _: False):
            gone = [axis for axis in self.axes if not kept(axis[1])]
            if gone:
                yield self.without(gone, "static", reason)

    def check_required(self) -> None:
        """Raise UnsupportedModelError for a dimension that the caller names and that is static now."""
        for (place, index), note in self.static.items():
            if (place, index) in self.required:
                raise UnsupportedModelError(
                    f"dynamic: {note}; leave dimension {index} of {self.names[place]!r} out, or change the model;"
                    " nothing was written"
                )


def _all(names: Sequence[str], inputs: tuple[torch.Tensor, ...]) -> tuple[dict[int, str], ...]:
    result = []
    for name, tensor in zip(names, inputs):
        dimensions: dict[int, str] = {}
        if tensor.dim() >= 2:
            prefix, rest = f"{name}_" if len(inputs) > 1 else "", tensor.dim() - 2
            tails = _SPATIAL.get(rest, tuple(f"dim_{index + 2}" for index in range(rest)))
            dimensions = {
                0: f"{prefix}batch",
                **{index + 2: f"{prefix}{tail}" for index, tail in enumerate(tails) if rest},
            }
        result.append(dimensions)
    return tuple(result)


# Other sizes for the dynamic dimensions of a model's inputs, and inputs of these sizes.
#
# Dimensions that have to be equal mostly have the same size and place in the example: those change together, as a group.
# A model may ask for more - multiples of 32, equal height and width, an input at half the size of another - and runs at
# some of the sizes of `plan` only.

Tensors = tuple[torch.Tensor, ...]
Shapes = tuple[tuple[int, ...], ...]

# Dimensions of networks are multiples of up to 32: the product of their strides.
_LARGEST_STEP = 32
# Elements of all inputs together, relative to the example's; small examples may grow up to the second. The last is for a size
# beyond a limit that the model's code asks for.
_LARGEST_GROWTH = 2.0
_SMALL = 1 << 16
_LARGEST = 1 << 22
# A far size is a prime above this and above four times the example's.
_FAR = 128


@dataclasses.dataclass(frozen=True)
class DimensionGroup:
    """Dimensions that change together.

    place: 0 for batches, else counted from the end, as -1. size: in the example. axes: (input, dimension).
    """

    place: int
    size: int
    axes: tuple[tuple[int, int], ...]


Changes = dict[DimensionGroup, int]
_Move = Callable[[int, int], int]


def groups(inputs: Tensors, dynamic: Sequence[Collection[int]]) -> list[DimensionGroup]:
    """Return the groups of the dynamic dimensions, batches first. dynamic: dimensions of each input."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for index, (tensor, dimensions) in enumerate(zip(inputs, dynamic)):
        for dimension in sorted(dimensions):
            place = dimension - tensor.dim() if dimension else 0
            found.setdefault((place, tensor.shape[dimension]), []).append((index, dimension))
    made = [DimensionGroup(place, size, tuple(axes)) for (place, size), axes in found.items()]
    return sorted(made, key=lambda group: (group.place != 0, group.place, group.size))


def plan(inputs: Tensors, groups: Sequence[DimensionGroup]) -> tuple[list[Changes], list[Changes]]:
    """Return sizes to try: one row, far larger images in each direction, other batches, smaller images.

    The second are larger ones for models that take few sizes: both sides, and the batch, by a power of two that divides them.
    Of one dimension far larger, the others become smaller by as much where the images are large.
    """
    order = {place: index for index, place in enumerate(sorted({group.place for group in groups if group.place}))}
    last = len(order) - 1

    def first(batches: Sequence[Callable[[int], int]], moves: Sequence[_Move]) -> list[Changes]:
        """Return the first combination that is not too large."""
        candidates = (
            {group: move(group.size, order[group.place]) if group.place else batch(group.size) for group in groups}
            for move in moves
            for batch in batches
        )
        return allowed(inputs, candidates)[:1]

    def strip(place: int) -> list[_Move]:
        def move(long: Callable[[int], int], short: Callable[[int], int]) -> _Move:
            return lambda n, j: long(n) if j == place else short(n)

        return [move(_far, _same), move(_far, _quarter), move(_four_times, _half)]

    same: list[_Move] = [lambda n, _: n]
    if not order:
        found = [first([_one], same), first([_far, _double], same), first([_next, _triple], same)]
        return list(itertools.chain(*found)), first([_double], same)
    wide = strip(last) if last else [lambda n, _: _odd(n)]
    found = [
        first([_one], same),
        first([_same, _one], strip(0)),
        first([_next, _same, _one], wide),
        first([_many, _triple, _double, _same], [lambda n, _: n // 2]),
    ]
    larger = first([_double, _same, _one], [lambda n, _: n + _step(n), lambda n, j: n if j else n + _step(n)])
    if len({group.place for group in groups}) < len(groups):  # inputs that a window makes smaller than others
        larger += first([_next, _same], [lambda n, _: n + 1])
    return list(itertools.chain(*found)), larger


def resized(inputs: Tensors, changes: Changes) -> Tensors:
    """Create inputs of other sizes: float values drawn from the example's, others repeated in their order.

    Where the example is one number throughout, as zeros are, random numbers above it: on equal values a wrong pooling
    or a wrong order looks right.
    """
    generator = torch.Generator().manual_seed(0)
    return tuple(_resized(tensor, shape, generator) for tensor, shape in zip(inputs, shapes(inputs, changes)))


def shapes(inputs: Tensors, changes: Changes) -> Shapes:
    """Return the shapes of the inputs with these changes."""
    sizes = [list(tensor.shape) for tensor in inputs]
    for group, size in changes.items():
        for index, dimension in group.axes:
            sizes[index][dimension] = size
    return tuple(tuple(shape) for shape in sizes)


def is_constant(tensor: torch.Tensor) -> bool:
    """Whether a float tensor holds one number throughout."""
    return tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all())


def beyond(inputs: Tensors, group: DimensionGroup, size: int, groups: Sequence[DimensionGroup]) -> list[Changes]:
    """Return changes of one group to a size beyond a limit; batches become one where that is too large."""
    batches = {other: 1 for other in groups if other.place == 0 and other is not group}
    return allowed(inputs, [{group: size}, {**batches, group: size}], most=_LARGEST)


def allowed(inputs: Tensors, candidates: Iterable[Changes], *, most: float = _SMALL) -> list[Changes]:
    """Return actual changes without repetitions, of at most twice the elements, or `most`."""
    most = max(_LARGEST_GROWTH * sum(tensor.numel() for tensor in inputs), most)

    def fitting() -> Iterator[Changes]:
        for candidate in candidates:
            changes = {group: size for group, size in candidate.items() if size != group.size and size > 0}
            if changes and sum(map(math.prod, shapes(inputs, changes))) <= most:
                yield changes

    found: list[Changes] = []
    for changes in fitting():
        if changes not in found:
            found.append(changes)
    return found


def _resized(tensor: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point() or not tensor.numel():
        for dimension, size in enumerate(shape):
            index = torch.arange(size, device=tensor.device) % max(tensor.shape[dimension], 1)
            tensor = tensor.index_select(dimension, index)
        return tensor
    if is_constant(tensor):
        value = float(tensor.flatten()[0])
        noise = torch.rand(shape, generator=generator, dtype=torch.float64) * max(abs(value), 1.0)
        return (value + noise).to(tensor.device, tensor.dtype)
    index = torch.randint(tensor.numel(), shape, generator=generator)
    return tensor.detach().flatten()[index.to(tensor.device)]


def _step(n: int) -> int:
    """Return the largest power of two that divides a size, up to 32."""
    return min(n & -n, _LARGEST_STEP)


def _same(n: int) -> int:
    return n


def _one(n: int) -> int:
    return 1


def _double(n: int) -> int:
    return 2 * n


def _triple(n: int) -> int:
    return 3 * n


def _many(n: int) -> int:
    """Return a multiple of 3, as of models that take their batch apart, above four times a batch."""
    return 9 if n <= 2 else 3 * (4 * n // 3 + 1)


def _four_times(n: int) -> int:
    return 4 * n


def _quarter(n: int) -> int:
    return n // 4


def _far(n: int) -> int:
    """Return the next prime above 128 and above four times a size."""
    size = max(_FAR, 4 * n) + 1
    while any(size % divisor == 0 for divisor in range(2, math.isqrt(size) + 1)):
        size += 1
    return size


def _next(n: int) -> int:
    return 3 if n == 1 else n + 1


def _half(n: int) -> int:
    return n // 2


def _odd(n: int) -> int:
    return (n + max(1, n // 8)) | 1


# Conditions on sizes that torch.export assumed while tracing.
#
# `if x.shape[0] > 4` leaves one branch in the program and the condition as a guard, which an ONNX graph does not keep.
# Most guards are harmless: torch.export notes wherever a size of 1 would be broadcast. So they only say which sizes to
# compare the exported model at. Guards on one dimension become its range in the program, a `Limit`.

# Conditions of reshapes come by the dozen; those that a model's own code asks are short.
_MOST = 16
_LARGEST_MODULUS = 7
# Conditions of these are not the model's.
_OWN = tuple(str(Path(file).parent) for file in (torch.__file__, bnexport.errors.__file__))
# The lower end of an ordinary dynamic dimension's range: torch.export takes sizes of 0 and 1 for constants.
SMALLEST = 2


@dataclasses.dataclass(frozen=True)
class Limit:
    """The range of a dynamic dimension of a program, if it has ends.

    axis: (input, dimension). low, high: None for no end. lines: those of the model's code that ask for them; torch's own are empty.
    """

    axis: Axis
    low: int | None
    high: int | None
    lines: tuple[str, str] = ("", "")

    @property
    def beyond(self) -> list[tuple[int, str]]:
        """The nearest sizes outside, and who asks for the end. A least size of torch's own is mostly that of a window."""
        low = [] if self.low is None or not self.lines[0] else [(self.low - 1, self.lines[0])]
        return low + ([] if self.high is None else [(self.high + 1, self.lines[1])])

    @property
    def counts(self) -> bool:
        """Whether it is more than a least height, which the model asks for just so."""
        return self.axis[1] == 0 or bool(self.beyond)

    def __contains__(self, size: int) -> bool:
        return (self.low is None or size >= self.low) and (self.high is None or size <= self.high)

    def __str__(self) -> str:
        ends = [f"at least {self.low}"] if self.low is not None else []
        ends += [] if self.high is None else [f"at most {self.high}"]
        asked = [line for (_, line) in self.beyond if line]
        return f"{' and '.join(ends)}, the model limits it{f' ({asked[-1]})' if asked else ''}"


def limits(inputs: Sequence[torch.Tensor], ranges: Mapping[Any, Any], axes: Collection[Axis]) -> tuple[Limit, ...]:
    """Return the limits of these dimensions in a program. inputs: fake tensors. ranges: its range_constraints."""
    found: list[Limit] = []
    for place, index in axes:
        size = inputs[place].shape[index]
        given = ranges.get(size.node.expr) if isinstance(size, torch.SymInt) else None
        if given is None:
            continue
        asked = getattr(size.node.shape_env, "var_to_range_sloc", {}).get(size.node.expr)
        lines = ("", "") if asked is None else (_line(asked.lower), _line(asked.upper))
        low, high = int(given.lower), int(given.upper) if given.upper.is_Integer else None
        if low > SMALLEST or high is not None:
            found.append(Limit((place, index), low if low > SMALLEST else None, high, lines))
    return tuple(found)


class SizeConditions:
    """The conditions of a program.

    inputs: fake tensors, the program's inputs with their symbolic sizes. asked: only those of the model's own code;
    torch has many of its own, as for the choice of a kernel.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], *, asked: bool = False) -> None:
        self._symbols: dict[Any, Axis] = {}
        found: dict[Any, str] = {}
        for place, value in enumerate(inputs):
            for dimension, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    self._symbols[size.node.expr] = (place, dimension)
                    found.update({guard.expr: _line(guard.sloc) for guard in size.node.shape_env.guards})
        known = [condition for condition in found if condition.free_symbols <= set(self._symbols)]
        known = [condition for condition in known if found[condition] or not asked]
        self.all = sorted(known, key=lambda condition: (not found[condition], int(condition.count_ops())))[:_MOST]
        self._lines = {condition: found[condition] for condition in self.all}

    def broken(self, shapes: Shapes) -> set[Any]:
        """Return the conditions that do not hold at these sizes."""
        return {condition for condition in self.all if self.breaks(condition, shapes)}

    def breaks(self, condition: Any, shapes: Shapes) -> bool:
        """Whether one of the conditions does not hold at these sizes."""
        sizes = {symbol: sympy.Integer(shapes[place][index]) for symbol, (place, index) in self._symbols.items()}
        try:
            return bool(condition.xreplace(sizes) == sympy.false)
        except (ArithmeticError, TypeError, ValueError):  # a division by zero
            return False

    def asked_for(self, axes: Collection[Axis], shapes: Shapes, names: Sequence[Mapping[int, str]]) -> str:
        """Return a condition of the model's code on one of these dimensions that does not hold at these sizes, with its
        line; empty if there is none. names: of the dimensions of each input.
        """
        for condition, line in self._lines.items():
            concerned = {symbol: self._symbols[symbol] for symbol in condition.free_symbols}
            if line and set(axes) & set(concerned.values()) and self.breaks(condition, shapes):
                known = {symbol: names[place].get(index, str(symbol)) for symbol, (place, index) in concerned.items()}
                text = str(condition.xreplace({symbol: sympy.Symbol(name) for symbol, name in known.items()}))
                return f"{'a condition' if '(' in text else text} at {line}"
        return ""

    def candidates(self, condition: Any, groups: Sequence[DimensionGroup]) -> Iterator[Changes]:
        """Yield changes of one or two groups that may break a condition.

        Images of less than half the size are left out: a network is not asked for them, and few take them.
        """
        axes = {self._symbols[symbol] for symbol in condition.free_symbols}
        concerned = [group for group in groups if axes & set(group.axes)]
        limits = sorted(int(number) for number in condition.atoms(sympy.Integer) if number > 0)
        for group in concerned:
            n = group.size
            near = [n + step for step in range(1, _LARGEST_MODULUS)]
            bounds = [limit + step for limit in limits for step in (-1, 0, 1)]
            least = 1 if group.place == 0 else (n + 1) // 2
            yield from ({group: size} for size in [*bounds, *near, 2 * n, n // 2] if size >= least)
        for one in concerned:
            yield from ({one: one.size + other.size, other: other.size} for other in concerned if one is not other)


def _line(location: Any) -> str:
    """Return the line of code outside torch that asks; empty for one of torch's own."""
    frame = location.framework_loc
    path = getattr(frame, "filename", "")
    if not path or path.startswith(_OWN):
        return ""
    return f"{'/'.join(Path(path).parts[-2:])}:{frame.lineno} in {frame.name}"
