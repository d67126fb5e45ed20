"""Scaled dot-product attention, which torch fuses on CPU.

With scale s (1 / sqrt(E) by default), mask m (additive) and g the gradient by the output:

    P = softmax(s q k^T + m)     o = P v
    dv = P^T g                   dP = g v^T
    dS = P (dP - rowsum(g o))    dq = s dS k       dk = s dS^T q
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from bnexport.training.translations.values import constant, ints, op, static_sizes

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

    query (N, H, L, E), key (N, H, S, E), value (N, H, S, E); torch comes here without dropout only.
    The gradient recomputes P, so logsumexp is left out.
    """
    del dropout_p
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
    P = _probabilities(query, key, is_causal, attn_mask, factor)
    row = op.ReduceSum(op.Mul(grad_out, out), ints([-1]), keepdims=1)
    dS = op.Mul(op.Mul(P, op.Sub(op.MatMul(grad_out, _transposed(value)), row)), factor)
    return op.MatMul(dS, key), op.MatMul(_transposed(dS), query), op.MatMul(_transposed(P), grad_out)


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
