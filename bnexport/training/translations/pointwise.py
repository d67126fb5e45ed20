"""Activations, softmax, losses, reductions, scalars and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport.training.translations.values import constant, ints, op, sizes

# Gradients of activations.
#
# relu = max(x, 0)     d relu = 0 where x <= 0, else 1; hardtanh likewise at both of its ends. x may be the output.
#
# silu = x s           d silu = s (1 + x (1 - s))               s = sigmoid(x)
# mish = x t           d mish = t + x s (1 - t^2)               t = tanh(softplus(x))


def threshold_backward(grad_output: Any, self: Any, threshold: float) -> Any:
    """Translate aten::threshold_backward, the gradient of ReLU."""
    zero = constant(0.0, grad_output.dtype)
    return op.Where(op.LessOrEqual(self, constant(threshold, self.dtype)), zero, grad_output)


def hardtanh_backward(grad_output: Any, self: Any, min_val: float, max_val: float) -> Any:
    """Translate aten::hardtanh_backward, also the gradient of ReLU6."""
    low = op.LessOrEqual(self, constant(min_val, self.dtype))
    high = op.GreaterOrEqual(self, constant(max_val, self.dtype))
    return op.Where(op.Or(low, high), constant(0.0, grad_output.dtype), grad_output)


def silu_backward(grad_output: Any, input: Any) -> Any:
    """Translate aten::silu_backward."""
    s, one = op.Sigmoid(input), constant(1.0, input.dtype)
    return op.Mul(grad_output, op.Mul(s, op.Add(one, op.Mul(input, op.Sub(one, s)))))


def mish_backward(grad_output: Any, input: Any) -> Any:
    """Translate aten::mish_backward."""
    s, t = op.Sigmoid(input), op.Tanh(op.Softplus(input))
    slope = op.Mul(op.Mul(input, s), op.Sub(constant(1.0, input.dtype), op.Mul(t, t)))
    return op.Mul(grad_output, op.Add(t, slope))


# aten::_softmax and aten::_log_softmax.
#
# ONNX Runtime transposes for a dimension that is not the last one: (4, 19, 96, 96) over the classes takes 5.0 ms on one
# thread, and 0.4 ms in the operators below.


def softmax(self: Any, dim: int, half_to_float: bool) -> Any:
    """Translate exp(self) / sum of exp(self) over dimension `dim`; self of any shape."""
    if _is_last(self, dim):
        return op.Softmax(self, axis=-1)
    powers = op.Exp(_below_zero(self, dim))
    return op.Div(powers, op.ReduceSum(powers, ints([dim])))


def log_softmax(self: Any, dim: int, half_to_float: bool) -> Any:
    """Translate self - log of the sum of exp(self) over dimension `dim`; self of any shape."""
    if _is_last(self, dim):
        return op.LogSoftmax(self, axis=-1)
    shifted = _below_zero(self, dim)
    return op.Sub(shifted, op.Log(op.ReduceSum(op.Exp(shifted), ints([dim]))))


def _is_last(value: Any, dim: int) -> bool:
    rank = len(value.shape)
    return rank == 0 or dim % rank == rank - 1


def _below_zero(value: Any, dim: int) -> Any:
    return op.Sub(value, op.ReduceMax(value, ints([dim])))


# aten::sum and aten::mean of a whole tensor, as losses end with.
#
# ONNX Runtime adds float32 values one after the other in a few lanes, which loses 2e-6 of a mean over a map of scores;
# torch adds in blocks. Here they are added in float64.


def whole(operator: str) -> Callable[..., Any]:
    """Translate self of any shape to () by `operator` (ONNX) over all dimensions; integers are added as int64."""

    def translate(self: Any, dtype: Any = None) -> Any:
        given = None if dtype in (None, -1) else ir.DataType(dtype)
        kind = given or (self.dtype if self.dtype.is_floating_point() else ir.DataType.INT64)
        return add_up(operator, self, kind)

    return translate


def add_up(operator: str, value: Any, kind: ir.DataType) -> Any:
    """Reduce `value` to one number of type `kind`."""
    exact = ir.DataType.DOUBLE if kind.is_floating_point() else kind
    return op.Cast(getattr(op, operator)(op.Cast(value, to=int(exact)), keepdims=0), to=int(kind))


# aten::nll_loss_forward and aten::nll_loss2d_forward.
#
# torch.onnx computes the loss but makes up total_weight, by which the gradient of a mean divides. With
# class weights w (ones when absent), target t and ignored targets left out:
#
#     loss = - sum w[t] x[t] / total_weight (mean; sum and none do not divide)      total_weight = sum w[t]

_NONE, _MEAN = 0, 1


def nll_loss_forward(self: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> tuple[Any, Any]:
    """Translate self (C,) or (N, C, *), target () or (N, *) int64, weight (C,) to the loss and total_weight ()."""
    classes = 0 if len(sizes(self)) == 1 else 1
    kept = op.Not(op.Equal(target, constant(ignore_index, ir.DataType.INT64)))
    valid = op.Where(kept, target, constant(0, ir.DataType.INT64))
    axis = ints([classes])
    picked = op.Squeeze(op.GatherElements(self, op.Unsqueeze(valid, axis), axis=classes), axis)
    weights = op.CastLike(kept, self)
    if weight is not None:
        weights = op.Mul(op.Gather(weight, valid), weights)
    losses = op.Neg(op.Mul(picked, weights))
    if reduction == _NONE:
        return losses, constant(0.0, self.dtype)
    total, total_weight = (add_up("ReduceSum", values, self.dtype) for values in (losses, weights))
    return (op.Div(total, total_weight) if reduction == _MEAN else total), total_weight


# Arithmetic with a number, which may depend on the batch size; torch.onnx would make it a constant.


def with_scalar(operator: str) -> Callable[..., Any]:
    """Translate aten::mul.Scalar and similar: `operator` (ONNX) of a tensor and a number."""

    def translate(self: Any, other: Any) -> Any:
        number = op.CastLike(other, self) if isinstance(other, ir.Value) else constant(other, self.dtype)
        return getattr(op, operator)(self, number)

    return translate


def power(self: Any, exponent: Any) -> Any:
    """Translate self ** exponent, a number: 1 and 2, of squares and their gradients, need no logarithm."""
    kind = self.dtype
    if isinstance(exponent, float) and not kind.is_floating_point():
        kind = ir.DataType.FLOAT
        self = op.Cast(self, to=int(kind))
    if exponent in (1, 2):
        return op.Identity(self) if exponent == 1 else op.Mul(self, self)
    return op.Pow(self, op.CastLike(exponent, self) if isinstance(exponent, ir.Value) else constant(exponent, kind))


# Tensors without values, which later operators overwrite.


def empty_permuted(size: Sequence[Any], physical_layout: Sequence[int], dtype: int = -1, **_: Any) -> Any:
    """Translate aten::empty_permuted, with zeros; `size` holds numbers and the values of dynamic sizes."""
    del physical_layout
    kind = ir.DataType(dtype) if dtype > 0 else ir.DataType.FLOAT
    parts = [op.Reshape(part, ints([1])) if isinstance(part, ir.Value) else ints([part]) for part in size]
    return op.Expand(constant(np.zeros(1), kind), op.Concat(*parts, axis=0) if parts else ints([]))
