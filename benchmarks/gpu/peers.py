"""What the CUDA library is compared with: PyTorch's batch norm (its own kernels and cuDNN's) and the primitives of its sync
batch norm. Each is a pair of functions on the tensors of a call; results are returned so that a captured graph keeps them
apart, as ours are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.calls import Calls
from benchmarks.gpu.expected import EPS, MOMENTUM

Pair = tuple[Callable[[], Any], Callable[[], Any]]
aten = torch.ops.aten


def native(calls: Calls) -> Pair:
    x, dy, weight, bias, *running = inputs(calls)
    _, mean, invstd = aten.native_batch_norm(x, weight, bias, *running, True, MOMENTUM, EPS)
    return (
        lambda: aten.native_batch_norm(x, weight, bias, *running, True, MOMENTUM, EPS),
        lambda: aten.native_batch_norm_backward(dy, x, weight, *running, mean, invstd, True, EPS, [True] * 3),
    )


def cudnn(calls: Calls) -> Pair:
    x, dy, weight, bias, *running = inputs(calls)
    _, mean, invstd, reserve = aten.cudnn_batch_norm(x, weight, bias, *running, True, MOMENTUM, EPS)
    return (
        lambda: aten.cudnn_batch_norm(x, weight, bias, *running, True, MOMENTUM, EPS),
        lambda: aten.cudnn_batch_norm_backward(x, dy, weight, *running, mean, invstd, EPS, reserve),
    )


def sync(calls: Calls) -> Pair:
    """One process of torch.nn.SyncBatchNorm, without its collectives."""
    x, dy, weight, bias, *running = inputs(calls)
    count = x.numel() // x.shape[1]
    counts = torch.full((1,), float(count), device=x.device)
    whole = torch.full((1,), count, dtype=torch.int32, device=x.device)

    def statistics() -> Any:
        mean, invstd = torch.batch_norm_stats(x, EPS)
        return torch.batch_norm_gather_stats_with_counts(
            x, mean.view(1, -1), invstd.view(1, -1), *running, MOMENTUM, EPS, counts
        )

    mean, invstd = statistics()

    def backward() -> Any:
        sum_dy, sum_dy_xmu, dweight, dbias = torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, *[True] * 3)
        dx = torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, whole)
        return dx, dweight, dbias

    return lambda: torch.batch_norm_elemt(x, weight, bias, *statistics(), EPS), backward


def inputs(calls: Calls) -> list[torch.Tensor]:
    """x, dy, weight, bias, and copies of the running statistics."""
    kept = [calls.at[name] for name in ("x", "dy", "weight", "bias")]
    return [*kept, calls.at["running_mean"].clone(), calls.at["running_var"].clone()]


PEERS: dict[str, Callable[[Calls], Pair]] = {"torch": native, "cudnn": cudnn, "sync": sync}
