"""Scaled dot-product attention, which torch fuses on CPU.

With scale s (1 / sqrt(E) by default), mask m (additive) and g the gradient by the output:

    P = softmax(s q k^T + m)     o = P v
    dv = P^T g                   dP = g v^T
    dS = P (dP - rowsum(g o))    dq = s dS k       dk = s dS^T q

Where several heads of the queries share one of the keys (grouped-query attention), k and v are repeated for each of
them, and the gradients of the repeats are added.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from bnexport.training.translations.values import constant, ints, op, reshape, sizes, static_sizes

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
