"""Random inputs that fit a model's declared types and shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import ml_dtypes  # noqa: F401 - NumPy learns the names of its types
import numpy as np

from bnexport.errors import UnsupportedModelError

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

Kind = Literal["normal", "rounded", "nan", "infinite", "full"]
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
    normal ones beside truth values that are all true. scale: factor. numbers: to put among rounded ones."""

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

    One row; then another batch with dimensions that differ from one another: smaller ones, which cost least, odd ones,
    multiples of 8 and 32, equal ones.
    """
    smaller = (other * 5 // 8 + 1, (other + 1) // 2)
    changed = [smaller, (other + 9, other + 4), (other + 16, other + 8), (other + 32, other), (2 * other, 2 * other)]
    return [(1, (other,))], [*((3, sizes) for sizes in changed), (first, changed[1]), (3, (other,))]


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
    values = np.asarray(generator.standard_normal(shape) * how.scale)
    if how.kind in ("normal", "full"):
        return values
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
