"""Average pooling, forward: aten::avg_pool2d and aten::avg_pool3d.

torch divides each window's sum by a divisor: the values inside, or with count_include_pad those inside
the symmetric padding too, never those that ceil_mode adds beyond it; or by divisor_override. ONNX has
the first; the second is its mean over the whole kernel, corrected where windows reach beyond.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bnexport.training.translations.values import constant, op, sizes, spread, static_sizes
from bnexport.training.translations.windows import end_padding


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
