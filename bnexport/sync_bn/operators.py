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
from bnexport.sync_bn import derivatives, passes, torch_operations
from bnexport.sync_bn.kernels import PLAIN, Kernels, kernels_for
from bnexport.sync_bn.torch_operations import statistics_type

# Autograd of sync batch norm: one node for the module and the operators.
#
# A call of an operator goes through the dispatcher twice, for autograd and for the kernel, and each time its thirteen
# arguments become Python objects: as long as a layer of a small image takes. Where nothing looks at operators, the module
# and the node compute on the tensors themselves. Whatever looks (export, compilers, tracers, modes, torch.func, tensor
# subclasses) and the derivative of a derivative take the operators.

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


def direct_kernels(
    input: Tensor, vectors: tuple[Tensor | None, ...], *gradient: Tensor, kernels: Kernels | None = None
) -> Kernels | None:
    """Return the kernels that may run without the dispatcher: nothing looks at operators, and they read the tensors as
    they are. kernels: those of the input's forward.
    """
    if _is_observed() or type(input) not in PLAIN or input.layout is not torch.strided:
        return None
    kernels = kernels or kernels_for(input)
    return kernels if kernels is not None and kernels.read(input, vectors, *gradient) else None


class _Forward(torch.autograd.Function):
    """Put an output that is made already into autograd's graph.

    Reduced to arguments with a gradient: each further one, output or mark costs a microsecond. made: the output, saved
    mean and invstd, training, the group, the kernels if they ran without the dispatcher.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, made: tuple[Any, ...]) -> Tensor:
        output, mean, invstd, *ctx.rest = made
        ctx.save_for_backward(input, weight, mean, invstd)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, invstd = ctx.saved_tensors
        training, group, kernels = ctx.rest
        mask = ctx.needs_input_grad
        # The operator, too, where its checks have something to say: `tensor.data = ...` changes sizes unseen.
        kernels = (
            None if torch.is_grad_enabled() else direct_kernels(input, (weight,), grad_output, mean, kernels=kernels)
        )
        if kernels is not None:
            # Autograd itself gives gradients the type of what they belong to.
            dx, dweight, dbias = passes.differentiate(
                kernels, grad_output, input, weight, mean, invstd, training, mask, group
            )
            return dx, dweight, dbias, None
        tensors, mask = (grad_output, input, weight, mean, invstd), mask[:3]
        grads = torch.ops.bnexport.sync_batch_norm_backward.default(*tensors, training, mask, *group)
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
torch_versions.call_backward_directly(_Forward)


def _need_gradient(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def forward(*arguments: Any) -> Any:
    """Compute the operator `sync_batch_norm` for the dispatcher's autograd."""
    if derivatives.differentiate(arguments[0], arguments[3], arguments[4]):
        return derivatives.forward(*arguments)
    with torch_versions.below_autograd():
        y, *new, mean, invstd = torch.ops.bnexport.sync_batch_norm.default(*arguments)
    input, (weight, bias, training) = arguments[0], arguments[3:6]
    if _need_gradient(input, weight, bias):
        y = _record_forward(input, weight, bias, (y, mean, invstd, training, GroupSpec(*arguments[8:]), None))
    return y, *new, mean, invstd


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
    torch_operations.check_forward(input, vectors, training, momentum, eps, spec)
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
    torch_operations.check_forward(input, vectors, training, momentum, eps, GroupSpec(*group))
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
    torch_operations.check_backward(grad_output, input, weight, saved_mean, saved_invstd, output_mask, spec)
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
    torch_operations.check_backward(
        grad_output, input, weight, saved_mean, saved_invstd, output_mask, GroupSpec(*group)
    )
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
library.impl("sync_batch_norm", forward, "Autograd")
library.impl("sync_batch_norm_backward", backward, "Autograd")
library.impl("sync_batch_norm_double_backward", double_backward, "Autograd")
library.impl("sync_batch_norm", derivatives.batched_forward, "FuncTorchBatched")
library.impl("sync_batch_norm_backward", derivatives.backward, "FuncTorchBatched")


def run(arguments: tuple[Any, ...], group: GroupSpec, update: bool) -> tuple[Any, ...]:
    """Compute the output, the new running statistics and the mean, without the dispatcher where nothing looks at operators.

    arguments: those of `sync_batch_norm` before the group's. update: the new statistics are wanted; they may be the old
    tensors, changed in place.
    """
    input, running_mean, running_var, weight, bias, training, momentum, eps = arguments
    vectors = arguments[1:5]
    kernels = direct_kernels(input, vectors)
    if (
        kernels is None
        or group.stats_mode not in schema.STATS_MODES
        or group.grad_reduction not in schema.GRAD_REDUCTIONS
        or (update and not _are_changeable(running_mean, running_var))
        or (not training and (running_mean is None or running_var is None))
    ):
        return sync_batch_norm(*arguments, *group)[:4]
    if training and not update:
        vectors = (None, None, weight, bias)
    y, _, _, mean, invstd = passes.normalise(kernels, input, vectors, training, momentum, eps, group, in_place=True)
    if update:
        torch_versions.increment_version((running_mean, running_var))
    if _need_gradient(input, weight, bias):
        y = _record_forward(input, weight, bias, (y, mean, invstd, training, group, kernels))
    return y, running_mean, running_var, mean


def _are_changeable(mean: Tensor | None, var: Tensor | None) -> bool:
    """Whether a kernel may write new statistics where the old ones lie."""
    return (
        mean is not None
        and var is not None
        and not (mean.requires_grad or var.requires_grad or mean.is_inference() or var.is_inference())
    )
