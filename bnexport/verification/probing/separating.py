"""Numbers of one array that need bounds of their own: masked ones, and the operands of a Concat.

Masked ones, in front of a Softmax, are so far below the largest of their row that their power is 0: -1e9 and minus infinity
mean the same. As the largest numbers of the array they would set its bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bnexport.verification.inputs.smaller_inputs import is_float

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


def split(parted: Mapping[str, Any], operands: Sequence[Any], values: Any) -> list[Any]:
    """Return the values of an output that each operand has in the reference.

    parted: a `Parted` of the request. operands: the reference's values of these, and of what is in front of them.
    """
    sizes = [np.shape(operand)[parted["axis"]] for operand in operands[: len(parted["saturating"])]]
    return list(np.split(values, np.cumsum(sizes)[:-1], parted["output_axis"]))
