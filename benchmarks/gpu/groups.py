"""Groups of processes on one device against float64: each mode of the statistics, and the gradient by autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from benchmarks.gpu.cases import Case, Expected, along, check_backward, check_forward, guarded, sums
from benchmarks.gpu.layer import EPS, Calls, Layer
from bnexport.native import capi

T = TypeVar("T")


def on_streams(calls: list[Callable[[], T]], device: str) -> list[T]:
    """Runs each call on a stream of its own, all at the same time."""
    if device == "cpu":
        return [call() for call in calls]
    current, results = torch.cuda.current_stream(), []
    for call in calls:
        stream = torch.cuda.Stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            results.append(call())
        current.wait_stream(stream)
    return results


def of_group(xs: Sequence[torch.Tensor], mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of a group, of float64 parts; MMCV's modes weigh processes, not values."""
    parts = []
    for x in xs:
        N, count = x.shape[0], x.numel() // x.shape[1]
        if count > 0:
            mean = sums(x) / count
            var = sums((x - along(mean, x)) ** 2) / count
            parts.append(({"exact": count, "default": 1, "N": N}[mode], mean, var))
    total = len(xs) if mode == "default" else sum(weight for weight, _, _ in parts)
    mean = sum((weight * mean for weight, mean, _ in parts), torch.zeros_like(parts[0][1])) / total
    spreads = (weight * (var + (one - mean) ** 2) for weight, one, var in parts)
    return mean, sum(spreads, torch.zeros_like(mean)) / total


def verify_group(dtype: torch.dtype, channels_last: bool, device: str, mode: str = "exact") -> None:
    """Three uneven processes on one device, each on a stream of its own, one of them without data."""
    batches, C, S = (5, 0, 2), 24, 15 * 13
    full = Case((sum(batches), C, 15, 13), dtype, channels_last)
    whole, _ = guarded(full, device)
    dwhole, _ = guarded(full, device)
    whole.copy_(torch.randn(full.shape, device=device, dtype=torch.float64) + 0.5)
    dwhole.copy_(torch.randn(full.shape, device=device, dtype=torch.float64))
    layer = Layer.of(whole)
    wide = whole.double().requires_grad_()
    mean, var = of_group(wide.split(batches), mode)
    hat = (wide - along(mean, wide)) / along((var + EPS).sqrt(), wide)
    (dx,) = torch.autograd.grad(hat * along(layer.weight.double(), wide), wide, dwhole.double())
    # MMCV counts a process's own values times the number of processes; the last one's running statistics stay.
    count = sum(batches) * S if mode == "exact" else len(batches) * batches[-1] * S
    want = Expected(mean.detach(), var.detach(), count)
    xs, dys = whole.split(batches), dwhole.split(batches)
    ys, dxs = torch.full_like(whole, torch.nan).split(batches), torch.full_like(whole, torch.nan).split(batches)
    ranks = [Calls(*tensors, layer) for tensors in zip(xs, dys, ys, dxs, strict=True)]
    settings = {"group_size": len(batches), "stats_mode": capi.STATS_MODES[mode]}
    # A part without data has no layout of its own.
    for rank in ranks:
        rank.common["layout"] = 1 if channels_last else 0
        rank.common["S"] = S
        rank.prepare(**settings)
    gathered = torch.stack(on_streams([lambda rank=rank: rank.row(backward=False) for rank in ranks], device))
    for rank in ranks:
        rank.prepare(**settings, gathered=gathered.data_ptr())
    on_streams([rank.forward for rank in ranks[:-1]], device)
    on_streams([ranks[-1].forward], device)
    check_forward(full, whole, torch.cat(ys), layer, want)
    rows = on_streams([lambda rank=rank: rank.row(backward=True) for rank in ranks], device)
    gathered = torch.stack(rows)
    for rank, row in zip(ranks, rows, strict=True):
        rank.prepare(**settings, gathered=gathered.data_ptr(), local_moments=row.data_ptr(), grad_reduction=2)
    on_streams([rank.backward for rank in ranks], device)
    check_backward(full, whole, dwhole, torch.cat(dxs), layer, want, expected=dx)
