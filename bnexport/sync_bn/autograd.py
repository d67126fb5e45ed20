"""Autograd of sync batch norm: one node for the module and the operators.

A call of an operator goes through the dispatcher twice, for autograd and for the kernel, and each time its thirteen
arguments become Python objects: as long as a layer of a small image takes. Where nothing looks at operators, the module
and the node compute on the tensors themselves. Whatever looks (export, compilers, tracers, modes, torch.func, tensor
subclasses) and the derivative of a derivative take the operators.
"""

from __future__ import annotations

from typing import Any

import torch

from bnexport import torch_versions
from bnexport.schema import GroupSpec
from bnexport.sync_bn import derivatives, passes
from bnexport.sync_bn.kernels import Kernels, is_plain, kernels_for

Tensor = torch.Tensor


def _is_observed() -> bool:
    """Whether anything traces or transforms what is computed now."""
    return (
        torch.compiler.is_compiling()
        or torch_versions.is_tracing()
        or torch_versions.dispatch_modes() != 0
        or torch_versions.function_modes() != 0
        or torch_versions.transform_level() is not None
        or torch_versions.has_tangents()
    )


def direct_kernels(input: Tensor, vectors: tuple[Tensor | None, ...]) -> Kernels | None:
    """Return the kernels that may run without the dispatcher: nothing looks at operators, and they read the tensors as
    they are.
    """
    if _is_observed() or not is_plain(input):
        return None
    kernels = kernels_for(input)
    return kernels if kernels is not None and kernels.read(vectors) else None


class _Forward(torch.autograd.Function):
    """Put an output that is made already into autograd's graph.

    Reduced to arguments with a gradient: each further one, output or mark costs a microsecond. made: the output, saved
    mean and invstd, training, the group.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, made: tuple[Any, ...]) -> Tensor:
        output, mean, invstd, ctx.training, ctx.group = made
        ctx.save_for_backward(input, weight, mean, invstd)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, invstd = ctx.saved_tensors
        tensors, mask = (grad_output, input, weight, mean, invstd), ctx.needs_input_grad[:3]
        kernels = None if torch.is_grad_enabled() else direct_kernels(input, (weight,))
        # The operator, too, where its checks have something to say: `tensor.data = ...` changes sizes unseen.
        if kernels is not None and kernels.fit(grad_output, input, mean):
            # Autograd itself gives gradients the type of what they belong to.
            return (*passes.differentiate(kernels, *tensors, ctx.training, mask, ctx.group), None)
        grads = torch.ops.bnexport.sync_batch_norm_backward.default(*tensors, ctx.training, mask, *ctx.group)
        return (*(grad if needed else None for grad, needed in zip(grads, mask, strict=True)), None)


class _Backward(torch.autograd.Function):
    """The same for gradients. made: the gradients, saved mean and invstd, training, the mask, the group."""

    @staticmethod
    def forward(ctx: Any, grad_output: Tensor, input: Tensor, weight: Tensor | None, made: tuple[Any, ...]) -> Any:
        grads, mean, invstd, *ctx.rest = made
        ctx.save_for_backward(grad_output, input, weight, mean, invstd)
        ctx.set_materialize_grads(False)
        return grads

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        training, mask, group = ctx.rest
        grads = tuple(grad if needed else None for grad, needed in zip(grads, mask, strict=True))
        if group.group_size == 1 and all(grad is None for grad in grads):
            return (None,) * 4
        by_dy, by_x, by_weight = torch.ops.bnexport.sync_batch_norm_double_backward.default(
            *grads, *ctx.saved_tensors, training, *group
        )
        return (by_dy, by_x, by_weight if ctx.needs_input_grad[2] else None, None)


# Autograd's own functions; the class methods in front of them look for transforms and their wrappers.
_record_forward = super(torch.autograd.Function, _Forward).apply
_record_backward = super(torch.autograd.Function, _Backward).apply


def _need_gradient(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def record(outputs: Any, arguments: tuple[Any, ...], group: GroupSpec) -> tuple[Tensor, ...]:
    """Put the first output of a forward into autograd's graph if it needs a gradient."""
    y, new_mean, new_var, mean, invstd = outputs
    input, weight, bias, training = arguments[0], *arguments[3:6]
    if _need_gradient(input, weight, bias):
        y = _record_forward(input, weight, bias, (y, mean, invstd, training, group))
    return y, new_mean, new_var, mean, invstd


def forward(*arguments: Any) -> Any:
    """Compute the operator `sync_batch_norm` for the dispatcher's autograd."""
    if derivatives.differentiate(arguments[0], arguments[3], arguments[4]):
        return derivatives.forward(*arguments)
    with torch_versions.below_autograd():
        outputs = torch.ops.bnexport.sync_batch_norm.default(*arguments)
    return record(outputs, arguments, GroupSpec(*arguments[8:]))


def backward(*arguments: Any) -> Any:
    """Compute the operator `sync_batch_norm_backward` for the dispatcher's autograd."""
    if derivatives.differentiate(*arguments[:3]):
        return derivatives.backward(*arguments)
    with torch_versions.below_autograd():
        grads = torch.ops.bnexport.sync_batch_norm_backward.default(*arguments)
    if not _need_gradient(*arguments[:3]):
        return grads
    made = (tuple(grads), *arguments[3:7], GroupSpec(*arguments[7:]))
    return _record_backward(*arguments[:3], made)


def double_backward(*arguments: Any) -> Any:
    """Compute the operator `sync_batch_norm_double_backward` for the dispatcher's autograd."""
    tensors = arguments[:6]
    if not (_need_gradient(*tensors) or derivatives.differentiate(*tensors)):
        with torch_versions.below_autograd():
            return torch.ops.bnexport.sync_batch_norm_double_backward.default(*arguments)
    return derivatives.double_backward(*arguments, create_graph=True)
