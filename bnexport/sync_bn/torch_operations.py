"""Sync batch norm in differentiable torch operations, on any device: what runs without the compiled kernels, and what
torch.func, forward mode and the double backward differentiate.

Same interface as `kernels.Kernels`; the algebra and its symbols stand in reference.py. Rows are those of
custom_ops/include/bnexport.h: [weight, mean.., spread..] forward and [weight, sum dy.., sum dy * x_hat..] backward, in
float64. Data are centred before they are squared: E[x^2] - E[x]^2 is never formed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from bnexport import schema
from bnexport.errors import UsageError
from bnexport.schema import GroupSpec

# Checks of what a layer is given: types, shapes and devices, before a kernel sees an address.

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


def axes(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def wide(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(1, -1, *(1,) * (x.dim() - 2))


def inverse_std(var: Tensor, eps: float | Tensor) -> Tensor:
    total = var + eps
    return torch.where(total == 0, torch.zeros_like(total), total.rsqrt())


def _row(x: Tensor, stats_mode: str, first: Tensor, second: Tensor) -> Tensor:
    weights = {"exact": values_per_channel(x), "default": 1, "N": x.shape[0]}
    weight = weights[stats_mode] if values_per_channel(x) else 0
    return torch.cat([first.new_full((1,), weight), first, second])


def forward_row(x: Tensor, stats_mode: str) -> Tensor:
    """Compute this process's row (2 C + 1,) float64 in two passes over x."""
    count = max(values_per_channel(x), 1)
    mean = x.sum(axes(x), dtype=torch.float64) / count
    spread = (x.double() - wide(mean, x)).square().sum(axes(x))
    return _row(x, stats_mode, mean, spread if stats_mode == "exact" else spread / count)


def backward_row(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, stats_mode: str) -> Tensor:
    """Compute this process's row [weight, sum dy.., sum dy * x_hat..] (2 C + 1,) float64."""
    sum_dy_x_hat = (dy.double() * (x.double() - wide(mean, x))).sum(axes(x)) * invstd
    return _row(x, stats_mode, dy.sum(axes(x), dtype=torch.float64), sum_dy_x_hat)


def merge(rows: Tensor, stats_mode: str) -> tuple[Tensor, Tensor, Tensor]:
    """Compute mean and biased var (C,) of a group and the sum () of its weights, without waiting for the device.

    With every process empty mean and var are 0.
    """
    C = rows.shape[1] // 2
    weights, means, variances = rows[:, :1], rows[:, 1 : C + 1], rows[:, C + 1 :]
    total = weights.sum()
    if stats_mode == "exact":
        variances = variances / weights.clamp(min=1)
    shares = weights / (len(rows) if stats_mode == "default" else total.clamp(min=1))
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean).square())).sum(0), total


def _centred(x: Tensor, mean: Tensor) -> Tensor:
    """Compute x - mean in the statistics' type; mean is split into two parts to keep its precision."""
    S = statistics_type(x.dtype)
    high = mean.to(S)
    return x.to(S) - wide(high, x) - wide((mean - high).to(S), x)


def forward(
    x: Tensor,
    vectors: Sequence[Tensor | None],
    training: bool,
    momentum: float,
    eps: float,
    stats_mode: str,
    rows: Tensor | None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """Compute y, new running statistics (never in place of the old ones), saved mean and invstd.

    vectors: running_mean, running_var, weight, bias. rows: the group's, or None for one process.
    """
    del in_place
    *old, weight, bias = vectors
    S = statistics_type(x.dtype)
    if training:
        rows = forward_row(x, stats_mode)[None] if rows is None else rows
        mean, var, total = merge(rows, stats_mode)
        n = total if stats_mode == "exact" else torch.full_like(total, values_per_channel(x) * len(rows))
        unbiased = var * torch.where(n > 1, n / (n - 1).clamp(min=1), torch.ones_like(n))
        m = momentum * (total > 0).double()
        new = [
            None if one is None else ((1 - m) * one.double() + m * other).to(S)
            for one, other in zip(old, (mean, unbiased), strict=True)
        ]
    else:
        assert old[0] is not None and old[1] is not None
        mean, var = old[0].to(torch.float64, copy=True), old[1].double()
        new = [old[0].to(S, copy=True), old[1].to(S, copy=True)]
    invstd = inverse_std(var, eps)
    y = _centred(x, mean) * wide((invstd if weight is None else invstd * weight).to(S), x)
    y = y if bias is None else y + wide(bias.to(S), x)
    return y.to(x.dtype), new[0], new[1], mean, invstd


def local_lambda(weights: Tensor, x: Tensor, stats_mode: str) -> tuple[Tensor, Tensor]:
    """Compute lambda of this process and k from the weights of all rows."""
    total, count = weights.sum(), values_per_channel(x)
    if count == 0:
        return torch.zeros_like(total), torch.ones_like(total)
    if stats_mode == "default":
        return torch.full_like(total, 1 / (len(weights) * count)), total / len(weights)
    return (1 if stats_mode == "exact" else x.shape[0] / count) / total, torch.ones_like(total)


def grad_input(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    sums: tuple[Tensor, ...] | None,
) -> Tensor:
    """Compute weight * invstd * (dy - lambda * (A' + x_hat * B)); sums: A, B, lambda, k, or None for fixed statistics."""
    S = statistics_type(x.dtype)
    dx = dy.to(S)
    if sums is not None:
        A, B, lam, k = sums
        offset, slope = lam * (A - (1 - k) * invstd * mean * B), lam * B * invstd
        dx = dx - wide(offset.to(S), x) - _centred(x, mean) * wide(slope.to(S), x)
    return (dx * wide((invstd if weight is None else invstd * weight).to(S), x)).to(x.dtype)


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    training: bool,
    output_mask: Sequence[bool],
    stats_mode: str,
    grad_reduction: str,
    row: Tensor | None,
    rows: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute dx, dweight, dbias, None if not needed. row, rows: this process's and the group's, or None for one
    process.
    """
    row = backward_row(dy, x, mean, invstd, stats_mode) if row is None else row
    rows = row[None] if rows is None else rows
    _, A, B = rows.sum(0).split([1, x.shape[1], x.shape[1]])
    sums = (A, B, *local_lambda(rows[:, 0], x, stats_mode)) if training else None
    dx = grad_input(dy, x, weight, mean, invstd, sums) if output_mask[0] else None
    if grad_reduction == "local":
        _, A, B = row.split([1, x.shape[1], x.shape[1]])
    divisor = len(rows) if grad_reduction == "mean" else 1
    dweight, dbias = (
        (total / divisor).to(statistics_type(x.dtype)) if needed else None
        for total, needed in zip((B, A), output_mask[1:], strict=True)
    )
    return dx, dweight, dbias
