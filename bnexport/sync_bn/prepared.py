"""The compiled kernels for one process on a CPU, at the least cost of a call.

A layer of a small image takes as long as twenty calls of torch from Python. So what calls on tensors of one shape,
layout and type share is prepared once: its sizes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from bnexport.native import capi
from bnexport.sync_bn import compiled
from bnexport.sync_bn.compiled import pointer
from bnexport.sync_bn.moments import DTYPES, statistics_type

Tensor = torch.Tensor

# Bytes of a number of the saved statistics.
_ROW = 8


@dataclasses.dataclass(frozen=True, slots=True)
class InputSizes:
    """What calls on tensors of one shape, layout and type share.

    leading: the first fields of the C API's structs. channels, statistics: shape and type of vectors that the kernels
    read where they lie. single: there is one value per channel. large: an output belongs on huge pages.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    leading: tuple[int, ...]
    channels: torch.Size
    statistics: torch.dtype
    single: bool
    large: bool


def sizes_of(x: Tensor) -> InputSizes | None:
    """Return what calls on a tensor share on a CPU; None if the kernels do not support it, or are not used."""
    return None if compiled.backend == "torch" else _sizes_of(x.shape, x.stride(), x.dtype)


@functools.lru_cache(maxsize=4096)
def _sizes_of(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> InputSizes | None:
    if len(shape) < 2 or dtype not in DTYPES or not compiled.usable(torch.empty(0)):
        return None
    x = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if compiled.memory_layout(x) is None:
        return None
    leading, large = compiled.sizes(x), compiled.is_large(x)
    return InputSizes(shape, stride, dtype, leading, shape[1:2], statistics_type(dtype), x.numel() == shape[1], large)


def _empty_like(x: Tensor, sizes: InputSizes) -> Tensor:
    return compiled.empty_like(x) if sizes.large else torch.empty_like(x)


def forward(
    sizes: InputSizes,
    x: Tensor,
    vectors: Sequence[Tensor | None],
    training: bool,
    momentum: float,
    eps: float,
    stats_mode: str,
    update: bool,
) -> tuple[Tensor, Tensor]:
    """Compute y and the saved [mean.., invstd..] (2 C,) float64; `update` the running statistics in place.

    vectors: running_mean, running_var, weight, bias, contiguous and of the statistics' type.
    """
    running_mean, running_var, weight, bias = vectors
    (C,) = sizes.channels
    y, saved = _empty_like(x, sizes), torch.empty(2 * C, dtype=torch.float64)
    mean, var, means = pointer(running_mean), pointer(running_var), saved.data_ptr()
    capi.run_forward(
        *sizes.leading, x.data_ptr(), y.data_ptr(), pointer(weight), pointer(bias), mean, var, mean if update else 0,
        var if update else 0, means, means + _ROW * C, momentum, eps, training, capi.STATS_MODES[stats_mode], 1, 0,
        torch.get_num_threads(), 0,
    )  # fmt: skip
    return y, saved


def backward(
    sizes: InputSizes,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    saved: Tensor,
    training: bool,
    stats_mode: str,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute dx, dweight, dbias, None if not needed, from what `forward` saved."""
    (C,) = sizes.channels
    dx = _empty_like(x, sizes) if output_mask[0] else None
    dweight = torch.empty(C, dtype=sizes.statistics) if output_mask[1] else None
    dbias = torch.empty(C, dtype=sizes.statistics) if output_mask[2] else None
    means = saved.data_ptr()
    capi.run_backward(
        *sizes.leading, dy.data_ptr(), x.data_ptr(), pointer(dx), pointer(weight), means, means + _ROW * C,
        pointer(dweight), pointer(dbias), training, capi.STATS_MODES[stats_mode], 0, 1, 0, 0,
        torch.get_num_threads(), 0,
    )  # fmt: skip
    return dx, dweight, dbias
