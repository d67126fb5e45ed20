"""Linear operators with a constant weight: relate the results of two by comparing weight by weight.

    z = W (p x + q) + b  in the original,  z' = W' (p' x + q') + b'  in the changed model

with p, q for each input channel. Then z' = r z + t, with r and t for each output channel, if for every weight

    W' p' = r W p                     and     t = b' + W' q' - r (b + W q)

up to the rounding of what is stored. A weight is one coefficient of one output, so nothing can cancel. Where zeros are put
around x behind the map, W q depends on the position: there W' q' = r W q is asked of every weight, and t = b' - r b.

r is that of a map that the original has behind z, or else read off the largest weight of each output. The data may be a sum
of maps of several bases, each with a p of its own. Weights are streamed along their first axis.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from bnexport.verification.proof.numbering import TensorRows, pieces
from bnexport.verification.proof.relations import (
    NOISE,
    ONE,
    ZERO,
    Agreement,
    Numbers,
    Stored,
    Unrelated,
    Violation,
    agreement,
    read_off,
    slack,
)

# Elements of the input channels of which the size of an output's coefficients is taken.
_SEEN = 64


@dataclasses.dataclass(frozen=True)
class Linear:
    """A weight seen as `view`, of which axes `out` belong to the output. The outputs are `out` axes of the view, in order.

    before: p and q of each base on the view (q once); pads: zeros may be put around the data. factor: of the weight.
    """

    stored: Stored
    view: tuple[int, ...]
    out: tuple[int, ...]
    scales: Sequence[Numbers]
    offset: Numbers
    bias: Numbers
    pads: bool
    factor: float = 1.0

    @property
    def outputs(self) -> tuple[int, ...]:
        return tuple(self.view[axis] for axis in self.out)

    @property
    def inner(self) -> tuple[int, ...]:
        return tuple(axis for axis in range(len(self.view)) if axis not in self.out)

    def on_view(self, numbers: np.ndarray) -> np.ndarray:
        """Return an array over the outputs as one that broadcasts to the view."""
        shape = [1] * len(self.view)
        for axis in self.out:
            shape[axis] = self.view[axis]
        return np.broadcast_to(numbers, self.outputs).reshape(shape) if np.ndim(numbers) else numbers

    def coefficients(self) -> list[Numbers]:
        """Return what the weight is multiplied by in each comparison."""
        padded = [self.offset] if self.pads else []
        factor = ONE if self.factor == 1.0 else Numbers(np.asarray(self.factor), np.zeros(()))
        return [each * factor for each in (*self.scales, *padded)]


@dataclasses.dataclass
class Fit:
    """z' = scale z + shift, over the outputs. sizes: sums of the coefficients of each output."""

    scale: Numbers
    shift: Numbers
    sizes: np.ndarray
    agreement: Agreement


def relate(mine: Linear, theirs: Linear, hints: Iterable[Numbers] = ()) -> Fit:
    """hints: what r may be, over the outputs. Raises Violation, or Unrelated where the operators have other forms."""
    if mine.view != theirs.view or mine.out != theirs.out:
        raise Unrelated("their weights have other shapes")
    pair = _Pair(mine, theirs)
    if pair.is_same:
        return pair.finished(ONE, np.ones(()))
    first: Violation | None = None
    for hint in hints:
        try:
            return pair.compared(hint)
        except Violation as error:
            first = first or error
    try:
        return pair.fitted()
    except Violation as error:
        raise first or error from None


class _Pair:
    def __init__(self, mine: Linear, theirs: Linear) -> None:
        self._sides = mine, theirs
        pairs = list(zip(mine.coefficients(), theirs.coefficients(), strict=True))
        pairs = [pair for pair in pairs if pair != (ZERO, ZERO)]
        self._left, self._right = [one for one, _ in pairs], [two for _, two in pairs]
        self._worst = Agreement()
        self._sizes = np.zeros(mine.outputs)
        # Of the original, then of the changed model: sums of weight times offset, of their sizes and errors.
        self._sums: list[list[np.ndarray]] = [[np.zeros(mine.outputs) for _ in range(3)] for _ in range(2)]

    @property
    def is_same(self) -> bool:
        """Whether both have the same weight on the same data: nothing is to be compared."""
        mine, theirs = self._sides
        plain = all(one is two for one, two in zip(self._left, self._right, strict=True))
        return plain and mine.stored.tensor is theirs.stored.tensor and mine.offset is ZERO and theirs.offset is ZERO

    def compared(self, scale: Numbers) -> Fit:
        """Compare with a scale that is told. The weights are compared within its error, the shift has it as its own."""
        mine = self._sides[0]
        self._reset()
        wide = scale.apply(mine.on_view)
        for start, one, two in self._blocks():
            self._check(start, one, two, _cut(wide, start, len(one)))
        fit = self.finished(scale, self._sizes)
        return dataclasses.replace(fit, scale=Numbers(scale.values, np.zeros(())))

    def fitted(self) -> Fit:
        """Read the scale of each output off its largest weight, then compare all others."""
        mine = self._sides[0]
        self._reset()
        best = [np.zeros(mine.outputs) for _ in range(4)]
        for start, one, two in self._blocks():
            self._see(start, one, two, best)
        scale = read_off(*best)
        wide = scale.apply(mine.on_view)
        for start, one, two in self._blocks():
            self._check(start, one, two, _cut(wide, start, len(one)))
        return self.finished(scale, self._sizes)

    def _reset(self) -> None:
        self._worst = Agreement()
        self._sizes[...] = 0.0
        for sums in self._sums:
            for each in sums:
                each[...] = 0.0

    def _blocks(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield blocks of both weights along the first axis of the view, in their types."""
        view = self._sides[0].view
        rows, row = view[0], math.prod(view[1:])
        start = 0
        tensors = [each.stored.tensor for each in self._sides]
        with TensorRows(tensors[0], rows) as first, TensorRows(tensors[1], rows) as second:
            for count in pieces(rows, row):
                one, two = (each.next(count).reshape(count, *view[1:]) for each in (first, second))
                yield start, one, two
                start += count

    def _see(self, start: int, one: np.ndarray, two: np.ndarray, best: list[np.ndarray]) -> None:
        """Record the largest scaled weight of each output so far, that of the changed model, and their errors."""
        for left, right in zip(self._left, self._right, strict=True):
            each = [*self._scaled(0, start, one, left), *self._scaled(1, start, two, right)]
            found = self._largest([np.broadcast_to(part, one.shape) for part in each])
            cut = self._own(start, len(one))
            larger = np.abs(found[0]) > np.abs(best[0][cut])
            for old, new in zip(best, found, strict=True):
                old[cut] = np.where(larger, new, old[cut])

    def _largest(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        """Return the numbers of the largest weight of each output in a block, over the outputs."""
        mine = self._sides[0]
        moved = [np.transpose(each, (*mine.out, *mine.inner)) for each in parts]
        count = moved[0].shape[: len(mine.out)]
        flat = [each.reshape(*count, -1) for each in moved]
        at = np.abs(flat[0]).argmax(axis=-1)[..., None]
        return [np.take_along_axis(each, at, axis=-1)[..., 0] for each in flat]

    def _own(self, start: int, count: int) -> tuple[slice, ...]:
        """Return the outputs that a block has."""
        axes = self._sides[0].out
        return tuple(slice(start, start + count) if axis == 0 else slice(None) for axis in axes)

    def _scaled(self, side: int, start: int, block: np.ndarray, by: Numbers) -> tuple[np.ndarray, np.ndarray | float]:
        """Return a block times its coefficients, and how far it may be off."""
        stored = self._sides[side].stored
        wide = block.astype(np.float64)
        if by is ONE and stored.error is None:
            return wide, stored.share * np.abs(wide) + stored.tiny if stored.share else 0.0
        factor = _cut(by, start, len(block))
        size = np.abs(wide)
        error = stored.share * size + stored.tiny
        if stored.error is not None:
            rows = stored.error.reshape(self._sides[side].view)
            error = error + rows[start : start + len(block)]
        total = error * (np.abs(factor.values) + factor.error) + size * factor.error
        return wide * factor.values, total + NOISE * size * np.abs(factor.values)

    def _check(self, start: int, one: np.ndarray, two: np.ndarray, scale: Numbers) -> None:
        mine, stored = self._sides[0], self._sides[1].stored
        first = (slice(None),) * mine.inner[0] + (slice(_SEEN),) if mine.inner else ()
        for left, right in zip(self._left, self._right, strict=True):
            factor = left.values if left is ONE else _cut(left, start, len(one)).values
            wanted = np.multiply(one, factor * scale.values, dtype=np.float64)
            if right is ONE and stored.error is None and _is_rounded(wanted, two, stored):
                self._worst = self._worst.joined(Agreement(stored.share, stored.share, stored.share))
            else:
                exact, exact_error = self._scaled(0, start, one, left)
                got, got_error = self._scaled(1, start, two, right)
                difference, allowed = np.abs(got - wanted), slack(scale, exact, exact_error, wanted, got_error)
                found = agreement(difference, allowed, np.abs(wanted), "weight", mine.inner, start, stored.tiny)
                self._worst = self._worst.joined(found)
            seen = one[first] * (factor if factor.ndim == 0 else np.broadcast_to(factor, one.shape)[first])
            self._sizes[self._own(start, len(one))] += np.abs(seen).sum(axis=mine.inner)
        if not mine.pads:
            self._sum(start, (one, two))

    def _sum(self, start: int, blocks: tuple[np.ndarray, np.ndarray]) -> None:
        """Add up weight times offset of the inputs, where there is one."""
        for side, (block, linear) in enumerate(zip(blocks, self._sides, strict=True)):
            if linear.offset is ZERO:
                continue
            terms, error = self._scaled(side, start, block, linear.offset * _factor(linear))
            cut = self._own(start, len(block))
            for total, each in zip(self._sums[side], (terms, np.abs(terms), error), strict=True):
                total[cut] += np.broadcast_to(each, block.shape).sum(axis=linear.inner)

    def finished(self, scale: Numbers, sizes: np.ndarray) -> Fit:
        """Return the relation of both results."""
        totals = []
        for linear, (total, size, error) in zip(self._sides, self._sums, strict=True):
            known = linear.offset is ZERO or linear.pads
            totals.append(linear.bias if known else linear.bias + Numbers(total, error + NOISE * size))
        sizes = np.maximum(sizes, np.abs(totals[0].values))
        return Fit(scale, totals[1] - scale * totals[0], sizes, self._worst)


def _factor(linear: Linear) -> Numbers:
    return ONE if linear.factor == 1.0 else Numbers(np.asarray(linear.factor), np.zeros(()))


def _is_rounded(wanted: np.ndarray, got: np.ndarray, stored: Stored) -> bool:
    """Whether each number is the one that is wanted, rounded once to its type."""
    with np.errstate(over="ignore"):
        rounded = wanted.astype(got.dtype)
    if np.array_equal(rounded, got):
        return True
    differ = rounded != got
    count = np.count_nonzero(differ)
    if 8 * count > got.size:
        return False
    # What lies between two numbers of the type may have been rounded to either.
    exact, other = wanted[differ], got[differ].astype(np.float64)
    allowed = stored.share * np.abs(other) + stored.tiny + NOISE * np.abs(exact)
    return bool((np.abs(other - exact) <= allowed).all())


def _cut(numbers: Numbers, start: int, count: int) -> Numbers:
    """Return the rows of coefficients that a block of the view meets."""

    def rows(array: np.ndarray) -> np.ndarray:
        return array[start : start + count] if array.ndim and array.shape[0] > 1 else array

    return Numbers(rows(numbers.values), rows(numbers.error))
