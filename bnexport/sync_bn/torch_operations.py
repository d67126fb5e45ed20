"""Sync batch norm in torch operations, on any device: the fallback for the compiled kernels.

Same interface as compiled.py; the algebra stands in reference.py, its pieces in moments.py.
"""

from __future__ import annotations

import torch

from bnexport.sync_bn import moments
from bnexport.sync_bn.moments import backward_row, forward_row, statistics_type

__all__ = ["arrange", "backward", "backward_row", "forward", "forward_row"]

Tensor = torch.Tensor


def arrange(x: Tensor) -> Tensor:
    """Return x if it covers its memory without gaps or overlap, else a contiguous copy."""
    return x if torch.ops.aten.is_non_overlapping_and_dense(x) else x.contiguous()


def forward(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    stats_mode: str,
    rows: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """Compute y, new running statistics, saved mean and invstd. rows: the group's, or None for one process."""
    S = statistics_type(x.dtype)
    if not training:
        assert running_mean is not None and running_var is not None
        mean, invstd = running_mean.to(torch.float64, copy=True), moments.inverse_std(running_var.double(), eps)
        y = moments.normalise(x, mean, invstd, weight, bias)
        return y, running_mean.to(S, copy=True), running_var.to(S, copy=True), mean, invstd
    rows = forward_row(x, stats_mode)[None] if rows is None else rows
    merged = moments.merge(rows, stats_mode, x.shape[0] * moments.spatial_size(x))
    invstd = moments.inverse_std(merged.var, eps)
    y = moments.normalise(x, merged.mean, invstd, weight, bias)
    new_mean = (
        None if running_mean is None else moments.update_running(running_mean, merged.mean, momentum, merged.total)
    )
    new_var = (
        None
        if running_var is None
        else moments.update_running(running_var, moments.unbiased(merged), momentum, merged.total)
    )
    return y, new_mean, new_var, merged.mean, invstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    training: bool,
    output_mask: list[bool],
    stats_mode: str,
    grad_reduction: str,
    row: Tensor | None,
    rows: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute dx, dweight, dbias, None if not needed. row, rows: this process's and the group's, or None for one
    process.
    """
    need_input, need_weight, need_bias = output_mask
    C, S = x.shape[1], statistics_type(x.dtype)
    if row is None and (training or need_weight or need_bias):
        row = backward_row(dy, x, mean, invstd, stats_mode)
    if rows is None and row is not None:
        rows = row[None]
    sums = None if rows is None else moments.group_sums(rows, mean, invstd, x, stats_mode)
    dx = moments.apply_backward(dy, x, weight, mean, invstd, sums if training else None) if need_input else None
    dweight = dbias = None
    if need_weight or need_bias:
        assert row is not None and sums is not None and rows is not None
        A, B = row[1 : C + 1], row[C + 1 :]
        if grad_reduction != "local":
            divisor = rows.shape[0] if grad_reduction == "mean" else 1
            A, B = sums.A / divisor, sums.B / divisor
        dweight = B.to(S, copy=True) if need_weight else None
        dbias = A.to(S, copy=True) if need_bias else None
    return dx, dweight, dbias
