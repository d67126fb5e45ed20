"""Gradient of a convolution by its weight, in the form that ONNX Runtime computes fastest.

    dw[o, c, k] = sum_n,i  g[n, o, i] x[n, c, s i + d k - p]

ONNX has no operator for it. A tap is what one kernel position k sees of x: its values at s i + d k - p
for all i. `choose` picks the form by the shapes. CPU time of each, one thread, as a multiple of torch's
(benchmarks/bench_conv_gradient.py):

    form         what it is                                   3x3 dense    1x1          3x3 depthwise
    TAPS         for each tap a product (O, N i) (N i, C)     0.9 - 1.2    0.9 - 1.5
    DEPTHWISE    for each tap the sum of tap * g                                        2.2 - 4.1
    PRODUCTS     for each n a product g x^T, then their sum                0.4 - 0.8, small planes 1.4 - 3.4
    CONVOLUTION  Conv of x^T with g as its kernel             1.3 - 2.5    2.1 - 5.8    4.3 - 8.5

CONVOLUTION is the general form, and the better one for a few channels: 7x7 from 3 channels 1.5 (TAPS
5.6), 3x3 from 3 channels 2.2 (TAPS 4.3). What lost: one product over all taps side by side (im2col by Slice and
Concat 1.3 - 2.0, by Gather 0.7 - 1.5, by a Conv with an identity kernel 1.4 - 1.7) is faster for planes
below 8 x 8 only and holds K copies of x; depthwise as a product over rows whose diagonals are summed
2.3 - 10.1; depthwise taps in channel-major layout 1.3 - 9.1, since strided and short rows copy slowly.
"""

from __future__ import annotations

import enum
import itertools
import math
from typing import Any

from bnexport.training.translations.geometry import MANY_TAPS, Geometry
from bnexport.training.translations.values import crop, ints, op, reshape

# Below it a tap's product is too thin for a matrix product.
_FEW_CHANNELS = 8


class WeightGradientForm(enum.Enum):
    TAPS = "taps"
    DEPTHWISE = "depthwise"
    PRODUCTS = "products"
    CONVOLUTION = "convolution"


def possible(shape: Geometry, form: WeightGradientForm) -> bool:
    taps = math.prod(shape.kernel)
    if form is WeightGradientForm.TAPS:
        return shape.groups == 1 and taps <= MANY_TAPS
    if form is WeightGradientForm.DEPTHWISE:
        return shape.groups == shape.channels == shape.outputs and taps <= MANY_TAPS
    return form is WeightGradientForm.CONVOLUTION or (shape.groups == 1 and taps == 1 and not any(shape.padding))


def choose(shape: Geometry) -> WeightGradientForm:
    """Choose the form for a shape; a pure function, so that a graph is the same on every machine."""
    if possible(shape, WeightGradientForm.PRODUCTS):
        # Worth it while the products to be summed are no larger than what TAPS would transpose.
        transposed = math.prod(shape.plane) * (shape.channels + shape.outputs)
        return WeightGradientForm.PRODUCTS if transposed >= shape.channels * shape.outputs else WeightGradientForm.TAPS
    if shape.groups > 1 and possible(shape, WeightGradientForm.DEPTHWISE):
        return WeightGradientForm.DEPTHWISE
    return (
        WeightGradientForm.TAPS
        if possible(shape, WeightGradientForm.TAPS) and shape.channels >= _FEW_CHANNELS
        else WeightGradientForm.CONVOLUTION
    )


def weight_gradient(x: Any, g: Any, shape: Geometry, form: WeightGradientForm | None = None) -> Any:
    """Compute dw (outputs, channels / groups, *kernel)."""
    function = {
        WeightGradientForm.TAPS: _taps,
        WeightGradientForm.DEPTHWISE: _depthwise,
        WeightGradientForm.PRODUCTS: _products,
        WeightGradientForm.CONVOLUTION: _convolution,
    }[form or choose(shape)]
    return function(x, g, shape)


def _channels_last(value: Any, shape: Geometry) -> Any:
    return op.Transpose(value, perm=[0, *shape.spatial, 1])


def _each_tap(x: Any, shape: Geometry) -> list[Any]:
    """Return (N, *plane, C) for each kernel position in row-major order; channels last, so that copies are long."""
    wide = _channels_last(x, shape)
    if any(shape.padding):
        wide = op.Pad(wide, ints([0, *shape.padding, 0] * 2))
    axes = ints(range(1, shape.rank + 1))
    taps = []
    for position in itertools.product(*(range(k) for k in shape.kernel)):
        starts = [k * d for k, d in zip(position, shape.dilation)]
        ends = [start + (i - 1) * s + 1 for start, i, s in zip(starts, shape.plane, shape.stride)]
        taps.append(op.Slice(wide, ints(starts), ints(ends), axes, ints(shape.stride)))
    return taps


def _taps(x: Any, g: Any, shape: Geometry) -> Any:
    rows = reshape(op.Transpose(g, perm=[1, 0, *shape.spatial]), [shape.outputs, -1])
    products = [
        op.Unsqueeze(op.Gemm(rows, reshape(tap, [-1, shape.channels])), ints([2])) for tap in _each_tap(x, shape)
    ]
    return reshape(op.Concat(*products, axis=2), [shape.outputs, shape.channels, *shape.kernel])


def _depthwise(x: Any, g: Any, shape: Geometry) -> Any:
    last = _channels_last(g, shape)
    sums = []
    for tap in _each_tap(x, shape):
        # Rows first: a float sum over everything at once has ten times the error.
        row = op.ReduceSum(op.Mul(tap, last), ints([shape.rank]), keepdims=0)
        sums.append(op.ReduceSum(row, ints(range(shape.rank)), keepdims=0))
    columns = [op.Unsqueeze(total, ints([1])) for total in sums]
    return reshape(op.Concat(*columns, axis=1), [shape.channels, 1, *shape.kernel])


def _products(x: Any, g: Any, shape: Geometry) -> Any:
    if any(s > 1 for s in shape.stride):
        ends = [(i - 1) * s + 1 for i, s in zip(shape.plane, shape.stride)]
        x = op.Slice(x, ints([0] * shape.rank), ints(ends), ints(shape.spatial), ints(shape.stride))
    x, g = reshape(x, [0, shape.channels, -1]), reshape(g, [0, shape.outputs, -1])
    # The smaller of the two is the one to transpose.
    if shape.channels <= shape.outputs:
        total = op.ReduceSum(op.MatMul(g, op.Transpose(x, perm=[0, 2, 1])), ints([0]), keepdims=0)
    else:
        product = op.MatMul(x, op.Transpose(g, perm=[0, 2, 1]))
        total = op.Transpose(op.ReduceSum(product, ints([0]), keepdims=0), perm=[1, 0])
    return reshape(total, [shape.outputs, shape.channels, *shape.kernel])


def _convolution(x: Any, g: Any, shape: Geometry) -> Any:
    """Convolve x^T (C / G, G N, *) with g^T (O, N, *): stride and dilation change places."""
    swap, G = [1, 0, *shape.spatial], shape.groups
    if G == 1:
        data = op.Transpose(x, perm=swap)
    else:
        split = reshape(x, [0, G, shape.channels // G, *shape.extents])
        data = op.Transpose(split, perm=[2, 1, 0, *(axis + 1 for axis in shape.spatial)])
        data = reshape(data, [shape.channels // G, -1, *shape.extents])
    result = op.Conv(
        data,
        op.Transpose(g, perm=swap),
        strides=shape.dilation,
        dilations=shape.stride,
        pads=shape.padding * 2,
        group=G,
    )
    # Where the stride left values of x over, the result has positions beyond the kernel.
    return op.Transpose(crop(result, [0] * shape.rank, shape.kernel, shape.spatial), perm=swap)
