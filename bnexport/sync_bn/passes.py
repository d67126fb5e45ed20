"""Forward and backward of a layer below autograd: checks, the group's exchange, kernels or torch operations.

The operators and the module's own way meet in `normalise` and `differentiate`, and so give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bnexport.schema import GroupSpec
from bnexport.sync_bn import distributed, torch_operations
from bnexport.sync_bn.kernels import kernels_for, usable

Tensor = torch.Tensor


def arrange(input: Tensor, *vectors: Tensor | None) -> tuple[Any, ...]:
    """Return the kernels or torch operations, the input in a layout that they support, and vectors as they read them."""
    x = input.contiguous() if kernels_for(input) is None and usable(input.device) else input
    kernels = kernels_for(x)
    return (torch_operations, x, *vectors) if kernels is None else (kernels, x, *map(kernels.vector, vectors))


def exchange(row: Tensor, x: Tensor, direction: str, group: GroupSpec, **numbers: float) -> Tensor:
    """Gather the rows of all members of the group. numbers: what they must agree on, too."""
    header = {
        "C": x.shape[1],
        "dtype": str(x.dtype).removeprefix("torch."),
        "stats_mode": group.stats_mode,
        "grad_reduction": group.grad_reduction,
        **numbers,
    }
    return distributed.exchange(row, group.group, group.group_size, group.layer, direction, header)


def like(result: Tensor, x: Tensor) -> Tensor:
    """Return `result` in the memory format that fake kernels promise, that of empty_like(x)."""
    if result.stride() == x.stride():
        return result
    promised = torch.empty_like(x)
    return result if result.stride() == promised.stride() else promised.copy_(result)


def normalise(
    backend: Any,
    x: Tensor,
    vectors: Sequence[Tensor | None],
    training: bool,
    momentum: float,
    eps: float,
    group: GroupSpec,
    in_place: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """Compute y, new running statistics, saved mean and invstd of checked operands. in_place: see `Kernels.forward`."""
    rows = None
    if training and group.group_size > 1:
        rows = exchange(backend.forward_row(x, group.stats_mode), x, "forward", group, momentum=momentum, eps=eps)
        if group.stats_mode == "exact" and x.device.type == "cpu":
            torch_operations.require_two_values(int(rows[:, 0].sum()), x)
    elif training and x.numel() == x.shape[1]:
        torch_operations.require_two_values(torch_operations.values_per_channel(x), x)
    return backend.forward(x, vectors, training, momentum, eps, group.stats_mode, rows, in_place)


def differentiate(
    backend: Any,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    training: bool,
    output_mask: Sequence[bool],
    group: GroupSpec,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute dx, dweight and dbias of checked operands."""
    if dy.stride() != x.stride():
        dy = torch.empty_like(x).copy_(dy)
    row = rows = None
    if group.group_size > 1 and (training or any(output_mask[1:])):
        row = backend.backward_row(dy, x, mean, invstd, group.stats_mode)
        if (training and output_mask[0]) or group.grad_reduction != "local":
            rows = exchange(row, x, "backward", group)
    modes = (group.stats_mode, group.grad_reduction)
    return backend.backward(dy, x, weight, mean, invstd, training, output_mask, *modes, row, rows)
