"""Checks of what the torch operators are given: types, shapes and devices, before a kernel sees an address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from bnexport import schema
from bnexport.errors import UsageError
from bnexport.schema import GroupSpec
from bnexport.sync_bn import moments

Tensor = torch.Tensor


def check_forward(
    input: Tensor, vectors: Mapping[str, Tensor | None], training: bool, momentum: float, eps: float, spec: GroupSpec
) -> None:
    """Raise UsageError for operands that `sync_batch_norm` does not take.

    vectors: running_mean, running_var, weight and bias by name.
    """
    _check_input(input)
    for name, vector in vectors.items():
        _check_vector(name, vector, input)
    if not training and (vectors["running_mean"] is None or vectors["running_var"] is None):
        raise UsageError(
            "running_mean and running_var: got None, expected (C,) tensors, which inference normalises with"
        )
    if not 0.0 <= momentum <= 1.0:
        raise UsageError(f"momentum: got {momentum}, expected a number within [0, 1]")
    if not 0.0 <= eps < float("inf"):
        raise UsageError(f"eps: got {eps}, expected a finite number >= 0")
    _check_group(spec)


def check_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    saved_mean: Tensor,
    saved_invstd: Tensor,
    output_mask: Sequence[bool],
    spec: GroupSpec,
) -> None:
    """Raise UsageError for operands that `sync_batch_norm_backward` does not take."""
    _check_input(input)
    _check_like("grad_output", grad_output, input)
    _check_vector("weight", weight, input)
    for name, saved in (("saved_mean", saved_mean), ("saved_invstd", saved_invstd)):
        _check_vector(name, saved, input, torch.float64)
    if len(output_mask) != 3:
        raise UsageError(f"output_mask: got {len(output_mask)} values, expected 3 (input, weight, bias)")
    _check_group(spec)


def check_double_backward(
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    saved_mean: Tensor,
    saved_invstd: Tensor,
    spec: GroupSpec,
) -> None:
    """Raise UsageError for operands that `sync_batch_norm_double_backward` does not take.

    grads: gradients of grad_input, grad_weight and grad_bias.
    """
    check_backward(grad_output, input, weight, saved_mean, saved_invstd, (True,) * 3, spec)
    by_input, by_weight, by_bias = grads
    if by_input is not None:
        _check_like("grad_grad_input", by_input, input)
    _check_vector("grad_grad_weight", by_weight, input)
    _check_vector("grad_grad_bias", by_bias, input)


def require_two_values(total: int, input: Tensor) -> None:
    """Raise UsageError, as torch words it, for one value per channel in training."""
    if total == 1:
        raise UsageError(f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)}")


def _check_input(input: Tensor) -> None:
    if input.dim() < 2:
        raise UsageError(f"input: got rank {input.dim()}, expected rank >= 2 (N, C, *)")
    if input.dtype not in moments.DTYPES:
        raise UsageError(f"input: got {input.dtype}, expected one of float16, bfloat16, float32, float64")
    _check_layout("input", input)


def _check_like(name: str, tensor: Tensor, input: Tensor) -> None:
    """Check a tensor of the input's shape and type."""
    _check_place(name, tensor, input)
    if tensor.shape != input.shape:
        raise UsageError(f"{name}: got shape {tuple(tensor.shape)}, expected the input's, {tuple(input.shape)}")
    if tensor.dtype != input.dtype:
        raise UsageError(f"{name}: got {tensor.dtype}, expected the input's type, {input.dtype}")


def _check_vector(name: str, vector: Tensor | None, input: Tensor, dtype: torch.dtype | None = None) -> None:
    """Check a number for each channel. dtype: its only type; None for those that are cast."""
    if vector is None:
        return
    _check_place(name, vector, input)
    if vector.dim() != 1 or vector.shape[0] != input.shape[1]:
        shapes = f"got shape {tuple(vector.shape)}, expected ({input.shape[1]},)"
        raise UsageError(f"{name}: {shapes} for an input of shape {tuple(input.shape)}")
    if dtype is not None:
        if vector.dtype != dtype:
            raise UsageError(f"{name}: got {vector.dtype}, expected {dtype}")
    elif vector.dtype not in moments.DTYPES or (vector.dtype == torch.float64 and input.dtype != torch.float64):
        raise UsageError(
            f"{name}: got {vector.dtype} beside an input of {input.dtype}, expected float32 or the input's type"
        )


def _check_place(name: str, tensor: Tensor, input: Tensor) -> None:
    if tensor.device != input.device:
        raise UsageError(
            f"{name}: Expected all tensors to be on the same device, but found at least two devices,"
            f" {input.device} (input) and {tensor.device} ({name}): move module and input to one device"
        )
    _check_layout(name, tensor)


def _check_layout(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise UsageError(f"{name}: got a tensor of layout {tensor.layout}, expected {torch.strided}: use to_dense()")


def _check_group(spec: GroupSpec) -> None:
    if spec.group_size < 1:
        raise UsageError(f"group_size: got {spec.group_size}, expected 1 or more")
    for name, value, allowed in (
        ("stats_mode", spec.stats_mode, schema.STATS_MODES),
        ("grad_reduction", spec.grad_reduction, schema.GRAD_REDUCTIONS),
    ):
        if value not in allowed:
            raise UsageError(f"{name}: got {value!r}, expected one of {', '.join(allowed)}")
