"""What the CUDA library is compared with: PyTorch's batch norm (its own kernels and cuDNN's), the primitives of
its sync batch norm, and a device copy. Each is a pair of functions on given tensors; results are returned so that
a captured graph keeps them apart, as ours are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.layer import EPS, MOMENTUM, Layer

Call = Callable[[], Any]


def native(x: torch.Tensor, dy: torch.Tensor, layer: Layer) -> tuple[Call, Call]:
    statistics = (layer.running_mean.clone(), layer.running_var.clone())

    def forward() -> Any:
        return torch.ops.aten.native_batch_norm(x, layer.weight, layer.bias, *statistics, True, MOMENTUM, EPS)

    _, mean, invstd = forward()

    def backward() -> Any:
        return torch.ops.aten.native_batch_norm_backward(
            dy, x, layer.weight, *statistics, mean, invstd, True, EPS, [True, True, True]
        )

    return forward, backward


def cudnn(x: torch.Tensor, dy: torch.Tensor, layer: Layer) -> tuple[Call, Call]:
    statistics = (layer.running_mean.clone(), layer.running_var.clone())

    def forward() -> Any:
        return torch.ops.aten.cudnn_batch_norm(x, layer.weight, layer.bias, *statistics, True, MOMENTUM, EPS)

    _, mean, invstd, reserve = forward()

    def backward() -> Any:
        return torch.ops.aten.cudnn_batch_norm_backward(x, dy, layer.weight, *statistics, mean, invstd, EPS, reserve)

    return forward, backward


def sync(x: torch.Tensor, dy: torch.Tensor, layer: Layer) -> tuple[Call, Call]:
    """One process of torch.nn.SyncBatchNorm, without its collectives."""
    statistics = (layer.running_mean.clone(), layer.running_var.clone())
    count = x.numel() // x.shape[1]
    counts = torch.full((1,), float(count), device=x.device)
    whole = torch.full((1,), count, dtype=torch.int32, device=x.device)

    def group_statistics() -> Any:
        mean, invstd = torch.batch_norm_stats(x, EPS)
        return torch.batch_norm_gather_stats_with_counts(
            x, mean.view(1, -1), invstd.view(1, -1), *statistics, MOMENTUM, EPS, counts
        )

    def forward() -> Any:
        return torch.batch_norm_elemt(x, layer.weight, layer.bias, *group_statistics(), EPS)

    mean, invstd = group_statistics()

    def backward() -> Any:
        sum_dy, sum_dy_xmu, dweight, dbias = torch.batch_norm_backward_reduce(
            dy, x, mean, invstd, layer.weight, True, True, True
        )
        dx = torch.batch_norm_backward_elemt(dy, x, mean, invstd, layer.weight, sum_dy, sum_dy_xmu, whole)
        return dx, dweight, dbias

    return forward, backward


PEERS: dict[str, Callable[[torch.Tensor, torch.Tensor, Layer], tuple[Call, Call]]] = {
    "torch": native,
    "cudnn": cudnn,
    "sync": sync,
}
