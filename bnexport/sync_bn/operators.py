"""Sync batch norm as pure torch.library operators: fake kernels, autograd, double backward.

    bnexport::sync_batch_norm           -> output, running_mean_out, running_var_out, saved_mean, saved_invstd
    bnexport::sync_batch_norm_backward  -> grad_input, grad_weight, grad_bias

They mutate nothing: an operator that mutates cannot be exported, so the module copies the new
statistics into its buffers. Collectives stay inside, opaque to compilers and exporters. Absent
running statistics and gradients that are not needed come out as empty tensors. saved_mean and
saved_invstd are float64 whatever the data's type, so that x_hat survives |mean| >> std.
"""

from __future__ import annotations

from typing import Any

import torch

from bnexport import schema
from bnexport.errors import UsageError
from bnexport.sync_bn import compiled, distributed, moments, torch_operations

Tensor = torch.Tensor

_library = torch.library.Library("bnexport", "DEF")

_GROUP_ARGUMENTS = "str group, int group_size, str stats_mode, str grad_reduction, int layer"
_library.define(
    "sync_batch_norm(Tensor input, Tensor? running_mean, Tensor? running_var, Tensor? weight, Tensor? bias, "
    f"bool training, float momentum, float eps, {_GROUP_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "sync_batch_norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor saved_mean, Tensor saved_invstd, "
    f"bool training, bool[3] output_mask, {_GROUP_ARGUMENTS}) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "sync_batch_norm_double_backward(Tensor? grad_grad_input, Tensor? grad_grad_weight, Tensor? grad_grad_bias, "
    "Tensor grad_output, Tensor input, Tensor? weight, Tensor saved_mean, Tensor saved_invstd, "
    f"bool training, {_GROUP_ARGUMENTS}) -> (Tensor, Tensor, Tensor)"
)

sync_batch_norm = torch.ops.bnexport.sync_batch_norm
sync_batch_norm_backward = torch.ops.bnexport.sync_batch_norm_backward
sync_batch_norm_double_backward = torch.ops.bnexport.sync_batch_norm_double_backward

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check(
    input: Tensor, vectors: dict[str, Tensor | None], training: bool, stats_mode: str, grad_reduction: str
) -> None:
    if input.dim() < 2:
        raise UsageError(f"input: got rank {input.dim()}, expected rank >= 2 (N, C, *)")
    if input.dtype not in _FLOATING:
        raise UsageError(f"input: got {input.dtype}, expected one of float16, bfloat16, float32, float64")
    C = input.shape[1]
    for name, vector in vectors.items():
        if vector is not None and (vector.dim() != 1 or vector.shape[0] != C):
            raise UsageError(
                f"{name}: got shape {tuple(vector.shape)}, expected ({C},) for an input of shape {tuple(input.shape)}"
            )
        if vector is not None and vector.dtype == torch.float64 and input.dtype != torch.float64:
            raise UsageError(
                f"{name}: got float64 beside an input of {input.dtype}, expected float32 or the input's type"
            )
    if not training and (vectors["running_mean"] is None or vectors["running_var"] is None):
        raise UsageError(
            "running_mean and running_var: got None, expected (C,) tensors, which inference normalises with"
        )
    for name, value, allowed in (
        ("stats_mode", stats_mode, schema.STATS_MODES),
        ("grad_reduction", grad_reduction, schema.GRAD_REDUCTIONS),
    ):
        if value not in allowed:
            raise UsageError(f"{name}: got {value!r}, expected one of {', '.join(allowed)}")


def _like(result: Tensor, x: Tensor) -> Tensor:
    """`result` in the memory format that fake kernels promise, that of empty_like(x)."""
    promised = torch.empty_like(x)
    return result if result.stride() == promised.stride() else promised.copy_(result)


def _header(x: Tensor, stats_mode: str, grad_reduction: str) -> dict[str, Any]:
    dtype = str(x.dtype).removeprefix("torch.")
    return {"C": x.shape[1], "dtype": dtype, "stats_mode": stats_mode, "grad_reduction": grad_reduction}


def _forward(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    group: str,
    group_size: int,
    stats_mode: str,
    grad_reduction: str,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    vectors = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    _check(input, vectors, training, stats_mode, grad_reduction)
    backend = _backend(input)
    x = backend.arrange(input)
    count = x.shape[0] * moments.spatial_size(x)
    rows = None
    if training and group_size > 1:
        row = backend.forward_row(x, stats_mode)
        rows = distributed.exchange(row, group, group_size, layer, "forward", _header(x, stats_mode, grad_reduction))
        if stats_mode == "exact" and x.device.type == "cpu":
            _require_two_values(int(rows[:, 0].sum()), input)
    elif training:
        _require_two_values(count, input)
    y, new_mean, new_var, mean, invstd = backend.forward(
        x, running_mean, running_var, weight, bias, training, momentum, eps, stats_mode, rows
    )
    new_mean, new_var = (_or_empty(vector, x) for vector in (new_mean, new_var))
    return _like(y, input), new_mean, new_var, mean, invstd


def _backend(x: Tensor) -> Any:
    return compiled if compiled.usable(x) else torch_operations


def _or_empty(result: Tensor | None, x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=moments.statistics_type(x.dtype)) if result is None else result


def _require_two_values(total: int, input: Tensor) -> None:
    if total == 1:
        raise UsageError(f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)}")


def _forward_fake(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    group: str,
    group_size: int,
    stats_mode: str,
    grad_reduction: str,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    vectors = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    _check(input, vectors, training, stats_mode, grad_reduction)
    C, S = input.shape[1], moments.statistics_type(input.dtype)
    return (
        torch.empty_like(input),
        input.new_empty(0 if running_mean is None else C, dtype=S),
        input.new_empty(0 if running_var is None else C, dtype=S),
        input.new_empty(C, dtype=torch.float64),
        input.new_empty(C, dtype=torch.float64),
    )


def _backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    saved_mean: Tensor,
    saved_invstd: Tensor,
    training: bool,
    output_mask: list[bool],
    group: str,
    group_size: int,
    stats_mode: str,
    grad_reduction: str,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor]:
    backend = _backend(input)
    x = backend.arrange(input)
    dy = torch.empty_like(x).copy_(grad_output) if grad_output.stride() != x.stride() else grad_output
    need_input, need_weight, need_bias = output_mask
    row = rows = None
    if group_size > 1 and ((need_input and training) or need_weight or need_bias):
        row = backend.backward_row(dy, x, saved_mean, saved_invstd, stats_mode)
        if (need_input and training) or grad_reduction != "local":
            rows = distributed.exchange(
                row, group, group_size, layer, "backward", _header(x, stats_mode, grad_reduction)
            )
    grad_input, grad_weight, grad_bias = backend.backward(
        dy, x, weight, saved_mean, saved_invstd, training, output_mask, stats_mode, grad_reduction, row, rows
    )
    dtype = moments.statistics_type(x.dtype) if weight is None else weight.dtype
    return (
        x.new_empty(0) if grad_input is None else _like(grad_input, input),
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
    group: str,
    group_size: int,
    stats_mode: str,
    grad_reduction: str,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor]:
    C = input.shape[1]
    dtype = moments.statistics_type(input.dtype) if weight is None else weight.dtype
    need_input, need_weight, need_bias = output_mask
    return (
        torch.empty_like(input) if need_input else input.new_empty(0),
        input.new_empty(C, dtype=dtype) if need_weight else input.new_empty(0),
        input.new_empty(C, dtype=dtype) if need_bias else input.new_empty(0),
    )


def _double_backward(
    grad_grad_input: Tensor | None,
    grad_grad_weight: Tensor | None,
    grad_grad_bias: Tensor | None,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    saved_mean: Tensor,
    saved_invstd: Tensor,
    training: bool,
    group: str,
    group_size: int,
    stats_mode: str,
    grad_reduction: str,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of L = sum(v * dx) + sum(p * dweight + q * dbias) by dy, x and weight.

    With a = sum lambda v, b = sum lambda v x_hat over the group, and T = sum v dy - a A - b B,
    so that sum(v * dx) = weight * invstd * T (s = invstd, w = weight):

        by dy:      w s (v - a - b x_hat)                           + p x_hat + q
        by x:       -w s^2 (lambda x_hat T + lambda B (v - a - b x_hat) + b (dy - lambda (A + B x_hat)))
                                                                    + s (u - lambda (sum u + x_hat sum u x_hat)),  u = p dy
        by weight:  s sum over this process of dy (v - a - b x_hat)

    They follow from d invstd / dx = -lambda s^2 x_hat and
    d x_hat_j / dx_i = s (delta_ij - lambda_i - lambda_i x_hat_i x_hat_j).
    """
    x, dy = input.double(), grad_output.double()
    wide = moments.wide
    axes = [0, *range(2, x.dim())]
    C = x.shape[1]
    mean, s = saved_mean, saved_invstd
    w = torch.ones_like(mean) if weight is None else weight.double()
    zero = torch.zeros_like(mean)
    x_hat = (x - wide(mean, x)) * wide(s, x)
    v = torch.zeros_like(x) if grad_grad_input is None else grad_grad_input.double()
    p = zero if grad_grad_weight is None else grad_grad_weight.double()
    q = zero if grad_grad_bias is None else grad_grad_bias.double()
    header = _header(input, stats_mode, grad_reduction)

    def group_sum(*vectors: Tensor) -> list[Tensor]:
        row = torch.cat(
            [torch.tensor([moments.row_weight(x, stats_mode)], dtype=torch.float64, device=x.device), *vectors]
        )
        if group_size == 1:
            return [row[0:1], *vectors]
        rows = distributed.exchange(row, group, group_size, layer, f"double backward of {len(vectors)}", header)
        total = rows[:, 1:].sum(0)
        return [rows[:, 0], *total.split(C)]

    def local(value: Tensor) -> Tensor:
        return value.sum(axes)

    if not training:
        if grad_reduction != "local":
            _, p, q = group_sum(p, q)
            p, q = (p / group_size, q / group_size) if grad_reduction == "mean" else (p, q)
        by_dy = v * wide(w * s, x) + x_hat * wide(p, x) + wide(q, x)
        by_x = dy * wide(p * s, x)
        return (
            by_dy.to(grad_output.dtype),
            by_x.to(input.dtype),
            (local(v * dy) * s).to(w.dtype if weight is None else weight.dtype),
        )

    if grad_reduction != "local":
        _, p, q = group_sum(p, q)
        p, q = (p / group_size, q / group_size) if grad_reduction == "mean" else (p, q)
    weights = (
        group_sum(zero)[0] if group_size > 1 else torch.tensor([moments.row_weight(x, stats_mode)], dtype=torch.float64)
    )
    lam, k = moments.local_lambda(weights, x, stats_mode)
    if float(k) != 1.0:
        raise NotImplementedError(
            "double backward with stats_mode 'default' and empty processes: use stats_mode 'exact'"
        )
    u = dy * wide(p, x)
    _, a, b, A, B, v_dy, sum_u, sum_u_x_hat = group_sum(
        lam * local(v), lam * local(v * x_hat), local(dy), local(dy * x_hat), local(v * dy), local(u), local(u * x_hat)
    )
    T = v_dy - a * A - b * B
    projected = v - wide(a, x) - x_hat * wide(b, x)
    by_dy = projected * wide(w * s, x) + x_hat * wide(p, x) + wide(q, x)
    by_x = (
        x_hat * wide(lam * T, x)
        + projected * wide(lam * B, x)
        + (dy - lam * (wide(A, x) + x_hat * wide(B, x))) * wide(b, x)
    ) * wide(-w * s * s, x) + (u - lam * (wide(sum_u, x) + x_hat * wide(sum_u_x_hat, x))) * wide(s, x)
    by_weight = local(dy * projected) * s
    return by_dy.to(grad_output.dtype), by_x.to(input.dtype), by_weight.to(w.dtype if weight is None else weight.dtype)


def _double_backward_fake(
    grad_grad_input: Tensor | None,
    grad_grad_weight: Tensor | None,
    grad_grad_bias: Tensor | None,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if weight is None else weight.dtype
    return (
        torch.empty(grad_output.shape, dtype=grad_output.dtype, device=grad_output.device),
        torch.empty(input.shape, dtype=input.dtype, device=input.device),
        input.new_empty(input.shape[1], dtype=dtype),
    )


_GROUP_SLICE = slice(8, 13)


def _forward_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, _, _, weight, _, training = inputs[:6]
    ctx.save_for_backward(input, weight, output[3], output[4])
    ctx.training = training
    ctx.group_arguments = inputs[_GROUP_SLICE]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _forward_autograd(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Any, ...]:
    input, weight, mean, invstd = ctx.saved_tensors
    needs = ctx.needs_input_grad
    mask = [needs[0], needs[3], needs[4]]
    if grad_output is None or not any(mask):
        return (None,) * 13
    grads = sync_batch_norm_backward(grad_output, input, weight, mean, invstd, ctx.training, mask, *ctx.group_arguments)
    grad_input, grad_weight, grad_bias = (grad if needed else None for grad, needed in zip(grads, mask))
    return (grad_input, None, None, grad_weight, grad_bias, *(None,) * 8)


def _backward_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad_output, input, weight, mean, invstd, training, mask = inputs[:7]
    ctx.save_for_backward(grad_output, input, weight, mean, invstd)
    ctx.training = training
    ctx.mask = mask
    ctx.group_arguments = inputs[7:12]
    ctx.set_materialize_grads(False)


def _backward_autograd(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    grad_output, input, weight, mean, invstd = ctx.saved_tensors
    grads = tuple(grad if needed else None for grad, needed in zip(grads, ctx.mask))
    if all(grad is None for grad in grads) and ctx.group_arguments[1] == 1:
        return (None,) * 12
    by_dy, by_x, by_weight = sync_batch_norm_double_backward(
        *grads, grad_output, input, weight, mean, invstd, ctx.training, *ctx.group_arguments
    )
    return (by_dy, by_x, None if weight is None else by_weight, *(None,) * 9)


for _name, _kernel, _fake in (
    ("sync_batch_norm", _forward, _forward_fake),
    ("sync_batch_norm_backward", _backward, _backward_fake),
    ("sync_batch_norm_double_backward", _double_backward, _double_backward_fake),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bnexport::{_name}", _fake, lib=_library)

torch.library.register_autograd(
    "bnexport::sync_batch_norm", _forward_autograd, setup_context=_forward_context, lib=_library
)
torch.library.register_autograd(
    "bnexport::sync_batch_norm_backward", _backward_autograd, setup_context=_backward_context, lib=_library
)
