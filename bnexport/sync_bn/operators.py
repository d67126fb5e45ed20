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

from bnexport import schema, torch_versions
from bnexport.schema import GroupSpec
from bnexport.sync_bn import autograd, derivatives, operands, passes
from bnexport.sync_bn.operands import statistics_type

Tensor = torch.Tensor

library = torch.library.Library("bnexport", "DEF")

for _operator in schema.TORCH_OPERATORS:
    library.define(_operator.definition)

sync_batch_norm = torch.ops.bnexport.sync_batch_norm.default
sync_batch_norm_backward = torch.ops.bnexport.sync_batch_norm_backward.default


def _forward(
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
    vectors, spec = (running_mean, running_var, weight, bias), GroupSpec(*group)
    operands.check_forward(input, vectors, training, momentum, eps, spec)
    backend, x, *arranged = passes.arrange(input, *vectors)
    y, *new, mean, invstd = passes.normalise(backend, x, arranged, training, momentum, eps, spec)
    nothing = mean.new_empty(0, dtype=statistics_type(x.dtype))
    return (passes.like(y, input), *(nothing if it is None else it for it in new), mean, invstd)


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
) -> tuple[Tensor, ...]:
    vectors = (running_mean, running_var, weight, bias)
    operands.check_forward(input, vectors, training, momentum, eps, GroupSpec(*group))
    C, S = input.shape[1], statistics_type(input.dtype)
    statistics = (input.new_empty(0 if old is None else C, dtype=S) for old in vectors[:2])
    saved = (input.new_empty(C, dtype=torch.float64) for _ in range(2))
    return (torch.empty_like(input), *statistics, *saved)


def _backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    saved_mean: Tensor,
    saved_invstd: Tensor,
    training: bool,
    output_mask: list[bool],
    *group: Any,
) -> tuple[Tensor, ...]:
    spec = GroupSpec(*group)
    operands.check_backward(grad_output, input, weight, saved_mean, saved_invstd, output_mask, spec)
    backend, x, w = passes.arrange(input, weight)
    saved = (saved_mean.contiguous(), saved_invstd.contiguous())
    dx, *vectors = passes.differentiate(backend, grad_output, x, w, *saved, training, output_mask, spec)
    dtype, nothing = statistics_type(x.dtype) if weight is None else weight.dtype, x.new_empty(0)
    grads = (None if dx is None else passes.like(dx, input), *(it if it is None else it.to(dtype) for it in vectors))
    return tuple(nothing if grad is None else grad for grad in grads)


def _backward_fake(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    saved_mean: Tensor,
    saved_invstd: Tensor,
    training: bool,
    output_mask: list[bool],
    *group: Any,
) -> tuple[Tensor, ...]:
    operands.check_backward(grad_output, input, weight, saved_mean, saved_invstd, output_mask, GroupSpec(*group))
    dtype = statistics_type(input.dtype) if weight is None else weight.dtype
    vectors = (input.new_empty(input.shape[1], dtype=dtype) if it else input.new_empty(0) for it in output_mask[1:])
    return (torch.empty_like(input) if output_mask[0] else input.new_empty(0), *vectors)


_KERNELS: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = (
    (_forward, _forward_fake),
    (_backward, _backward_fake),
    (derivatives.double_backward, derivatives.double_backward_fake),
)
for _operator, (_kernel, _fake) in zip(schema.TORCH_OPERATORS, _KERNELS, strict=True):
    library.impl(_operator.name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bnexport::{_operator.name}", _fake, lib=library)

# Kernels of the Autograd key instead of torch.library.register_autograd, whose bookkeeping costs as much as a small
# layer (70 of 140 microseconds).
library.impl("sync_batch_norm", autograd.forward, "Autograd")
library.impl("sync_batch_norm_backward", autograd.backward, "Autograd")
library.impl("sync_batch_norm_double_backward", autograd.double_backward, "Autograd")
library.impl("sync_batch_norm", derivatives.batched_forward, "FuncTorchBatched")
library.impl("sync_batch_norm_backward", derivatives.backward, "FuncTorchBatched")


def run(arguments: tuple[Any, ...], group: GroupSpec, update: bool) -> tuple[Any, ...]:
    """Compute the output, the new running statistics and the mean, without the dispatcher where nothing looks at operators.

    arguments: those of `sync_batch_norm` before the group's. update: the new statistics are wanted; they may be the old
    tensors, changed in place.
    """
    input, running_mean, running_var, weight, bias, training, momentum, eps = arguments
    kernels = autograd.direct_kernels(input, arguments[1:5])
    if (
        kernels is None
        or group.stats_mode not in schema.STATS_MODES
        or group.grad_reduction not in schema.GRAD_REDUCTIONS
        or (update and not _are_changeable(running_mean, running_var))
        or (not training and (running_mean is None or running_var is None))
    ):
        return sync_batch_norm(*arguments, *group)[:4]
    if training and not update:
        running_mean = running_var = None
    vectors = (running_mean, running_var, weight, bias)
    outputs = passes.normalise(kernels, input, vectors, training, momentum, eps, group, in_place=True)
    if update:
        torch_versions.increment_version((running_mean, running_var))
    return autograd.record(outputs, arguments, group)[:4]


def _are_changeable(mean: Tensor | None, var: Tensor | None) -> bool:
    """Whether a kernel may write new statistics where the old ones lie."""
    return (
        mean is not None
        and var is not None
        and not (mean.requires_grad or var.requires_grad or mean.is_inference() or var.is_inference())
    )
