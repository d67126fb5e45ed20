"""Sync batch norm without torch's dispatcher, if no transform or hook needs it.

A call of an operator goes through the dispatcher twice, for autograd and for the kernel, and each time its thirteen
arguments become Python objects: as long as a layer of a small image takes. In eager mode, on one process and on plain
tensors, the module calls the kernels themselves, inside one autograd function. Whatever looks at operators (export,
compilers, tracers, modes, functorch, tensor subclasses) and everything that needs a group or the derivative of the
derivative takes the operators.
"""

from __future__ import annotations

from typing import Any

import torch

from bnexport.schema import GroupSpec
from bnexport.sync_bn import autograd, compiled, operators
from bnexport.sync_bn.moments import statistics_type

Tensor = torch.Tensor

_PLAIN = (Tensor, torch.nn.Parameter)
_level_of_transforms = torch._C._functorch.maybe_current_level


def _unobserved(*tensors: Tensor | None) -> bool:
    """Whether a call on these tensors is a plain eager computation that nothing traces or transforms."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and _level_of_transforms() is None
        and all(tensor is None or (type(tensor) in _PLAIN and tensor.is_cpu) for tensor in tensors)
    )


class _Call:
    """Arguments of a forward that carry no gradient."""

    __slots__ = ("arguments", "group")

    def __init__(self, arguments: tuple[Any, ...], group: GroupSpec) -> None:
        self.arguments, self.group = arguments, group


def _forward(input: Tensor, weight: Tensor | None, bias: Tensor | None, call: _Call) -> tuple[Tensor, Tensor]:
    running_mean, running_var, training, momentum, eps, update = call.arguments
    return compiled.forward_in_place(
        input, running_mean, running_var, weight, bias, training, momentum, eps, call.group.stats_mode, update
    )


class _EagerForward(torch.autograd.Function):
    """The operator's autograd function (autograd.py), reduced to arguments with a gradient: each further argument,
    output or mark costs a microsecond.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, call: _Call) -> Tensor:
        output, statistics = _forward(input, weight, bias, call)
        ctx.save_for_backward(input, weight, statistics)
        ctx.training, ctx.group = call.arguments[2], call.group
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, statistics = saved = ctx.saved_tensors
        mask = ctx.needs_input_grad[:3]
        training, group = ctx.training, ctx.group
        # The operator where a graph of the backward is wanted, too.
        if torch.is_grad_enabled() or not _unobserved(grad_output, *saved):
            grads = operators.sync_batch_norm_backward(
                grad_output, input, weight, *statistics.unbind(), training, list(mask), *group
            )
            return (*(grad if needed else None for grad, needed in zip(grads, mask, strict=True)), None)
        dy = grad_output if grad_output.stride() == input.stride() else torch.empty_like(input).copy_(grad_output)
        # Autograd itself gives gradients the type of what they belong to.
        return *compiled.backward_alone(dy, input, weight, statistics, training, mask, group.stats_mode), None


def _changeable(statistic: Tensor | None, input: Tensor) -> bool:
    """Whether the kernel may write new running statistics where they lie."""
    return (
        statistic is not None
        and statistic.dtype == statistics_type(input.dtype)
        and statistic.is_contiguous()
        and not statistic.requires_grad
        and not statistic.is_inference()
    )


def sync_batch_norm(arguments: tuple[Any, ...], group: GroupSpec, update: bool) -> Tensor | None:
    """Compute the output on the shortest path, and `update` the running statistics in place.

    Returns None, and does nothing, where only the operator is right. arguments: those of `operators.sync_batch_norm`
    before the group's.
    """
    input, running_mean, running_var, weight, bias, training, momentum, eps = arguments
    if (
        group.group_size != 1
        or not _unobserved(input, running_mean, running_var, weight, bias)
        or not operators.regular(input, running_mean, running_var, weight, bias, training, group)
        or not compiled.takes(input)
        or (training and input.numel() == input.shape[1])  # one value per channel
        or (update and not (_changeable(running_mean, input) and _changeable(running_var, input)))
    ):
        return None
    call = _Call((running_mean, running_var, training, momentum, eps, update), group)
    if autograd.need_gradient(input, weight, bias):
        output: Tensor = _EagerForward.apply(input, weight, bias, call)
    else:
        output, _ = _forward(input, weight, bias, call)
    if update:
        torch.autograd.graph.increment_version((running_mean, running_var))
    return output
