"""Checks of what a layer is given: types, shapes and devices, before a kernel sees an address."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from bnexport import schema
from bnexport.errors import UsageError
from bnexport.schema import GroupSpec

Tensor = torch.Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Types of weight, bias and running statistics beside an input; they are cast to the statistics' type.
_NARROW = DTYPES[:3]
_VECTOR_TYPES = dict.fromkeys(_NARROW, _NARROW) | {torch.float64: DTYPES}


def statistics_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def values_per_channel(x: Tensor) -> int:
    return math.prod(x.shape[2:], start=x.shape[0])


def check_forward(
    input: Tensor, vectors: Sequence[Tensor | None], training: bool, momentum: float, eps: float, group: GroupSpec
) -> None:
    """Raise UsageError for operands that `sync_batch_norm` does not take.

    vectors: running_mean, running_var, weight and bias.
    """
    _check_input(input)
    for name, vector in zip(("running_mean", "running_var", "weight", "bias"), vectors, strict=True):
        _check(name, vector, input, input.shape[1:2], _VECTOR_TYPES[input.dtype])
    if not training and (vectors[0] is None or vectors[1] is None):
        raise UsageError(
            "running_mean and running_var: got None, expected (C,) tensors, which inference normalises with"
        )
    check_options(momentum, eps, group)


def check_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    saved_mean: Tensor,
    saved_invstd: Tensor,
    output_mask: Sequence[bool],
    group: GroupSpec,
) -> None:
    """Raise UsageError for operands that `sync_batch_norm_backward` does not take."""
    _check_input(input)
    _check("grad_output", grad_output, input, input.shape, (input.dtype,))
    _check("weight", weight, input, input.shape[1:2], _VECTOR_TYPES[input.dtype])
    for name, saved in (("saved_mean", saved_mean), ("saved_invstd", saved_invstd)):
        _check(name, saved, input, input.shape[1:2], (torch.float64,))
    if len(output_mask) != 3:
        raise UsageError(f"output_mask: got {len(output_mask)} values, expected 3 (input, weight, bias)")
    check_options(0.0, 0.0, group)


def check_double_backward(
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    saved_mean: Tensor,
    saved_invstd: Tensor,
    group: GroupSpec,
) -> None:
    """Raise UsageError for operands that `sync_batch_norm_double_backward` does not take.

    grads: gradients of grad_input, grad_weight and grad_bias.
    """
    check_backward(grad_output, input, weight, saved_mean, saved_invstd, (True,) * 3, group)
    _check("grad_grad_input", grads[0], input, input.shape, (input.dtype,))
    for name, vector in zip(("grad_grad_weight", "grad_grad_bias"), grads[1:], strict=True):
        _check(name, vector, input, input.shape[1:2], _VECTOR_TYPES[input.dtype])


def require_two_values(total: int, input: Tensor) -> None:
    """Raise UsageError, as torch words it, for one value per channel in training."""
    if total == 1:
        raise UsageError(f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)}")


def _check_input(input: Tensor) -> None:
    if input.dim() < 2:
        raise UsageError(f"input: got rank {input.dim()}, expected rank >= 2 (N, C, *)")
    _check("input", input, input, input.shape, DTYPES)


def _check(name: str, tensor: Tensor | None, input: Tensor, shape: torch.Size, dtypes: Sequence[torch.dtype]) -> None:
    """Check the device, layout, shape and type of an operand that belongs to `input`; None is absent."""
    if tensor is None:
        return
    if tensor.device != input.device:
        raise UsageError(
            f"{name}: Expected all tensors to be on the same device, but found at least two devices,"
            f" {input.device} (input) and {tensor.device} ({name}): move module and input to one device"
        )
    if tensor.layout != torch.strided:
        raise UsageError(f"{name}: got a tensor of layout {tensor.layout}, expected {torch.strided}: use to_dense()")
    if tensor.shape != shape:
        raise UsageError(
            f"{name}: got shape {tuple(tensor.shape)}, expected {tuple(shape)} for an input of shape {tuple(input.shape)}"
        )
    if tensor.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise UsageError(f"{name}: got {tensor.dtype}, expected {expected} for an input of {input.dtype}")


def check_options(momentum: float, eps: float, group: GroupSpec) -> None:
    """Raise UsageError for numbers and modes that the operators do not take."""
    if not 0.0 <= momentum <= 1.0:
        raise UsageError(f"momentum: got {momentum}, expected a number within [0, 1], or None in a module")
    if not 0.0 <= eps < float("inf"):
        raise UsageError(f"eps: got {eps}, expected a finite number >= 0")
    if group.group_size < 1:
        raise UsageError(f"group_size: got {group.group_size}, expected 1 or more")
    for name, allowed in (("stats_mode", schema.STATS_MODES), ("grad_reduction", schema.GRAD_REDUCTIONS)):
        if getattr(group, name) not in allowed:
            raise UsageError(f"{name}: got {getattr(group, name)!r}, expected one of {', '.join(allowed)}")
