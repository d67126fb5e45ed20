"""Sync batch norm in differentiable torch operations, on any device: what runs without the compiled kernels, and what
torch.func, forward mode and the double backward differentiate.

Same interface as `kernels.Kernels`; the algebra and its symbols stand in reference.py. Rows are those of
custom_ops/include/bnexport.h: [weight, mean.., spread..] forward and [weight, sum dy.., sum dy * x_hat..] backward, in
float64. Data are centred before they are squared: E[x^2] - E[x]^2 is never formed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bnexport.sync_bn.operands import statistics_type, values_per_channel

Tensor = torch.Tensor


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
