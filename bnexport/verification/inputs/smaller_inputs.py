"""Smaller inputs, for models whose outputs on the first ones decide nothing: not finite, or mostly rounding error.

Float inputs x are multiplied by SCALES, powers of two, which keep every digit. The smaller x is, the less of an
output depends on it: near x = 0 a model with wrong weights and the right biases would pass. So a pass on smaller
inputs counts only if the bound is small next to what x changes, |y(x) - y(x / 2)|.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bnexport.verification.verdict import OutputComparison

SCALES = tuple(2.0**-power for power in (3, 6, 9, 12))
# Largest bound, as a share of max |y(x) - y(x / 2)|. Float16's bound is 1.6 % of max |y|: x must make a sixth of y.
_VISIBLE = 0.1
HIDDEN = "where the inputs are small enough for a reference that is finite and accurate, it hardly depends on them"


def is_float(array: Any) -> bool:
    """Whether it is an array of a float type."""
    return isinstance(array, np.ndarray) and (array.dtype.kind == "f" or array.dtype.name == "bfloat16")


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The reference's outputs, a row for each set of inputs, for the inputs times `scale`.

    halved: those for half of these inputs, where `scale` is below 1. partial: whether they are not finite everywhere, so
    that a pass is for smaller inputs to confirm, if they can.
    """

    scale: float
    expected: list[list[Any]]
    halved: list[list[Any]] | None = None
    partial: bool = False


def attempts(run: Callable[[float], list[list[Any]] | None], *, scalable: bool) -> Iterator[Attempt]:
    """Attempts to compare, largest inputs first: the inputs as they are, then smaller ones with a finite reference.

    A difference on an earlier attempt is final: smaller inputs are for what it leaves undecided.

    run: the rows for the inputs times a number, None where the reference does not run on them (it does for 1).
    scalable: whether any input is of a float type.
    """
    expected = run(1.0)
    assert expected is not None
    yield Attempt(1.0, expected, partial=not all(map(is_finite, expected)))
    for scale in SCALES if scalable else ():
        smaller = run(scale)
        if smaller is None or not all(map(is_finite, smaller)):
            continue
        halved = run(scale / 2)
        if halved is not None:
            yield Attempt(scale, smaller, halved)


def scaled(inputs: Mapping[str, np.ndarray], scale: float) -> dict[str, np.ndarray]:
    """Return the inputs, those of a float type times `scale`."""
    if scale == 1.0:
        return dict(inputs)
    return {
        name: (array.astype(np.float64) * scale).astype(array.dtype) if is_float(array) else array
        for name, array in inputs.items()
    }


def is_finite(values: Iterable[Any]) -> bool:
    """Whether all values of float types are finite."""
    return all(bool(np.isfinite(array).all()) for array in values if is_float(array))


def shows_inputs(output: OutputComparison, expected: Sequence[Any], halved: Sequence[Any]) -> bool:
    """Whether an output depends on its inputs by more than its bound hides.

    expected: the reference's values for each x; halved: those for each x / 2.
    """
    pairs = [(one.astype(np.float64), two.astype(np.float64)) for one, two in zip(expected, halved) if is_float(one)]
    if not pairs:
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
