"""Smaller inputs, for models whose outputs on the first ones decide nothing: not finite, or mostly rounding error.

Float inputs x are multiplied by SCALES, powers of two, which keep every digit. The smaller x is, the less of an
output depends on it: near x = 0 a model with wrong weights and the right biases would pass. So a pass on smaller
inputs counts only if the bound is small next to what x changes, |y(x) - y(x / 2)|.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bnexport.verification.verdict import OutputComparison

SCALES = tuple(2.0**-power for power in (3, 6, 9, 12))
# Largest bound, as a share of max |y(x) - y(x / 2)|. Float16's bound is 1.6 % of max |y|: x must make a sixth of y.
_VISIBLE = 0.1
HIDDEN = "where the inputs are small enough for a reference that is finite and accurate, it hardly depends on them"


def is_float(array: Any) -> bool:
    """Whether it is an array or a tensor of a float type."""
    if isinstance(array, np.ndarray):
        return array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    return bool(getattr(getattr(array, "dtype", None), "is_floating_point", False))


def scaled(inputs: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Return the inputs, arrays or tensors, those of a float type times `scale`."""
    return {name: _times(value, scale) if scale != 1.0 and is_float(value) else value for name, value in inputs.items()}


def _times(value: Any, scale: float) -> Any:
    if isinstance(value, np.ndarray):
        return (value.astype(np.float64) * scale).astype(value.dtype)
    return value * scale


def is_finite(values: Iterable[Any]) -> bool:
    """Whether all values of float types are finite."""
    return all(bool(np.isfinite(array).all()) for array in values if is_float(array))


def shows_inputs(output: OutputComparison, expected: Sequence[Any], halved: Sequence[Any]) -> bool:
    """Whether an output depends on its inputs by more than its bound hides.

    expected: the reference's values for each x; halved: those for each x / 2.
    """
    pairs = [(one.astype(np.float64), two.astype(np.float64)) for one, two in zip(expected, halved) if is_float(one)]
    if not pairs or any(one.shape != two.shape for one, two in pairs):
        return True
    bound = output.atol + output.rtol * max(float(np.abs(one).max(initial=0.0)) for one, _ in pairs)
    return is_small(bound, pairs)


def is_small(bound: float, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> bool:
    """Whether a bound of an output hides little of what x changes. pairs: y(x) and y(x / 2)."""
    return bound <= _VISIBLE * max(float(np.abs(one - two).max(initial=0.0)) for one, two in pairs)


def as_hidden(output: OutputComparison) -> OutputComparison:
    """Return the output, undecided if it passed."""
    if not output.passed:
        return output
    return dataclasses.replace(output, passed=False, decided=False, reason=HIDDEN)


def with_smaller(reason: str) -> str:
    """Extend the reason why the first inputs decide nothing, once smaller ones have been tried."""
    return f"{reason}; inputs down to 1/{round(1 / SCALES[-1])} of their size decide nothing either"
