"""Sync batch norm without the dispatcher, where nothing needs it.

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
from bnexport.sync_bn import autograd, operators

Tensor = torch.Tensor

_PLAIN = (Tensor, torch.nn.Parameter)
_level_of_transforms = torch._C._functorch.maybe_current_level


def _unobserved(*tensors: Tensor | None) -> bool:
    """Whether a call on these tensors can only mean to compute, now."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and _level_of_transforms() is None
        and all(tensor is None or (type(tensor) in _PLAIN and tensor.is_cpu) for tensor in tensors)
    )


class _Call:
    """The arguments of a forward that carry no gradient, and its outputs but the first."""

    __slots__ = ("arguments", "outputs")

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments = arguments
        self.outputs: tuple[Tensor, ...] = ()


class _Forward(torch.autograd.Function):
    """The operator's autograd function (autograd.py) with what has a gradient and nothing else: each further
    argument, output or mark costs a microsecond."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, call: _Call) -> Tensor:
        running_mean, running_var, *others = call.arguments
        outputs = operators.forward_kernel(input, running_mean, running_var, weight, bias, *others)
        call.outputs = outputs[1:]
        ctx.save_for_backward(input, weight, outputs[3], outputs[4])
        ctx.arguments = others
        return outputs[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, invstd = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:3])
        training, _, _, *group = ctx.arguments
        # The operator where a graph of the backward is wanted, too.
        observed = torch.is_grad_enabled() or not _unobserved(grad_output, input, weight, mean, invstd)
        backward = operators.sync_batch_norm_backward if observed else operators.backward_kernel
        by_input, by_weight, by_bias = backward(grad_output, input, weight, mean, invstd, training, mask, *group)
        return (
            by_input if mask[0] else None,
            by_weight if mask[1] else None,
            by_bias if mask[2] else None,
            None,
        )


def sync_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    group: GroupSpec,
) -> Any:
    """Output and new running statistics, the first three outputs of `operators.sync_batch_norm`, by the shortest way."""
    others = (training, momentum, eps, *group)
    if group.group_size != 1 or not _unobserved(input, running_mean, running_var, weight, bias):
        return operators.sync_batch_norm(input, running_mean, running_var, weight, bias, *others)[:3]
    if not autograd.need_gradient(input, weight, bias):
        return operators.forward_kernel(input, running_mean, running_var, weight, bias, *others)[:3]
    call = _Call((running_mean, running_var, *others))
    output = _Forward.apply(input, weight, bias, call)
    return output, call.outputs[0], call.outputs[1]
