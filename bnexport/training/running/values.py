"""Checks of the numbers in a batch, before a step: labels and indices in their range, no NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bnexport.errors import UsageError

Array = np.ndarray[Any, Any]


def check_indices(name: str, array: Array, ranges: Sequence[Sequence[int]]) -> None:
    """Raise UsageError for whole numbers out of a range; it names the first. ranges: each [first, last, ignored...]."""
    for first, last, *ignored in ranges:
        wrong = (array < first) | (array > last)
        if ignored and wrong.any():
            wrong &= ~np.isin(array, ignored)
        if wrong.any():
            place, row = _first(wrong)
            skipped = "".join(f", or {each}, which is ignored" for each in ignored)
            raise UsageError(
                f"{name}: {array[place]} is out of bounds{row}: expected whole numbers from {first} to {last}{skipped};"
                " nothing was changed"
            )


def check_not_nan(name: str, array: Array) -> None:
    """Raise UsageError for an array with a NaN; it names the first."""
    # The sum of numbers with a NaN is one, at a third of the time that isnan takes.
    with np.errstate(all="ignore"):
        suspicious = np.isnan(array.sum())
    if suspicious and (wrong := np.isnan(array)).any():
        _, row = _first(wrong)
        raise UsageError(
            f"{name}: got NaN{row}, expected numbers: the step would make every parameter NaN; leave the row out,"
            " or replace what is missing; nothing was changed"
        )


def _first(wrong: Array) -> tuple[tuple[int, ...], str]:
    """Return the index of the first True and, in words, its row."""
    place = tuple(int(each) for each in np.unravel_index(int(wrong.argmax()), wrong.shape))
    return place, f" in row {place[0]}" if place else ""
