"""Translations into the operators of bnexport/training/contract.py, float32 on CPUs.

What they do not serve keeps its standard form: other types, depthwise convolutions of three spatial
dimensions, transposed convolutions, input gradients with stride and dilation together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from bnexport import torch_versions
from bnexport.training import contract
from bnexport.training.translations import activations, convolution, pools
from bnexport.training.translations.convolution import Geometry, input_gradient, weight_gradient
from bnexport.training.translations.values import sizes, spread

_ATEN = torch.ops.aten

_CONV = contract.node(contract.CONV)
_INPUT_GRAD = contract.node(contract.CONV_INPUT_GRAD)
_WEIGHT_GRAD = contract.node(contract.CONV_WEIGHT_GRAD)
_RELU_GRAD = contract.node(contract.RELU_GRAD)
_MAX_POOL_GRAD = contract.node(contract.MAX_POOL_GRAD)


def _is_float32(*values: Any) -> bool:
    return all(value is None or value.dtype == ir.DataType.FLOAT for value in values)


def _convolution(
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
    rank = len(sizes(input)) - 2
    if transposed or not _is_served(rank, groups, weight) or not _is_float32(input, weight, bias):
        return convolution.convolution(
            input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
        )
    convolution.require_number(groups)
    strides, pads, dilations = (spread(numbers, rank) for numbers in (stride, padding, dilation))
    return _CONV(input, weight, bias, strides=strides, pads=pads, dilations=dilations, group=groups)


def _is_served(rank: int, groups: int, weight: Any) -> bool:
    """Whether there are kernels that are fast: depthwise ones have two dimensions."""
    outputs, channels = sizes(weight)[:2]
    return rank in (1, 2) or (rank == 3 and not (outputs == groups and groups > 1 and channels == 1))


def _grad_input(grad_output: Any, weight: Any, shape: Geometry) -> Any:
    if not _is_served(shape.rank, shape.groups, weight) or any(
        s > 1 and d > 1 for s, d in zip(shape.stride, shape.dilation)
    ):
        return input_gradient(grad_output, weight, shape)
    return _INPUT_GRAD(
        grad_output,
        weight,
        input_shape=shape.extents,
        strides=shape.stride,
        pads=shape.padding,
        dilations=shape.dilation,
        group=shape.groups,
    )


def _grad_weight(input: Any, grad_output: Any, shape: Geometry) -> Any:
    if shape.rank > 2 and shape.groups == shape.channels == shape.outputs > 1:
        return weight_gradient(input, grad_output, shape)
    return _WEIGHT_GRAD(
        grad_output,
        input,
        kernel_shape=shape.kernel,
        strides=shape.stride,
        pads=shape.padding,
        dilations=shape.dilation,
        group=shape.groups,
    )


def _convolution_backward(grad_output: Any, input: Any, weight: Any, *arguments: Any) -> tuple[Any, ...]:
    transposed = arguments[4]
    if transposed or not _is_float32(grad_output, input, weight):
        return convolution.convolution_backward(grad_output, input, weight, *arguments)
    return convolution.convolution_backward(
        grad_output, input, weight, *arguments, input_form=_grad_input, weight_form=_grad_weight
    )


def _threshold_backward(grad_output: Any, self: Any, threshold: float) -> Any:
    if not _is_float32(grad_output, self):
        return activations.threshold_backward(grad_output, self, threshold)
    return _RELU_GRAD(grad_output, self, low=float(threshold))


def _hardtanh_backward(grad_output: Any, self: Any, min_val: float, max_val: float) -> Any:
    if not _is_float32(grad_output, self):
        return activations.hardtanh_backward(grad_output, self, min_val, max_val)
    return _RELU_GRAD(grad_output, self, low=float(min_val), high=float(max_val))


def _max_pool_backward(
    grad_output: Any,
    self: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Any,
) -> Any:
    """Translate max pooling's gradient; the kernel finds the maxima again and needs no indices of the forward."""
    if len(sizes(self)) != 4 or not _is_float32(grad_output, self):
        return pools.max_pool_backward(grad_output, self, indices)
    kernel, pads, dilations = (spread(numbers, 2) for numbers in (kernel_size, padding, dilation))
    strides = spread(stride, 2) if len(stride) else kernel
    return _MAX_POOL_GRAD(grad_output, self, kernel_shape=kernel, strides=strides, pads=pads, dilations=dilations)


TRANSLATIONS: dict[torch_versions.Operator, Callable[..., Any]] = {
    _ATEN.convolution.default: _convolution,
    _ATEN.convolution_backward.default: _convolution_backward,
    _ATEN.threshold_backward.default: _threshold_backward,
    _ATEN.hardtanh_backward.default: _hardtanh_backward,
    _ATEN.max_pool2d_with_indices_backward.default: _max_pool_backward,
}
