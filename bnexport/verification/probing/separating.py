"""Numbers of one array that need bounds of their own: masked ones, and the operands of a Concat.

Masked ones, in front of a Softmax, are so far below the largest of their row that their power is 0: -1e9 and minus infinity
mean the same. As the largest numbers of the array they would set its bound.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bnexport.errors import BnexportError
from bnexport.verification.comparison import compare_output, compare_with_truth
from bnexport.verification.inputs.smaller_inputs import is_float
from bnexport.verification.verdict import OutputComparison

# exp (-750) is 0 in float64, too.
_MASKED = 750.0


def without_masked(values: Any, axis: int) -> Any:
    """Return the values in front of a Softmax; masked ones become the smallest of their row that is not."""
    if not is_float(values) or not values.size or not -values.ndim <= axis < values.ndim:
        return values
    wide = values.astype(np.float64)
    largest = wide.max(axis, keepdims=True)
    masked = wide < np.where(np.isfinite(largest), largest - _MASKED, -np.inf)
    smallest = wide.min(axis, keepdims=True, initial=np.inf, where=~masked)
    return np.where(masked, smallest, wide).astype(values.dtype)


def compare_parts(
    parted: Mapping[str, Any],
    operands: Sequence[Sequence[Any]],
    columns: Sequence[Sequence[Any]],
    working: str,
    truth: Callable[[], tuple[Sequence[Sequence[Any]], Sequence[Any]]],
) -> list[OutputComparison]:
    """Compare an output operand by operand, each with its own bound.

    parted: a `Parted` of the request. operands: the reference's values of these for each set of inputs, and of what is in
    front of them. columns: the output in the reference and in the candidate. truth: returns the
    operands and the output of the model in float64; raises BnexportError where there is none.
    """
    expected, got = ([_split(parted, *pair) for pair in zip(operands, column)] for column in columns)
    exact: list[list[Any]] | None = None
    compared = []
    for index, saturating in enumerate(parted["saturating"]):
        pair = [[row[index] for row in rows] for rows in (expected, got)]
        before = [row[len(parted["saturating"]) + index] for row in operands] if saturating else None
        name = f"{parted['output']} (operand {index} of Concat)"
        output = compare_output(name, pair[0], pair[1], working, before=before)
        if output.failed and 0 < output.max_abs_diff < np.inf:
            with contextlib.suppress(BnexportError):
                exact = exact or [_split(parted, *each) for each in zip(*truth())]
                output = compare_with_truth(output, pair[0], pair[1], [row[index] for row in exact])
        compared.append(output)
    return compared


def _split(parted: Mapping[str, Any], operands: Sequence[Any], values: Any) -> list[Any]:
    """Return the values of an output that each operand has in the reference."""
    sizes = [np.shape(operand)[parted["axis"]] for operand in operands[: len(parted["saturating"])]]
    return list(np.split(values, np.cumsum(sizes)[:-1], parted["output_axis"]))
