"""Sync batch norm as pure torch.library operators: fake kernels, autograd, double backward.

    bnexport::sync_batch_norm           -> output, running_mean_out, running_var_out, saved_mean, saved_invstd
    bnexport::sync_batch_norm_backward  -> grad_input, grad_weight, grad_bias

They mutate nothing: an operator that mutates cannot be exported, so the module copies the new
statistics into its buffers. Collectives stay inside, opaque to compilers and exporters. Absent
running statistics and gradients that are not needed come out as empty tensors. saved_mean and
saved_invstd are float64 whatever the data's type, so that x_hat survives |mean| >> std.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bnexport import schema
from bnexport.schema import GroupSpec
from bnexport.sync_bn import (
    autograd,
    compiled,
    distributed,
    double_backward,
    moments,
    operands,
    torch_operations,
)

Tensor = torch.Tensor

library = torch.library.Library("bnexport", "DEF")

for _operator in schema.TORCH_OPERATORS:
    library.define(_operator.definition)

sync_batch_norm = torch.ops.bnexport.sync_batch_norm.default
sync_batch_norm_backward = torch.ops.bnexport.sync_batch_norm_backward.default


def _like(result: Tensor, x: Tensor) -> Tensor:
    """Return `result` in the memory format that fake kernels promise, that of empty_like(x)."""
    promised = torch.empty_like(x)
    return result if result.stride() == promised.stride() else promised.copy_(result)


def forward_kernel(
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
    spec = GroupSpec(*group)
    vectors = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    operands.check_forward(input, vectors, training, momentum, eps, spec)
    backend = backend_of(input)
    x = backend.arrange(input)
    count = x.shape[0] * moments.spatial_size(x)
    rows = None
    if training and spec.group_size > 1:
        rows = _exchange(backend.forward_row(x, spec.stats_mode), x, "forward", spec)
        if spec.stats_mode == "exact" and x.device.type == "cpu":
            operands.require_two_values(int(rows[:, 0].sum()), input)
    elif training:
        operands.require_two_values(count, input)
    y, new_mean, new_var, mean, invstd = backend.forward(
        x, running_mean, running_var, weight, bias, training, momentum, eps, spec.stats_mode, rows
    )
    new_mean, new_var = (_or_empty(vector, x) for vector in (new_mean, new_var))
    # The compiled kernels' output is an empty_like of their input.
    made = x is input and backend is compiled
    return y if made else _like(y, input), new_mean, new_var, mean, invstd


def _exchange(row: Tensor, x: Tensor, direction: str, spec: GroupSpec) -> Tensor:
    """Gather the rows of all members of the group."""
    header = moments.header(x, spec.stats_mode, spec.grad_reduction)
    return distributed.exchange(row, spec.group, spec.group_size, spec.layer, direction, header)


def backend_of(x: Tensor) -> Any:
    """Return the implementation for a tensor: the compiled kernels, or torch operations."""
    return compiled if compiled.usable(x) else torch_operations


def _or_empty(result: Tensor | None, x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=moments.statistics_type(x.dtype)) if result is None else result


def _forward_fake(
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
    spec = GroupSpec(*group)
    vectors = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    operands.check_forward(input, vectors, training, momentum, eps, spec)
    C, S = input.shape[1], moments.statistics_type(input.dtype)
    return (
        torch.empty_like(input),
        input.new_empty(0 if running_mean is None else C, dtype=S),
        input.new_empty(0 if running_var is None else C, dtype=S),
        input.new_empty(C, dtype=torch.float64),
        input.new_empty(C, dtype=torch.float64),
    )


def backward_kernel(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    saved_mean: Tensor,
    saved_invstd: Tensor,
    training: bool,
    output_mask: list[bool],
    *group: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    spec = GroupSpec(*group)
    operands.check_backward(grad_output, input, weight, saved_mean, saved_invstd, output_mask, spec)
    saved_mean, saved_invstd = saved_mean.contiguous(), saved_invstd.contiguous()
    backend = backend_of(input)
    x = backend.arrange(input)
    dy = torch.empty_like(x).copy_(grad_output) if grad_output.stride() != x.stride() else grad_output
    need_input, need_weight, need_bias = output_mask
    row = rows = None
    if spec.group_size > 1 and ((need_input and training) or need_weight or need_bias):
        row = backend.backward_row(dy, x, saved_mean, saved_invstd, spec.stats_mode)
        if (need_input and training) or spec.grad_reduction != "local":
            rows = _exchange(row, x, "backward", spec)
    grad_input, grad_weight, grad_bias = backend.backward(
        dy, x, weight, saved_mean, saved_invstd, training, output_mask, spec.stats_mode, spec.grad_reduction, row, rows
    )
    dtype = moments.statistics_type(x.dtype) if weight is None else weight.dtype
    made = x is input and backend is compiled
    return (
        x.new_empty(0) if grad_input is None else grad_input if made else _like(grad_input, input),
        *(x.new_empty(0) if grad is None else grad.to(dtype) for grad in (grad_weight, grad_bias)),
    )


def _backward_fake(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    saved_mean: Tensor,
    saved_invstd: Tensor,
    training: bool,
    output_mask: list[bool],
    *group: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    operands.check_backward(grad_output, input, weight, saved_mean, saved_invstd, output_mask, GroupSpec(*group))
    C = input.shape[1]
    dtype = moments.statistics_type(input.dtype) if weight is None else weight.dtype
    need_input, need_weight, need_bias = output_mask
    return (
        torch.empty_like(input) if need_input else input.new_empty(0),
        input.new_empty(C, dtype=dtype) if need_weight else input.new_empty(0),
        input.new_empty(C, dtype=dtype) if need_bias else input.new_empty(0),
    )


_KERNELS: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = (
    (forward_kernel, _forward_fake),
    (backward_kernel, _backward_fake),
    (double_backward.double_backward, double_backward.fake),
)
for _operator, (_kernel, _fake) in zip(schema.TORCH_OPERATORS, _KERNELS, strict=True):
    library.impl(_operator.name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bnexport::{_operator.name}", _fake, lib=library)

autograd.register(library)
