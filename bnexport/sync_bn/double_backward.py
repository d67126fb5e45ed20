"""Second derivative of sync batch norm, for gradient penalties and gradgradcheck.

Gradients of L = sum(v * dx) + sum(p * dweight + q * dbias) by dy, x and weight.

With a = sum lambda v, b = sum lambda v x_hat over the group, and T = sum v dy - a A - b B,
so that sum(v * dx) = weight * invstd * T (s = invstd, w = weight):

    by dy:      w s (v - a - b x_hat)                           + p x_hat + q
    by x:       -w s^2 (lambda x_hat T + lambda B (v - a - b x_hat) + b (dy - lambda (A + B x_hat)))
                                                                + s (u - lambda (sum u + x_hat sum u x_hat)),  u = p dy
    by weight:  s sum over this process of dy (v - a - b x_hat)

They follow from d invstd / dx = -lambda s^2 x_hat and
d x_hat_j / dx_i = s (delta_ij - lambda_i - lambda_i x_hat_i x_hat_j).
"""

from __future__ import annotations

from typing import Any

import torch

from bnexport.schema import GroupSpec
from bnexport.sync_bn import distributed, moments, operands

Tensor = torch.Tensor


def double_backward(
    grad_grad_input: Tensor | None,
    grad_grad_weight: Tensor | None,
    grad_grad_bias: Tensor | None,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    saved_mean: Tensor,
    saved_invstd: Tensor,
    training: bool,
    *group: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of L (see above) by grad_output, input and weight, in their types."""
    spec = GroupSpec(*group)
    grads = (grad_grad_input, grad_grad_weight, grad_grad_bias)
    operands.check_double_backward(grads, grad_output, input, weight, saved_mean, saved_invstd, spec)
    x, dy = input.double(), grad_output.double()
    wide = moments.wide
    axes = [0, *range(2, x.dim())]
    C = x.shape[1]
    mean, s = saved_mean, saved_invstd
    w = torch.ones_like(mean) if weight is None else weight.double()
    weight_type = w.dtype if weight is None else weight.dtype
    zero = torch.zeros_like(mean)
    x_hat = (x - wide(mean, x)) * wide(s, x)
    v = torch.zeros_like(x) if grad_grad_input is None else grad_grad_input.double()
    p = zero if grad_grad_weight is None else grad_grad_weight.double()
    q = zero if grad_grad_bias is None else grad_grad_bias.double()
    header = moments.header(input, spec.stats_mode, spec.grad_reduction)

    def group_sum(*vectors: Tensor) -> list[Tensor]:
        row = torch.cat(
            [torch.tensor([moments.row_weight(x, spec.stats_mode)], dtype=torch.float64, device=x.device), *vectors]
        )
        if spec.group_size == 1:
            return [row[0:1], *vectors]
        direction = f"double backward of {len(vectors)}"
        rows = distributed.exchange(row, spec.group, spec.group_size, spec.layer, direction, header)
        total = rows[:, 1:].sum(0)
        return [rows[:, 0], *total.split(C)]

    def local(value: Tensor) -> Tensor:
        return value.sum(axes)

    if spec.grad_reduction != "local":
        _, p, q = group_sum(p, q)
        p, q = (p / spec.group_size, q / spec.group_size) if spec.grad_reduction == "mean" else (p, q)
    if not training:
        by_dy = v * wide(w * s, x) + x_hat * wide(p, x) + wide(q, x)
        by_x = dy * wide(p * s, x)
        return (
            by_dy.to(grad_output.dtype),
            by_x.to(input.dtype),
            (local(v * dy) * s).to(weight_type),
        )

    weights = group_sum(zero)[0]
    lam, k = moments.local_lambda(weights, x, spec.stats_mode)
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
    return by_dy.to(grad_output.dtype), by_x.to(input.dtype), by_weight.to(weight_type)


def fake(
    grad_grad_input: Tensor | None,
    grad_grad_weight: Tensor | None,
    grad_grad_bias: Tensor | None,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    saved_mean: Tensor,
    saved_invstd: Tensor,
    training: bool,
    *group: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = (grad_grad_input, grad_grad_weight, grad_grad_bias)
    operands.check_double_backward(grads, grad_output, input, weight, saved_mean, saved_invstd, GroupSpec(*group))
    dtype = torch.float64 if weight is None else weight.dtype
    return (
        torch.empty(grad_output.shape, dtype=grad_output.dtype, device=grad_output.device),
        torch.empty(input.shape, dtype=input.dtype, device=input.device),
        input.new_empty(input.shape[1], dtype=dtype),
    )
