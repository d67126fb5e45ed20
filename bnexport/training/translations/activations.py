"""Attention, activations, softmax, losses, reductions, scalars and copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport.training.translations.values import constant, ints, op, reshape, sizes, static_sizes

# Activations, softmax, losses, reductions, scalars and copies.

# Gradients of activations.
#
# relu = max(x, 0)     d relu = 0 where x <= 0, else 1; hardtanh likewise at both of its ends. x may be the output.


def threshold_backward(grad_output: Any, self: Any, threshold: float) -> Any:
    """Translate aten::threshold_backward, the gradient of ReLU."""
    zero = constant(0.0, grad_output.dtype)
    return op.Where(op.LessOrEqual(self, constant(threshold, self.dtype)), zero, grad_output)


def hardtanh_backward(grad_output: Any, self: Any, min_val: float, max_val: float) -> Any:
    """Translate aten::hardtanh_backward, also the gradient of ReLU6."""
    low = op.LessOrEqual(self, constant(min_val, self.dtype))
    high = op.GreaterOrEqual(self, constant(max_val, self.dtype))
    return op.Where(op.Or(low, high), constant(0.0, grad_output.dtype), grad_output)


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


# Scaled dot-product attention, which torch fuses on CPU.
#
# With scale s (1 / sqrt(E) by default), mask m (additive) and g the gradient by the output:
#
#     P = softmax(s q k^T + m)     o = P v
#     dv = P^T g                   dP = g v^T
#     dS = P (dP - rowsum(g o))    dq = s dS k       dk = s dS^T q
#
# Where several heads of the queries share one of the keys (grouped-query attention), k and v are repeated for each of
# them, and the gradients of the repeats are added.

_NAME = "aten::_scaled_dot_product_flash_attention_for_cpu"


def attention(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, Any]:
    """Translate aten::_scaled_dot_product_flash_attention_for_cpu: output and logsumexp.

    query (N, H, L, E), key (N, H / G, S, E), value (N, H / G, S, E); torch comes here without dropout only.
    The gradient recomputes P, so logsumexp is left out.
    """
    del dropout_p
    _, key, value = _repeated(query, key, value)
    P = _probabilities(query, key, is_causal, attn_mask, _scale(query, scale))
    return op.MatMul(P, value), op.Constant(value_float=0.0)


def attention_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, Any, Any]:
    """Translate aten::_scaled_dot_product_flash_attention_for_cpu_backward: gradients of query, key and value."""
    del logsumexp, dropout_p
    factor = _scale(query, scale)
    groups, key, value = _repeated(query, key, value)
    P = _probabilities(query, key, is_causal, attn_mask, factor)
    row = op.ReduceSum(op.Mul(grad_out, out), ints([-1]), keepdims=1)
    dS = op.Mul(op.Mul(P, op.Sub(op.MatMul(grad_out, _transposed(value)), row)), factor)
    dk, dv = op.MatMul(_transposed(dS), query), op.MatMul(_transposed(P), grad_out)
    if groups > 1:
        heads = static_sizes(query, 1, _NAME)[0] // groups
        dk, dv = (
            op.ReduceSum(reshape(each, [0, heads, groups, -1, width]), ints([2]), keepdims=0)
            for each, width in ((dk, static_sizes(query, 3, _NAME)[0]), (dv, static_sizes(grad_out, 3, _NAME)[0]))
        )
    return op.MatMul(dS, key), dk, dv


def _repeated(query: Any, key: Any, value: Any) -> tuple[int, Any, Any]:
    """Return the number of the queries' heads for each of the keys', and keys and values for every head."""
    heads = [sizes(each)[1] for each in (query, key)]
    groups = heads[0] // heads[1] if heads[0] and heads[1] else 1
    if groups == 1:
        return 1, key, value

    def repeated(each: Any) -> Any:
        wide = op.Expand(op.Unsqueeze(each, ints([2])), ints([1, 1, groups, 1, 1]))
        return reshape(wide, [0, int(heads[0] or 0), -1, static_sizes(each, 3, _NAME)[0]])

    return groups, repeated(key), repeated(value)


def _probabilities(query: Any, key: Any, is_causal: bool, attn_mask: Any, factor: Any) -> Any:
    scores = op.MatMul(op.Mul(query, factor), _transposed(key))
    if attn_mask is not None:
        scores = op.Add(scores, attn_mask)
    if is_causal:
        size = op.Concat(op.Shape(query, start=2, end=3), op.Shape(key, start=2, end=3), axis=0)
        allowed = op.Trilu(op.Expand(constant(1, ir.DataType.INT64), size), upper=0)
        scores = op.Where(op.Cast(allowed, to=int(ir.DataType.BOOL)), scores, constant(-math.inf, query.dtype))
    P = op.Softmax(scores, axis=-1)
    if attn_mask is None:
        return P
    # A row that is masked altogether attends to nothing; softmax alone would give NaN.
    lowest = constant(-math.inf, query.dtype)
    attends = op.Greater(op.ReduceMax(scores, ints([-1]), keepdims=1), lowest)
    return op.Where(attends, P, constant(0.0, query.dtype))


def _scale(query: Any, scale: float | None) -> Any:
    return constant(1 / math.sqrt(static_sizes(query, 3, _NAME)[0]) if scale is None else scale, query.dtype)


def _transposed(value: Any) -> Any:
    return op.Transpose(value, perm=[0, 1, 3, 2])
