"""Batch sizes at which a model's code would take another branch than the one recorded in the graph."""

from __future__ import annotations

import torch

from bnexport.exporting.dimensions import sizes
from bnexport.exporting.dimensions.size_conditions import SizeConditions

# Each is one more step in torch, in float64 and in ONNX Runtime.
_MOST = 2


def breaking(conditions: SizeConditions, arrays: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return batches at which a condition does not hold. arrays: those with dynamic rows, in the order of the
    conditions.
    """
    tensors = tuple(arrays.values())
    groups = sizes.groups(tensors, [{0}] * len(tensors))
    found: list[dict[str, torch.Tensor]] = []
    for condition in conditions.all[:_MOST]:
        for changes in sizes.allowed(tensors, conditions.candidates(condition, groups)):
            if conditions.breaks(condition, sizes.shapes(tensors, changes)):
                found.append(dict(zip(arrays, sizes.resized(tensors, changes))))
                break
    return found
