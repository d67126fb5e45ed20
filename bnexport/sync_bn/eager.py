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
    """Arguments of a forward that carry no gradient, and its outputs except the first."""

    __slots__ = ("arguments", "group", "outputs")

    def __init__(self, arguments: tuple[Any, ...], group: GroupSpec) -> None:
        self.arguments, self.group = arguments, group
        self.outputs: list[Tensor | None] = []


class _EagerForward(torch.autograd.Function):
    """The operator's autograd function (autograd.py), reduced to arguments with a gradient: each further argument,
    output or mark costs a microsecond.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, call: _Call) -> Tensor:
        running_mean, running_var, training, momentum, eps = call.arguments
        output, *call.outputs, mean, invstd = compiled.forward(
            input, running_mean, running_var, weight, bias, training, momentum, eps, call.group.stats_mode, None
        )
        ctx.save_for_backward(input, weight, mean, invstd)
        ctx.training, ctx.group = training, call.group
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, invstd = saved = ctx.saved_tensors
        mask = ctx.needs_input_grad[:3]
        training, group = ctx.training, ctx.group
        # The operator where a graph of the backward is wanted, too.
        if torch.is_grad_enabled() or not _unobserved(grad_output, *saved):
            grads = operators.sync_batch_norm_backward(
                grad_output, input, weight, mean, invstd, training, list(mask), *group
            )
            return (*(grad if needed else None for grad, needed in zip(grads, mask, strict=True)), None)
        dy = grad_output if grad_output.stride() == input.stride() else torch.empty_like(input).copy_(grad_output)
        # Autograd itself gives gradients the type of what they belong to.
        return *compiled.backward(
            dy, input, weight, mean, invstd, training, mask, group.stats_mode, group.grad_reduction, None, None
        ), None


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
    """Compute output and new running statistics on the shortest path; statistics that are not kept are None.

    Arguments and errors as of `operators.sync_batch_norm`.
    """
    if (
        group.group_size != 1
        or not _unobserved(input, running_mean, running_var, weight, bias)
        or not operators.regular(input, running_mean, running_var, weight, bias, training, group)
        or not compiled.takes(input)
        or (training and input.numel() == input.shape[1])  # one value per channel
    ):
        return operators.sync_batch_norm(
            input, running_mean, running_var, weight, bias, training, momentum, eps, *group
        )[:3]
    call = _Call((running_mean, running_var, training, momentum, eps), group)
    if autograd.need_gradient(input, weight, bias):
        output = _EagerForward.apply(input, weight, bias, call)
        return output, *call.outputs
    return compiled.forward(
        input, running_mean, running_var, weight, bias, training, momentum, eps, group.stats_mode, None
    )[:3]
