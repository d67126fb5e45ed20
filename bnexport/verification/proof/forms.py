"""Affine forms: a value of a region as constant + sum over variables of coefficient times variable.

A variable is one element of a value that enters the region, or of a value behind a nonlinear operator. Where all
elements are variables the coefficients are the whole map ("proved"); where there are too many, a few random directions
stand for them ("compared"). Each coefficient has a bound of the error that the stored weights give it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from bnexport.errors import UnsupportedModelError

# Numbers in one block of coefficients: 256 MB of float64 at most.
_MOST = 1 << 23
CONSTANT = 0


class TooLarge(UnsupportedModelError):
    """The coefficients would not fit."""


@dataclasses.dataclass
class Form:
    """blocks: for each group of variables the coefficients (variables, *shape); group 0 is the constant part.

    errors: bounds of the errors of the coefficients, where there are any. size: the largest number met on the way.
    """

    shape: tuple[int, ...]
    blocks: dict[int, np.ndarray]
    errors: dict[int, np.ndarray]
    size: float

    def __post_init__(self) -> None:
        if 0 in self.shape:
            raise UnsupportedModelError(f"a value of shape {self.shape} has no element to compare")

    def error(self, group: int) -> np.ndarray | float:
        return self.errors.get(group, 0.0)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def groups(self) -> tuple[int, ...]:
        return tuple(self.blocks)


def constant(values: np.ndarray, error: np.ndarray | None = None) -> Form:
    """Make a form without variables."""
    values = np.asarray(values, np.float64)
    errors = {} if error is None or not error.any() else {CONSTANT: error[None]}
    return Form(values.shape, {CONSTANT: values[None]}, errors, float(np.abs(values).max(initial=0.0)))


def variables(group: int, shape: tuple[int, ...], directions: np.ndarray) -> Form:
    """Make a form of its own variables. directions: (variables, *shape)."""
    return Form(shape, {group: directions}, {}, float(np.abs(directions).max(initial=0.0)))


def directions(shape: tuple[int, ...], count: int | None, seed: int) -> np.ndarray:
    """Return one direction for each element, or `count` random ones."""
    size = int(np.prod(shape))
    if count is None:
        check_size(size, size)
        return np.eye(size).reshape(size, *shape)
    return np.random.default_rng(seed).standard_normal((count, *shape))


def check_size(rows: int, size: int) -> None:
    """Raises TooLarge."""
    if rows * size > _MOST:
        raise TooLarge(f"the region has {rows} x {size} coefficients, {_MOST} are taken")


def groups_of(forms: Iterable[Form]) -> list[int]:
    """Return all groups of variables, the constant part first."""
    found: dict[int, None] = {CONSTANT: None}
    for form in forms:
        found.update(dict.fromkeys(form.blocks))
    return list(found)


def rows_of(forms: Iterable[Form], group: int) -> int:
    """Return the number of variables of a group."""
    return next((len(form.blocks[group]) for form in forms if group in form.blocks), 1)


def part(form: Form, group: int, rows: int) -> np.ndarray:
    """Return the coefficients of a group, zeros where the form has none."""
    block = form.blocks.get(group)
    if block is None:
        check_size(rows, int(np.prod(form.shape)))
        return np.zeros((rows, *form.shape))
    return block


def error_part(form: Form, group: int, rows: int) -> np.ndarray:
    """Return the bounds of a group, zeros where there are none."""
    error = form.errors.get(group)
    return np.zeros((rows, *form.shape)) if error is None else error
