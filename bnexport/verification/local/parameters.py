"""A constant of a region in float64, with the largest error that its stored numbers may have.

The original's numbers are exact by definition. A number of the folded model that the original has in the same place is
exact, too; every other was rounded once to its type, to nearest: |w - exact| <= u |w| + s / 2, with u the unit
roundoff and s the smallest subnormal number of the type. An expression of constants is rounded by the engine that
computes it: how far that leads is measured.

A fold of another tool computes in the type of the weights. Its standard form, k = s / sqrt(v + eps), W k and
(b - m) k + t, rounds a weight's product four times (sum, root, quotient, product) and the terms of a bias five times. This
is covered by counting each of the original's constants as rounded ROUNDINGS times: to first order 3 u from W (or b, m and
t), 3 u from s and up to 1.5 u from v.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from bnexport.errors import UnsupportedModelError
from bnexport.verification.local.regions import Side

# Rounding of our own arithmetic, relative to the size of the terms: some tens of operations in float64.
NOISE = 2.0**-49
ROUNDINGS = 3


@dataclasses.dataclass(frozen=True)
class Parameter:
    """values: float64. error: of the same shape; None where it is 0 everywhere."""

    values: np.ndarray
    error: np.ndarray | None = None

    @property
    def slack(self) -> np.ndarray | float:
        return 0.0 if self.error is None else self.error


def original(side: Side, value: ir.Value) -> Parameter:
    """Read a constant of the original. Raises UnsupportedModelError where it is not finite: then nothing is linear."""
    values, error = np.asarray(side.constants.array(value)), side.constants.error(value)
    if values.dtype == np.float64 and not np.isfinite(values).all():
        raise UnsupportedModelError(f"the constant {value.name!r} of the original is not finite")
    if side.roundings and values.dtype == np.float64:
        own = side.roundings * side.constants.roundoff(value)[0] * np.abs(values)
        error = own if error is None else error + own
    return Parameter(values, error)


def stored(side: Side, value: ir.Value, before: np.ndarray | None) -> Parameter:
    """Read a constant of the folded model. before: what the original has in its place."""
    values = np.asarray(side.constants.array(value))
    if values.dtype != np.float64:
        return Parameter(values)
    if before is not None and before.shape == values.shape:
        same = values == before
        if same.all():
            return Parameter(values)
    else:
        same = np.zeros(values.shape, bool)
    u, half = side.constants.roundoff(value)
    error = np.where(same, 0.0, u * np.abs(values) + half)
    computed = side.constants.error(value)
    return Parameter(values, error if computed is None else error + computed)
