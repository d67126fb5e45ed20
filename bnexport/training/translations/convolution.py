"""aten::convolution and aten::convolution_backward.

With x the input, w the weight (O, C/G, *K), g the gradient by the output, per dimension stride s,
padding p and dilation d:

    y[n, o, i]  = sum_c,k  w[o, c, k] x[n, c, s i + d k - p]
    dx          = ConvTranspose(g, w)
    dw[o, c, k] = sum_n,i  g[n, o, i] x[n, c, s i + d k - p]
    db[o]       = sum_n,i  g[n, o, i]

A transposed convolution is dx as a forward: its gradient by the input is Conv(g, w), and its weight
gradient is dw with the roles of input and gradient exchanged.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from bnexport.errors import UnsupportedModelError
from bnexport.training.translations.values import crop, ints, only_needed, op, reshape, sizes, spread, static_sizes

# The sizes of a convolution.

# Forms with one node for each kernel position stop here: a graph should not hold thousands.
MANY_TAPS = 64


@dataclasses.dataclass(frozen=True)
class Geometry:
    """x (N, channels, *extents), g (N, outputs, *plane), dw (outputs, channels / groups, *kernel)."""

    channels: int
    outputs: int
    extents: tuple[int, ...]
    plane: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @property
    def spatial(self) -> list[int]:
        return list(range(2, self.rank + 2))


# Gradient of a convolution by its input.
#
#     dx[n, c, y] = sum over o, k, i with s i + d k - p = y of  w[o, c, k] g[n, o, i]
#
# CPU time with one thread is 0.3 to 1.7 times torch's, 1.6 to 7.6 times depthwise (benchmarks/bench_conv_gradient.py). A Conv with
# the kernel turned around, for a stride of 1, takes 0.7 times as long for 1x1 and 0.95 depthwise; one product for all images with
# its taps added up 0.85 for planes below 8 x 8.


def input_gradient(g: Any, weight: Any, shape: Geometry) -> Any:
    """Compute dx (N, channels, *extents) of g (N, outputs, *plane) and weight (outputs, channels / groups, *kernel)."""
    axes = zip(shape.extents, shape.plane, shape.kernel, shape.stride, shape.padding, shape.dilation)
    return op.ConvTranspose(
        g,
        weight,
        strides=shape.stride,
        pads=shape.padding * 2,
        dilations=shape.dilation,
        # What the forward's division by the stride left over at the end of each dimension.
        output_padding=[x - ((i - 1) * s - 2 * p + d * (k - 1) + 1) for x, i, k, s, p, d in axes],
        group=shape.groups,
    )


# Gradient of a convolution by its weight, in the form that ONNX Runtime computes fastest.
#
#     dw[o, c, k] = sum_n,i  g[n, o, i] x[n, c, s i + d k - p]
#
# ONNX has no operator for it. A tap is what one kernel position k sees of x: its values at s i + d k - p
# for all i. `choose` picks the form by the shapes. CPU time of each, one thread, as a multiple of torch's
# (benchmarks/bench_conv_gradient.py):
#
#     form         what it is                                   3x3 dense    1x1          3x3 depthwise
#     TAPS         for each tap a product (O, N i) (N i, C)     0.9 - 1.2    0.9 - 1.5
#     DEPTHWISE    for each tap the sum of tap * g                                        2.2 - 4.1
#     PRODUCTS     for each n a product g x^T, then their sum                0.4 - 0.8, small planes 1.4 - 3.4
#     CONVOLUTION  Conv of x^T with g as its kernel             1.3 - 2.5    2.1 - 5.8    4.3 - 8.5
#
# CONVOLUTION is the general form, and the better one for a few channels: 7x7 from 3 channels 1.5 (TAPS
# 5.6), 3x3 from 3 channels 2.2 (TAPS 4.3). What lost: one product over all taps side by side (im2col by Slice and
# Concat 1.3 - 2.0, by Gather 0.7 - 1.5, by a Conv with an identity kernel 1.4 - 1.7) is faster for planes
# below 8 x 8 only and holds K copies of x; depthwise as a product over rows whose diagonals are summed
# 2.3 - 10.1; depthwise taps in channel-major layout 1.3 - 9.1, since strided and short rows copy slowly.

# Below it a tap's product is too thin for a matrix product.
_FEW_CHANNELS = 8


class WeightGradientForm(enum.Enum):
    TAPS = "taps"
    DEPTHWISE = "depthwise"
    PRODUCTS = "products"
    CONVOLUTION = "convolution"


def weight_form_fits(shape: Geometry, form: WeightGradientForm) -> bool:
    taps = math.prod(shape.kernel)
    if form is WeightGradientForm.TAPS:
        return shape.groups == 1 and taps <= MANY_TAPS
    if form is WeightGradientForm.DEPTHWISE:
        return shape.groups == shape.channels == shape.outputs and taps <= MANY_TAPS
    return form is WeightGradientForm.CONVOLUTION or (shape.groups == 1 and taps == 1 and not any(shape.padding))


def choose_weight_form(shape: Geometry) -> WeightGradientForm:
    """Choose the form for a shape; a pure function, so that a graph is the same on every machine."""
    if weight_form_fits(shape, WeightGradientForm.PRODUCTS):
        # Worth it while the products to be summed are no larger than what TAPS would transpose.
        transposed = math.prod(shape.plane) * (shape.channels + shape.outputs)
        return WeightGradientForm.PRODUCTS if transposed >= shape.channels * shape.outputs else WeightGradientForm.TAPS
    if shape.groups > 1 and weight_form_fits(shape, WeightGradientForm.DEPTHWISE):
        return WeightGradientForm.DEPTHWISE
    return (
        WeightGradientForm.TAPS
        if weight_form_fits(shape, WeightGradientForm.TAPS) and shape.channels >= _FEW_CHANNELS
        else WeightGradientForm.CONVOLUTION
    )


def weight_gradient(x: Any, g: Any, shape: Geometry, form: WeightGradientForm | None = None) -> Any:
    """Compute dw (outputs, channels / groups, *kernel)."""
    function = {
        WeightGradientForm.TAPS: _taps,
        WeightGradientForm.DEPTHWISE: _depthwise,
        WeightGradientForm.PRODUCTS: _products,
        WeightGradientForm.CONVOLUTION: _convolution,
    }[form or choose_weight_form(shape)]
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


_NAME = "aten::convolution_backward"


def convolution(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    require_number(groups)
    rank = len(sizes(input)) - 2
    strides, pads, dilations = (spread(numbers, rank) for numbers in (stride, padding, dilation))
    window = {"strides": strides, "pads": pads * 2, "dilations": dilations, "group": groups}
    if transposed:
        return op.ConvTranspose(input, weight, bias, **window, output_padding=spread(output_padding, rank))
    return op.Conv(input, weight, bias, **window)


def require_number(groups: Any) -> None:
    """Refuse a group for each row, as of a batch with a kernel for each image."""
    if not isinstance(groups, int):
        raise UnsupportedModelError(
            "aten::convolution: got a number of groups that depends on the batch size, expected a constant, since ONNX "
            "has it as an attribute; export with dynamic=False"
        )


def convolution_backward(
    grad_output: Any,
    input: Any,
    weight: Any,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
    *,
    input_form: Callable[[Any, Any, Geometry], Any] = input_gradient,
    weight_form: Callable[[Any, Any, Geometry], Any] = weight_gradient,
) -> tuple[Any, ...]:
    """Compute grad_input, grad_weight and grad_bias, with static sizes except for the batch.

    input_form, weight_form: what makes the gradients from (grad_output, weight) and (input, grad_output).
    """
    del bias_sizes, output_padding
    require_number(groups)
    rank = len(sizes(input)) - 2
    x, g = (grad_output, input) if transposed else (input, grad_output)
    channels, *extents = static_sizes(x, 1, _NAME)
    outputs, *plane = static_sizes(g, 1, _NAME)
    shape = Geometry(
        channels,
        outputs,
        tuple(extents),
        tuple(plane),
        tuple(static_sizes(weight, 2, _NAME)),
        tuple(spread(stride, rank)),
        tuple(spread(padding, rank)),
        tuple(spread(dilation, rank)),
        groups,
    )
    need_input, need_weight, need_bias = output_mask
    grad_input = grad_weight = grad_bias = None
    if need_input:
        grad_input = (_transposed_input_gradient if transposed else input_form)(grad_output, weight, shape)
    if need_weight:
        grad_weight = weight_form(x, g, shape)
    if need_bias:
        grad_bias = op.ReduceSum(grad_output, ints([0, *shape.spatial]), keepdims=0)
    return only_needed((grad_input, grad_weight, grad_bias))


def _transposed_input_gradient(grad_output: Any, weight: Any, shape: Geometry) -> Any:
    result = op.Conv(
        grad_output,
        weight,
        strides=shape.stride,
        pads=shape.padding * 2,
        dilations=shape.dilation,
        group=shape.groups,
    )
    # An output_padding of a stride or more (a dilation allows it) adds windows that no input wrote.
    windows = [
        (x + 2 * p - d * (k - 1) - 1) // s + 1
        for x, k, s, p, d in zip(shape.extents, shape.kernel, shape.stride, shape.padding, shape.dilation)
    ]
    if windows == list(shape.plane):
        return result
    return crop(result, [0] * shape.rank, shape.plane, shape.spatial)
