"""Autograd of the torch operators.

Registered as kernels of the Autograd dispatch key instead of torch.library.register_autograd, whose
bookkeeping costs as much as a small layer (70 of 140 microseconds).
"""

from __future__ import annotations

from typing import Any

import torch

from bnexport import schema, torch_versions
from bnexport.sync_bn import transforms

Tensor = torch.Tensor

_FORWARD_ARGUMENTS = len(schema.TORCH_SYNC_BATCH_NORM.arguments)
_BACKWARD_ARGUMENTS = len(schema.TORCH_SYNC_BATCH_NORM_BACKWARD.arguments)


def _below(name: str, *arguments: Any) -> Any:
    """Return the operator `name` without autograd."""
    with torch_versions.below_autograd():
        return getattr(torch.ops.bnexport, name).default(*arguments)


def need_gradient(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = _below("sync_batch_norm", *arguments)
        input, _, _, weight, _, training = arguments[:6]
        ctx.save_for_backward(input, weight, outputs[3], outputs[4])
        ctx.training = training
        ctx.group_arguments = arguments[8:]
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        input, weight, mean, invstd = ctx.saved_tensors
        needs = ctx.needs_input_grad
        mask = [needs[0], needs[3], needs[4]]
        if grad_output is None or not any(mask):
            return (None,) * _FORWARD_ARGUMENTS
        grads = torch.ops.bnexport.sync_batch_norm_backward.default(
            grad_output, input, weight, mean, invstd, ctx.training, mask, *ctx.group_arguments
        )
        grad_input, grad_weight, grad_bias = (grad if needed else None for grad, needed in zip(grads, mask))
        return (grad_input, None, None, grad_weight, grad_bias, *(None,) * (_FORWARD_ARGUMENTS - 5))


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = _below("sync_batch_norm_backward", *arguments)
        grad_output, input, weight, mean, invstd, training, mask = arguments[:7]
        ctx.save_for_backward(grad_output, input, weight, mean, invstd)
        ctx.training = training
        ctx.mask = mask
        ctx.group_arguments = arguments[7:]
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_output, input, weight, mean, invstd = ctx.saved_tensors
        grads = tuple(grad if needed else None for grad, needed in zip(grads, ctx.mask))
        alone = schema.GroupSpec(*ctx.group_arguments).group_size == 1
        if alone and all(grad is None for grad in grads):
            return (None,) * _BACKWARD_ARGUMENTS
        by_dy, by_x, by_weight = torch.ops.bnexport.sync_batch_norm_double_backward.default(
            *grads, grad_output, input, weight, mean, invstd, ctx.training, *ctx.group_arguments
        )
        return (by_dy, by_x, None if weight is None else by_weight, *(None,) * (_BACKWARD_ARGUMENTS - 3))


def _forward(*arguments: Any) -> Any:
    if transforms.differentiate(arguments[0], arguments[3], arguments[4]):
        return transforms.forward(*arguments)
    if need_gradient(arguments[0], arguments[3], arguments[4]):
        return _Forward.apply(*arguments)
    return _below("sync_batch_norm", *arguments)


def _backward(*arguments: Any) -> Any:
    if transforms.differentiate(*arguments[:3]):
        return transforms.backward(*arguments)
    if need_gradient(*arguments[:3]):
        return _Backward.apply(*arguments)
    return _below("sync_batch_norm_backward", *arguments)


def register(library: torch.library.Library) -> None:
    library.impl("sync_batch_norm", _forward, "Autograd")
    library.impl("sync_batch_norm_backward", _backward, "Autograd")
    library.impl("sync_batch_norm", transforms.batched_forward, "FuncTorchBatched")
    library.impl("sync_batch_norm_backward", transforms.backward, "FuncTorchBatched")
