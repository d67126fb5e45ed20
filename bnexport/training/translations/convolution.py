"""aten::convolution and aten::convolution_backward.

With x the input, w the weight (O, C/G, *K), g the gradient by the output, per dimension stride s,
padding p and dilation d:

    y[n, o, i]  = sum_c,k  w[o, c, k] x[n, c, s i + d k - p]
    dx          = ConvTranspose(g, w)             input_gradient.py
    dw[o, c, k] = sum_n,i  g[n, o, i] x[n, c, s i + d k - p]                   weight_gradient.py
    db[o]       = sum_n,i  g[n, o, i]

A transposed convolution is dx as a forward: its gradient by the input is Conv(g, w), and its weight
gradient is dw with the roles of input and gradient exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bnexport.errors import UnsupportedModelError
from bnexport.training.translations.geometry import Geometry
from bnexport.training.translations.input_gradient import input_gradient
from bnexport.training.translations.values import crop, ints, only_needed, op, sizes, spread, static_sizes
from bnexport.training.translations.weight_gradient import weight_gradient

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
