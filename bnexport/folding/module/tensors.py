"""Conversion between torch parameters and NumPy arrays, bfloat16 included."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from bnexport.graph.element_types import FLOAT_TYPES
from bnexport.graph.refusal import Refused
from bnexport.torch_versions import PLAIN_TENSORS
from bnexport.verification.torch_outputs import to_array


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return the values in their own type, on the CPU. Raise Refused for anything but a plain float tensor."""
    name = str(tensor.dtype).removeprefix("torch.")
    if type(tensor) not in PLAIN_TENSORS or tensor.is_quantized or tensor.layout is not torch.strided or tensor.is_meta:
        raise Refused("no-values", f"a {type(tensor).__name__} on {tensor.device.type} has no values to compute with")
    if name not in FLOAT_TYPES:
        raise Refused("type", f"a parameter is {name}, expected one of {', '.join(FLOAT_TYPES)}")
    return to_array(tensor.contiguous())


def from_numpy(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Copy an array into a new tensor, on the device and in the memory format of `like`."""
    array = np.ascontiguousarray(array)
    bfloat16 = array.dtype == ml_dtypes.bfloat16
    values = torch.from_numpy(array.view(np.int16) if bfloat16 else array)
    values = values.view(torch.bfloat16) if bfloat16 else values
    if values.shape != like.shape:
        return values.to(like.device).clone()
    return torch.empty_like(like, dtype=values.dtype, requires_grad=False).copy_(values)
