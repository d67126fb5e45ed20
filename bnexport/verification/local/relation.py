"""Relations of a value in both models: the folded model's is ratio * x + offset, element by element."""

from __future__ import annotations

import dataclasses

import numpy as np

from bnexport.errors import UnsupportedModelError
from bnexport.verification.local import forms
from bnexport.verification.local.forms import CONSTANT, Form
from bnexport.verification.local.operators import Operand
from bnexport.verification.local.parameters import NOISE, Parameter


class NotRelated(UnsupportedModelError):
    """The inputs of a nonlinear operator are in no relation that passes it."""


@dataclasses.dataclass(frozen=True)
class Relation:
    """The folded model's value is ratio * x + offset; error: the bound of the error of the two, relative to r z."""

    ratio: np.ndarray
    offset: np.ndarray
    ratio_error: np.ndarray
    offset_error: np.ndarray


SAME = Relation(np.ones(()), np.zeros(()), np.zeros(()), np.zeros(()))


def relate(mine: Form, theirs: Form, shared: tuple[int, ...] | None = None) -> Relation:
    """Find the relation of two forms. shared: axes along which one ratio and one offset hold; None for no offset.

    Raises NotRelated.
    """
    if mine.shape != theirs.shape:
        raise NotRelated(f"the shapes {mine.shape} and {theirs.shape} of one value differ")
    groups = forms.groups_of((mine, theirs))
    columns: list[tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    for group in groups:
        rows = forms.rows_of((mine, theirs), group)
        columns.append(
            (
                group,
                forms.part(mine, group, rows),
                forms.part(theirs, group, rows),
                forms.error_part(mine, group, rows),
                forms.error_part(theirs, group, rows),
            )
        )
    fitted = [each for each in columns if shared is None or each[0] != CONSTANT]
    axes = (0, *(axis + 1 for axis in shared or ()))
    square, product, error = (np.zeros(mine.shape) for _ in range(3))
    for _, one, two, one_error, two_error in fitted:
        square = square + (one * one).sum(axis=axes, keepdims=True)[0]
        product = product + (one * two).sum(axis=axes, keepdims=True)[0]
        error = error + (np.abs(one) * (one_error + two_error)).sum(axis=axes, keepdims=True)[0]
    known = square > 0
    ratio = np.divide(product, square, out=np.ones(mine.shape), where=known)
    ratio_error = np.divide(error, square, out=np.zeros(mine.shape), where=known)
    offset, offset_error = np.zeros(mine.shape), np.zeros(mine.shape)
    if shared is not None:
        _, one, two, one_error, two_error = columns[0]
        places = axes[1:]
        rest = two - ratio * one
        offset = np.broadcast_to(rest.mean(axis=places, keepdims=True)[0], mine.shape)
        size = (two_error + np.abs(ratio) * one_error + ratio_error * np.abs(one)).max(axis=places, keepdims=True)[0]
        offset_error = np.broadcast_to(size, mine.shape)
    slack = NOISE * max(mine.size, theirs.size)
    for group, one, two, one_error, two_error in columns:
        rest = two - ratio * one - (offset if group == CONSTANT else 0.0)
        allowed = two_error + np.abs(ratio) * one_error + ratio_error * np.abs(one)
        allowed = allowed + (offset_error if group == CONSTANT else 0.0) + slack * np.maximum(1.0, np.abs(ratio))
        if not ((np.abs(rest) <= allowed) & np.isfinite(rest)).all():
            raise NotRelated("the two inputs of a nonlinear operator are not proportional")
    return Relation(ratio, offset, ratio_error, offset_error)


def require_equal(kind: str, one: Operand, two: Operand) -> None:
    """Raise NotRelated unless both are equal, to the last bit where they are constants."""
    if isinstance(one, Form) and isinstance(two, Form):
        if one.shape != two.shape or one.errors or two.errors:
            raise NotRelated(f"the inputs of {kind} are not equal")
        slack = NOISE * max(one.size, two.size)
        for group in forms.groups_of((one, two)):
            rows = forms.rows_of((one, two), group)
            difference = np.abs(forms.part(one, group, rows) - forms.part(two, group, rows))
            if not ((difference <= slack) & np.isfinite(difference)).all():
                raise NotRelated(f"the inputs of {kind} are not equal")
    elif isinstance(one, Parameter) and isinstance(two, Parameter):
        if one.values.dtype != two.values.dtype or not np.array_equal(one.values, two.values, equal_nan=True):
            raise NotRelated(f"a constant of {kind} changed")
    elif one is not None or two is not None:
        raise NotRelated(f"the inputs of {kind} are constant, or absent, in one model only")
