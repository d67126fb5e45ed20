"""Sync batch norm of one process in differentiable torch operations, for forward-mode derivatives and torch.func.

The operators' own gradients are reverse-mode, as the loop over a training step wants them. A transform (jvp, grad,
jacrev, hessian, vmap) differentiates these operations instead, in float64, in any mode and as often as it asks.

    y = (x - mean) invstd w + b
    dx = invstd w (dy - (sum dy + x_hat sum(dy x_hat)) / count),   dw = sum(dy x_hat),   db = sum dy
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from bnexport import torch_versions
from bnexport.errors import UsageError
from bnexport.schema import GroupSpec
from bnexport.sync_bn import moments, operands
from bnexport.sync_bn.moments import statistics_type, wide

Tensor = torch.Tensor


def differentiate(*tensors: Tensor | None) -> bool:
    """Whether a transform of torch.func, or a tangent of forward mode, asks for these derivatives."""
    if torch_versions.transform_level() is not None:
        return torch_versions.differentiates()
    if not torch_versions.has_tangents():
        return False
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def forward(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *group: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute what the operator `sync_batch_norm` does. The statistics have no derivatives, as the operator's."""
    vectors = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    operands.check_forward(input, vectors, training, momentum, eps, _one_process(*group))
    x, count, S = input.double(), input.numel() // max(input.shape[1], 1), statistics_type(input.dtype)
    new_mean, new_var = running_mean, running_var
    if training:
        operands.require_two_values(count, input)
        mean, var = _batch_statistics(x)
        if count:
            total, unbiased = torch.ones_like(mean), var * (count / max(count - 1, 1))
            new_mean, new_var = (
                None if old is None else moments.update_running(old, new, momentum, total)
                for old, new in ((running_mean, mean), (running_var, unbiased))
            )
    else:
        assert running_mean is not None and running_var is not None
        mean, var = running_mean.double(), running_var.double()
    invstd = moments.inverse_std(var, eps)
    y = (x - wide(mean, x)) * wide(_scale(invstd, weight), x)
    y = y if bias is None else y + wide(bias.double(), x)
    new_mean, new_var = (
        input.new_empty(0, dtype=S) if each is None else each.detach().to(S, copy=True) for each in (new_mean, new_var)
    )
    return y.to(input.dtype), new_mean, new_var, mean.detach(), invstd.detach()


def backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    saved_mean: Tensor,
    saved_invstd: Tensor,
    training: bool,
    output_mask: Sequence[bool],
    *group: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what the operator `sync_batch_norm_backward` does."""
    spec = _one_process(*group)
    operands.check_backward(grad_output, input, weight, saved_mean, saved_invstd, output_mask, spec)
    x, dy, mean, invstd = input.double(), grad_output.double(), saved_mean, saved_invstd
    axes, count = _axes(x), input.numel() // max(input.shape[1], 1)
    if training and count:
        mean, var = _batch_statistics(x)
        # The operator saves no eps.
        invstd = moments.inverse_std(var, (saved_invstd**-2 - var).detach())
    x_hat = (x - wide(mean, x)) * wide(invstd, x)
    A, B = dy.sum(axes), (dy * x_hat).sum(axes)
    projected = dy - (wide(A, x) + x_hat * wide(B, x)) / max(count, 1) if training else dy
    dx = (projected * wide(_scale(invstd, weight), x)).to(input.dtype)
    dtype = statistics_type(input.dtype) if weight is None else weight.dtype
    return tuple(  # type: ignore[return-value]
        grad if needed else input.new_empty(0)
        for grad, needed in zip((dx, B.to(dtype), A.to(dtype)), output_mask, strict=True)
    )


def batched_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the forward under vmap. Raise UsageError for running statistics that all samples would have to update."""
    running_mean, training = arguments[1], arguments[5]
    if training and running_mean is not None and not torch_versions.is_batched(running_mean):
        raise UsageError(
            "sync batch norm in training under vmap: each sample has statistics of its own, but running_mean and"
            " running_var exist once: use eval(), track_running_stats=False, or map over the buffers, too"
        )
    return forward(*arguments)


def _one_process(*group: Any) -> GroupSpec:
    spec = GroupSpec(*group)
    if spec.group_size > 1:
        raise NotImplementedError(
            f"sync batch norm over a group of {spec.group_size} processes has reverse-mode derivatives only, but a"
            " forward-mode tangent or a transform of torch.func reached it: use eval(), or a module with one process"
        )
    return spec


def _axes(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and biased variance; of an empty batch they are 0."""
    if x.shape[0] * moments.spatial_size(x) == 0:
        return x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])
    mean = x.mean(_axes(x))
    return mean, (x - wide(mean, x)).square().mean(_axes(x))


def _scale(invstd: Tensor, weight: Tensor | None) -> Tensor:
    return invstd if weight is None else invstd * weight.double()
