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

from bnexport import schema, torch_versions
from bnexport.schema import GroupSpec
from bnexport.sync_bn import autograd, compiled, operators, prepared
from bnexport.sync_bn.prepared import InputSizes

Tensor = torch.Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


def _observed() -> bool:
    """Whether anything but a compiler, which the module asks for, traces or transforms what is computed now."""
    return (
        torch_versions.is_tracing()
        or torch_versions.dispatch_modes() != 0
        or torch_versions.function_modes() != 0
        or torch_versions.transform_level() is not None
        or torch_versions.has_tangents()
    )


def _plain(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor lie in memory as they are, on a CPU. A transform's wrapper has the type Tensor,
    even after the transform; so has a view that negates what it reads.
    """
    return type(tensor) in _PLAIN and tensor.is_cpu and not tensor.is_neg() and not torch_versions.is_wrapped(tensor)


def _fit(grad_output: Tensor, input: Tensor, weight: Tensor | None, sizes: InputSizes) -> bool:
    """Whether tensors have the sizes of the forward: since then `tensor.data = ...` may have changed them unseen."""
    return (
        input.stride() == sizes.stride
        and grad_output.shape == input.shape == sizes.shape
        and grad_output.dtype == input.dtype == sizes.dtype
        and (weight is None or weight.shape == sizes.channels)
    )


class _Normalised(torch.autograd.Function):
    """Put an output that is made already into autograd's graph.

    Reduced to arguments with a gradient: each further one, output or mark costs a microsecond. made: the output, the
    saved statistics, training, the group, the input's sizes.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, made: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(input, weight)
        # Neither input nor output, so that an attribute may hold the statistics.
        output, *ctx.rest = made
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        statistics, training, group, sizes = ctx.rest
        mask = ctx.needs_input_grad
        direct = not (torch.is_grad_enabled() or torch.compiler.is_compiling() or _observed())
        direct = direct and _plain(grad_output) and _plain(input)
        # The operator, too, where a graph of the backward is wanted, and where its checks have something to say.
        if not direct or not (weight is None or _plain(weight)) or not _fit(grad_output, input, weight, sizes):
            grads = operators.sync_batch_norm_backward(
                grad_output, input, weight, *statistics.view(2, -1).unbind(), training, list(mask[:3]), *group
            )
            return (*(grad if needed else None for grad, needed in zip(grads, mask, strict=False)), None)
        dy = grad_output if grad_output.stride() == sizes.stride else torch.empty_like(input).copy_(grad_output)
        # Autograd itself gives gradients the type of what they belong to.
        w = compiled.vector(weight, sizes.statistics)
        return *prepared.backward(sizes, dy, input, w, statistics, training, group[2], mask), None


# Autograd's own function; the class method in front of it looks for transforms and their wrappers.
_record = super(torch.autograd.Function, _Normalised).apply


def _changeable(statistic: Tensor | None, sizes: InputSizes) -> bool:
    """Whether the kernel may write new running statistics where they lie."""
    return (
        statistic is not None
        and statistic.dtype == sizes.statistics
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
    _, group_size, stats_mode, grad_reduction, _ = group
    if (
        group_size != 1
        or stats_mode not in schema.STATS_MODES
        or grad_reduction not in schema.GRAD_REDUCTIONS
        or not (training or (running_mean is not None and running_var is not None))
        or not _plain(input)
        or _observed()
    ):
        return None
    sizes = prepared.sizes_of(input)
    if sizes is None or (training and sizes.single):
        return None
    readable = True
    for vector in (running_mean, running_var, weight, bias):
        if vector is None:
            continue
        dtype = vector.dtype
        if not _plain(vector) or vector.shape != sizes.channels or dtype not in (torch.float32, input.dtype):
            return None
        readable = readable and dtype == sizes.statistics and vector.is_contiguous()
    if update and not (_changeable(running_mean, sizes) and _changeable(running_var, sizes)):
        return None
    vectors = arguments[1:5]
    if not readable:
        vectors = tuple(compiled.vector(vector, sizes.statistics) for vector in vectors)
    output, statistics = prepared.forward(sizes, input, vectors, training, momentum, eps, stats_mode, update)
    if update:
        torch_versions.increment_version((running_mean, running_var))
    if autograd.need_gradient(input, weight, bias):
        output = _record(input, weight, bias, (output, statistics, training, group, sizes))
    return output
