"""Average and maximum pooling, with their gradients."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport.training.translations.values import constant, ints, op, reshape, sizes, spread, static_sizes

# Number of windows of torch's pooling, and the padding with which ONNX has as many.


def output_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Return torch's number of windows: with ceil_mode, a window that would start in the end padding is left out."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return room // stride + 1
    windows = -(-room // stride) + 1
    return windows - 1 if (windows - 1) * stride >= size + padding else windows


def end_padding(
    extents: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Return the end padding of each dimension with which rounding down gives torch's number of windows in ceil_mode.

    Runtimes and versions of ONNX disagree on which windows ceil_mode leaves out; this says it.
    """
    ends = []
    for size, k, s, p, d in zip(extents, kernel, stride, padding, dilation):
        windows = output_size(size, k, s, p, d, True)
        ends.append(max(0, (windows - 1) * s + d * (k - 1) + 1 - size - p))
    return ends


# Average pooling, forward: aten::avg_pool2d and aten::avg_pool3d.
#
# torch divides each window's sum by a divisor: the values inside, or with count_include_pad those inside
# the symmetric padding too, never those that ceil_mode adds beyond it; or by divisor_override. ONNX has
# the first; the second is its mean over the whole kernel, corrected where windows reach beyond.


def avg_pool(
    input: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Translate average pooling; ceil_mode needs static sizes."""
    rank = len(sizes(input)) - 2
    kernel, pads = spread(kernel_size, rank), spread(padding, rank)
    strides = spread(stride, rank) if len(stride) else kernel
    include = count_include_pad or divisor_override is not None
    ends, correction = pads, np.ones((1,) * rank)
    if ceil_mode:
        extents = static_sizes(input, 2, "aten::avg_pool{}d")
        ends = end_padding(extents, kernel, strides, pads, [1] * rank)
        if divisor_override is None and include:
            axes = zip(extents, kernel, strides, pads, ends)
            correction = functools.reduce(np.multiply.outer, [_correction(*axis) for axis in axes])
    if divisor_override is not None:
        correction = correction * (math.prod(kernel) / divisor_override)
    result = op.AveragePool(
        input, kernel_shape=kernel, strides=strides, pads=[*pads, *ends], count_include_pad=int(include)
    )
    return result if (correction == 1).all() else op.Mul(result, constant(correction, input.dtype))


def _correction(size: int, k: int, s: int, p: int, end: int) -> np.ndarray:
    """Compute k over the number of values that torch counts, for each window of a dimension."""
    starts = np.arange((size + p + end - k) // s + 1) * s
    return k / (np.minimum(starts + k, size + 2 * p) - starts)


# Max pooling and adaptive max pooling with indices, forward and backward.
#
# ONNX's index counts through the whole tensor, torch's through one channel's plane (`plane` values):
#
#     torch = onnx mod plane
#
# Both take the first of equal maxima. The gradient adds each value of grad_output where its maximum was.

_NAME = "aten::max_pool{}d_with_indices"


def max_pool_with_indices(
    input: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Any, Any]:
    """Translate aten::max_pool2d_with_indices and aten::max_pool3d_with_indices: output and int64 indices.

    ceil_mode needs static sizes.
    """
    rank = len(sizes(input)) - 2
    kernel, pads, dilations = (spread(numbers, rank) for numbers in (kernel_size, padding, dilation))
    strides = spread(stride, rank) if len(stride) else kernel
    ends, beyond, x = pads, [0] * rank, input
    if ceil_mode:
        ends = end_padding(static_sizes(input, 2, _NAME), kernel, strides, pads, dilations)
        # ONNX Runtime wants less padding than the kernel; dilated windows may need more.
        beyond = [max(0, end - (k - 1)) for end, k in zip(ends, kernel)]
        ends = [end - more for end, more in zip(ends, beyond)]
        if any(beyond):
            x = op.Pad(input, ints([0] * (rank + 4) + beyond), constant(-math.inf, input.dtype))
    output, indices = op.MaxPool(x, kernel_shape=kernel, strides=strides, pads=[*pads, *ends], dilations=dilations)
    indices = op.Mod(indices, op.ReduceProd(op.Shape(x, start=2), keepdims=0))
    return output, _without_padding(indices, input, beyond) if any(beyond) else indices


def _without_padding(indices: Any, input: Any, beyond: Sequence[int]) -> Any:
    """Convert indices of a plane whose dimensions were `beyond` longer to indices of the input's plane."""
    extents = static_sizes(input, 2, _NAME)
    result, stride, rest = None, 1, indices
    for extent, more in zip(reversed(extents), reversed(beyond)):
        padded = constant(extent + more, ir.DataType.INT64)
        position = op.Mul(op.Mod(rest, padded), constant(stride, ir.DataType.INT64))
        result = position if result is None else op.Add(result, position)
        rest, stride = op.Div(rest, padded), stride * extent
    return result


def adaptive_max_pool(input: Any, output_size: Sequence[int]) -> tuple[Any, Any]:
    """Translate aten::adaptive_max_pool2d and aten::adaptive_max_pool3d, with static sizes: output and int64
    indices.

    Each window is gathered, short ones with their first value again, and its maximum picked.
    """
    extents = static_sizes(input, 2, "aten::adaptive_max_pool{}d")
    outs = [int(size) for size in output_size]
    positions = _adaptive_windows(extents, outs)
    windows, width = positions.shape
    gathered = op.Gather(reshape(input, [0, 0, -1]), constant(positions, ir.DataType.INT64), axis=2)
    best = op.ArgMax(gathered, axis=3, keepdims=1)
    output = op.GatherElements(gathered, best, axis=3)
    starts = constant(np.arange(windows)[:, None] * width, ir.DataType.INT64)
    indices = op.Gather(constant(positions.ravel(), ir.DataType.INT64), op.Add(best, starts))
    return reshape(output, [0, 0, *outs]), reshape(indices, [0, 0, *outs])


def _adaptive_windows(extents: Sequence[int], outs: Sequence[int]) -> np.ndarray:
    """Return (windows, positions in the plane): window i of n covers floor(i L / n) to ceil((i + 1) L / n)."""
    edges = [
        [(i * extent // out, -(-(i + 1) * extent // out)) for i in range(out)] for extent, out in zip(extents, outs)
    ]
    windows = [
        [np.ravel_multi_index(point, extents) for point in itertools.product(*(range(*edge) for edge in window))]
        for window in itertools.product(*edges)
    ]
    width = max(len(window) for window in windows)
    return np.array([window + window[:1] * (width - len(window)) for window in windows], np.int64)


def max_pool_backward(grad_output: Any, input: Any, *arguments: Any, **names: Any) -> Any:
    """Translate aten::max_pool2d_with_indices_backward, _3d, and adaptive_max_pool2d_backward, _3d: indices come
    last.
    """
    indices = names["indices"] if "indices" in names else arguments[-1]
    flat = [0, 0, -1]
    zeros = op.Expand(constant(0.0, grad_output.dtype), op.Shape(input))
    scattered = op.ScatterElements(
        reshape(zeros, flat), reshape(indices, flat), reshape(grad_output, flat), axis=2, reduction="add"
    )
    return op.Reshape(scattered, op.Shape(input))
