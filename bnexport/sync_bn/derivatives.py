"""Derivatives beyond the reverse mode that the operators bring: torch.func, forward mode, the double backward.

The operators' own gradients are reverse-mode, as the loop over a training step wants them. What asks for more
differentiates torch operations instead, in float64: a transform in any mode and as often as it asks, the double backward
of one process as often as autograd asks. `backward` states dx as a function of dy, x and weight. Its group sums

    mean = sum lambda x,   var = sum lambda (x - mean)^2,   A = sum dy,   B = sum dy x_hat

have known values; a process adds its own part with value 0, whose derivative is summed over the group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from bnexport import torch_versions
from bnexport.errors import UsageError
from bnexport.schema import GroupSpec
from bnexport.sync_bn import passes, torch_operations
from bnexport.sync_bn.torch_operations import axes, inverse_std, statistics_type, values_per_channel, wide

Tensor = torch.Tensor


def differentiate(*tensors: Tensor | None) -> bool:
    """Whether a transform of torch.func, or a tangent of forward mode, asks for these derivatives."""
    if torch_versions.transform_level() is not None:
        return torch_versions.differentiates()
    return torch_versions.has_tangents() and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    )


def _one_process(*group: Any) -> GroupSpec:
    spec = GroupSpec(*group)
    if spec.group_size > 1:
        raise NotImplementedError(
            f"sync batch norm over a group of {spec.group_size} processes has reverse-mode derivatives only, but a"
            " forward-mode tangent or a transform of torch.func reached it: use eval(), or a module with one process"
        )
    return spec


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
) -> tuple[Tensor, ...]:
    """Compute what the operator `sync_batch_norm` does. The statistics have no derivatives, as the operator's."""
    vectors = (running_mean, running_var, weight, bias)
    torch_operations.check_forward(input, vectors, training, momentum, eps, _one_process(*group))
    if training:
        torch_operations.require_two_values(values_per_channel(input), input)
    doubles = [None if vector is None else vector.double() for vector in vectors]
    y, *rest = torch_operations.forward(input.double(), doubles, training, momentum, eps, "exact", None)
    S = statistics_type(input.dtype)
    new = (input.new_empty(0, dtype=S) if it is None else it.detach().to(S, copy=True) for it in rest[:2])
    return (y.to(input.dtype), *new, *(it.detach() for it in rest[2:] if it is not None))


def batched_forward(*arguments: Any) -> tuple[Tensor, ...]:
    """Compute the forward under vmap. Raise UsageError for running statistics that all samples would have to update."""
    running_mean, training = arguments[1], arguments[5]
    if training and running_mean is not None and not torch_versions.is_batched(running_mean):
        raise UsageError(
            "sync batch norm in training under vmap: each sample has statistics of its own, but running_mean and"
            " running_var exist once: use eval(), track_running_stats=False, or map over the buffers, too"
        )
    return forward(*arguments)


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    training: bool,
    output_mask: Sequence[bool],
    *group: Any,
) -> tuple[Tensor, ...]:
    """Compute what the operator `sync_batch_norm_backward` does."""
    spec = _one_process(*group)
    torch_operations.check_backward(dy, x, weight, mean, invstd, output_mask, spec)
    grads = _gradients(dy, x, weight, mean, invstd, training, spec)
    dtype = statistics_type(x.dtype) if weight is None else weight.dtype
    return tuple(
        grad.to(kind) if needed else x.new_empty(0)
        for grad, kind, needed in zip(grads, (x.dtype, dtype, dtype), output_mask, strict=True)
    )


class _Shared(torch.autograd.Function):
    """A part, of value 0, of a sum over a group: its gradient is the sum of all members' gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.gather = gather
        return part.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Last.apply(grad, ctx.gather(grad.detach()).sum(0)), None


class _Last(torch.autograd.Function):
    """A sum over a group, which knows no derivative by the members' parts."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, total: Tensor) -> Tensor:
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise NotImplementedError(
            "sync batch norm over a group of processes has no derivatives beyond the second: use eval(), or a module with"
            " one process"
        )


def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, training: bool, group: GroupSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dx, dweight and dbias in float64, as functions of dy, x and weight that autograd can differentiate."""

    def gather(row: Tensor, what: str = "") -> Tensor:
        return passes.exchange(row, x, f"double backward{what}", group) if group.group_size > 1 else row[None]

    def known(value: Tensor, part: Tensor, what: str) -> Tensor:
        part = part - part.detach()
        if group.group_size > 1:
            part = _Shared.apply(part, functools.partial(gather, what=what))
        return value + part

    dy, x = dy.double(), x.double()
    weight = None if weight is None else weight.double()
    own = torch_operations.backward_row(dy.detach(), x.detach(), mean, invstd, group.stats_mode)
    rows = gather(own)
    lam, k = torch_operations.local_lambda(rows[:, 0], x, group.stats_mode)
    if training:
        mean = known(mean, lam * x.sum(axes(x)), " of mean")
        var = known(invstd**-2, lam * (x - wide(mean, x)).square().sum(axes(x)), " of var")
        invstd = inverse_std(var, 0.0)
    x_hat = (x - wide(mean, x)) * wide(invstd, x)
    row = torch.cat([dy.sum(axes(x)), (dy * x_hat).sum(axes(x))])
    sums = row if group.group_size == 1 else known(rows[:, 1:].sum(0), row, " of sums")
    A, B = sums.split(x.shape[1])
    dx = torch_operations.grad_input(dy, x, weight, mean, invstd, (A, B, lam, k) if training else None)
    if group.grad_reduction != "local":
        row = sums / (group.group_size if group.grad_reduction == "mean" else 1)
    dbias, dweight = row.split(x.shape[1])
    return dx, dweight, dbias


def double_backward(*arguments: Any, create_graph: bool = False) -> tuple[Tensor, ...]:
    """Compute the operator `sync_batch_norm_double_backward`: gradients of L = sum(v * dx) + sum(p * dweight + q * dbias)
    by grad_output, input and weight, in their types.

    create_graph: autograd can differentiate them as often as it likes; in a group it raises where it tries to.
    """
    *grads, dy, x, weight, mean, invstd, training = arguments[:9]
    spec = GroupSpec(*arguments[9:])
    torch_operations.check_double_backward(tuple(grads), dy, x, weight, mean, invstd, spec)
    given = torch.ones_like(mean) if weight is None else weight
    with torch_versions.with_autograd(), torch.enable_grad():
        if create_graph:
            # Views: dy may be a function of x itself.
            inputs = [(it if it.requires_grad else it.detach().requires_grad_()).view_as(it) for it in (dy, x, given)]
        else:
            inputs = [it.detach().double().requires_grad_() for it in (dy, x, given)]
        outputs = _gradients(inputs[0], inputs[1], inputs[2], mean, invstd, training, spec)
        # Zeros for absent ones: every member of a group takes part in the same exchanges.
        given_grads = [
            torch.zeros_like(out) if v is None else v.double() for v, out in zip(grads, outputs, strict=True)
        ]
        found = torch.autograd.grad(outputs, inputs, given_grads, create_graph=create_graph, materialize_grads=True)
    return tuple(passes.like(grad.to(of.dtype), of) for grad, of in zip(found, (dy, x, given), strict=True))


def double_backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    *grads, dy, x, weight, mean, invstd, _ = arguments[:9]
    torch_operations.check_double_backward(tuple(grads), dy, x, weight, mean, invstd, GroupSpec(*arguments[9:]))
    return torch.empty_like(dy), torch.empty_like(x), torch.empty_like(mean if weight is None else weight)
