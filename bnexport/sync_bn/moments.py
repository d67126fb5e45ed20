"""Moments and their merge in torch operations, the fallback for the compiled kernels.

Rows are those of custom_ops/include/bnexport.h: [weight, mean.., spread..] forward and
[weight, sum dy.., sum dy * x_hat..] backward, in float64. The algebra and its symbols stand in
reference.py. Data are centred before they are squared: E[x^2] - E[x]^2 is never formed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

Tensor = torch.Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True)
class GroupStatistics:
    """Statistics of the group in float64: mean and var (C,), the count of running_var's factor, the total weight ()."""

    mean: Tensor
    var: Tensor
    bessel_count: Tensor
    total: Tensor


def statistics_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def spatial_size(x: Tensor) -> int:
    size = 1
    for dim in x.shape[2:]:
        size *= dim
    return size


def header(x: Tensor, stats_mode: str, grad_reduction: str) -> dict[str, Any]:
    """Return the configuration that the members of a group compare before a layer's first exchange."""
    dtype = str(x.dtype).removeprefix("torch.")
    return {"C": x.shape[1], "dtype": dtype, "stats_mode": stats_mode, "grad_reduction": grad_reduction}


def _axes(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def wide(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(1, -1, *(1,) * (x.dim() - 2))


def row_weight(x: Tensor, stats_mode: str) -> float:
    count = x.shape[0] * spatial_size(x)
    if count == 0:
        return 0.0
    return {"exact": float(count), "default": 1.0, "N": float(x.shape[0])}[stats_mode]


def forward_row(x: Tensor, stats_mode: str) -> Tensor:
    """Compute this process's row (2 C + 1,) float64 in two passes over x."""
    C, count = x.shape[1], x.shape[0] * spatial_size(x)
    row = torch.zeros(2 * C + 1, dtype=torch.float64, device=x.device)
    if count == 0:
        return row
    mean = x.sum(_axes(x), dtype=torch.float64) / count
    d = x.double() - wide(mean, x)
    spread = (d * d).sum(_axes(x))
    row[0] = row_weight(x, stats_mode)
    row[1 : C + 1] = mean
    row[C + 1 :] = spread if stats_mode == "exact" else spread / count
    return row


def merge(rows: Tensor, stats_mode: str, local_count: int) -> GroupStatistics:
    """Merge the rows of a group (G, 2 C + 1) in rank order, without synchronising with the device.

    `exact` is Chan, Golub and LeVeque's update of (count, mean, M2); MMCV's modes are the weighted
    sums that reference.py states. With every process empty mean and var are 0.
    """
    G, C = rows.shape[0], (rows.shape[1] - 1) // 2
    weights, means, spreads = rows[:, 0], rows[:, 1 : C + 1], rows[:, C + 1 :]
    total = weights.sum()
    mean, var = rows.new_zeros(C), rows.new_zeros(C)
    if stats_mode == "exact":
        count = rows.new_zeros(())
        for n, mean_r, m2_r in zip(weights, means, spreads):
            count = count + n
            share = n / count.clamp(min=1)
            delta = mean_r - mean
            mean = mean + delta * share
            # Here `var` holds M2; (count - n) * n / count is the weight of the gap between the means.
            var = var + m2_r * (n > 0) + delta * delta * ((count - n) * share)
        return GroupStatistics(mean, var / total.clamp(min=1), total, total)
    shares = weights / (G if stats_mode == "default" else total.clamp(min=1))
    for share, mean_r in zip(shares, means):
        mean = mean + mean_r * share
    for share, mean_r, var_r in zip(shares, means, spreads):
        delta = mean_r - mean
        var = var + (var_r + delta * delta) * share
    return GroupStatistics(mean, var, torch.full_like(total, local_count * G), total)


def update_running(old: Tensor, new: Tensor, momentum: float, total: Tensor) -> Tensor:
    """Compute (1 - m) * old + m * new in float64, rounded once to the statistics' type; old if total is 0."""
    m = momentum * (total > 0).double()
    return ((1 - m) * old.double() + m * new).to(statistics_type(old.dtype))


def unbiased(merged: GroupStatistics) -> Tensor:
    """Compute var * n / (n - 1), with factor 1 for n <= 1."""
    n = merged.bessel_count
    return merged.var * torch.where(n > 1, n / (n - 1).clamp(min=1), torch.ones_like(n))


def inverse_std(var: Tensor, eps: float | Tensor) -> Tensor:
    total = var + eps
    return torch.where(total == 0, torch.zeros_like(total), total.rsqrt())


def centred(x: Tensor, mean: Tensor) -> Tensor:
    """Compute x - mean in the statistics' type; mean is split into two parts to keep its precision."""
    S = statistics_type(x.dtype)
    if torch.float64 == S:
        return x - wide(mean, x)
    high = mean.to(S)
    low = (mean - high).to(S)
    return (x.to(S) - wide(high, x)).sub_(wide(low, x))


def normalise(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Compute weight * (x - mean) * invstd + bias, in x's type and memory format."""
    S = statistics_type(x.dtype)
    scale = invstd if weight is None else invstd * weight
    y = centred(x, mean).mul_(wide(scale.to(S), x))
    if bias is not None:
        y.add_(wide(bias.to(S), x))
    return y.to(x.dtype)


def backward_row(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, stats_mode: str) -> Tensor:
    C = x.shape[1]
    row = torch.zeros(2 * C + 1, dtype=torch.float64, device=x.device)
    if x.shape[0] * spatial_size(x) == 0:
        return row
    row[0] = row_weight(x, stats_mode)
    row[1 : C + 1] = dy.sum(_axes(dy), dtype=torch.float64)
    row[C + 1 :] = (dy.double() * (x.double() - wide(mean, x))).sum(_axes(x)) * invstd
    return row


@dataclasses.dataclass(frozen=True)
class GroupSums:
    """A, A' and B (C,) of reference.py in float64, with the lambda of this process and k, both ()."""

    A: Tensor
    A_prime: Tensor
    B: Tensor
    lam: Tensor
    k: Tensor


def group_sums(rows: Tensor, mean: Tensor, invstd: Tensor, x: Tensor, stats_mode: str) -> GroupSums:
    C = (rows.shape[1] - 1) // 2
    A, B = rows.new_zeros(C), rows.new_zeros(C)
    for row in rows:
        A = A + row[1 : C + 1]
        B = B + row[C + 1 :]
    lam, k = local_lambda(rows[:, 0], x, stats_mode)
    return GroupSums(A, A - (1 - k) * invstd * mean * B, B, lam, k)


def local_lambda(weights: Tensor, x: Tensor, stats_mode: str) -> tuple[Tensor, Tensor]:
    """Compute lambda of this process and k from the weights of all rows."""
    G, total = weights.numel(), weights.sum()
    one = torch.ones_like(total)
    count = x.shape[0] * spatial_size(x)
    if count == 0:
        return torch.zeros_like(total), one
    if stats_mode == "exact":
        return 1 / total, one
    if stats_mode == "default":
        return one / (G * count), total / G
    return x.shape[0] / (count * total), one


def apply_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, sums: GroupSums | None
) -> Tensor:
    """Compute weight * invstd * (dy - lambda * (A' + x_hat * B)), or weight * invstd * dy without sums."""
    S = statistics_type(x.dtype)
    scale = (invstd if weight is None else invstd * weight).to(S)
    if sums is None:
        return (dy.to(S) * wide(scale, x)).to(x.dtype)
    slope = (sums.lam * sums.B * invstd).to(S)
    offset = (sums.lam * sums.A_prime).to(S)
    dx = centred(x, mean).mul_(wide(slope, x)).add_(wide(offset, x))
    return torch.sub(dy.to(S), dx, out=dx).mul_(wide(scale, x)).to(x.dtype)
