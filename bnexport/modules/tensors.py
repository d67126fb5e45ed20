"""Tensors and outputs of torch modules as NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch

from bnexport import schema, tolerances

Array = np.ndarray[Any, Any]


def to_array(tensor: torch.Tensor) -> Array:
    """Return the values in NumPy; types that it does not have, such as bfloat16 and float8, by way of their bits."""
    tensor = tensor.detach().cpu()
    kind = getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch."), None)
    if kind is None:
        return tensor.numpy()
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.uint8).numpy().view(kind)


def from_array(array: Array, like: torch.Tensor) -> torch.Tensor:
    """Copy an array into a new tensor, on the device and in the memory format of `like`; bfloat16 by way of its bits."""
    array = np.ascontiguousarray(array)
    bfloat16 = array.dtype == ml_dtypes.bfloat16
    values = torch.from_numpy(array.view(np.int16) if bfloat16 else array)
    values = values.view(torch.bfloat16) if bfloat16 else values
    if values.shape != like.shape:
        return values.to(like.device).clone()
    return torch.empty_like(like, dtype=values.dtype, requires_grad=False).copy_(values)


def in_double(feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of float types in float64."""
    return {name: value.double() if value.is_floating_point() else value for name, value in feeds.items()}


def bound(
    name: str, references: Mapping[str, Array], *, rounds: bool = False
) -> tuple[tolerances.Tolerance | None, float]:
    """Return the bound of an exported model's output, None for that of `comparison`, and the size of the data that a running
    mean averages; 0 for other outputs.

    rounds: whether numbers of the model are rounded to float32.
    """
    reference, stem = references[name], name.removesuffix(f"running_mean{schema.NEW_SUFFIX}")
    variance = references.get(f"{stem}running_var{schema.NEW_SUFFIX}") if stem != name else None
    scale = 0.0 if variance is None else float(np.sqrt(np.abs(variance).max(initial=0.0)))
    if reference.dtype.name not in tolerances.UNIT_ROUNDOFF:
        return None, scale
    values = np.append(reference.astype(np.float64), scale)
    table = tolerances.model(reference.dtype.name, values)
    if rounds and reference.dtype == np.float64:
        largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
        table += tolerances.Tolerance(0.0, tolerances.UNIT_ROUNDOFF["float32"] * largest)
    return table, scale
