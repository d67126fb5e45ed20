"""Gradients of activations that torch's decompositions leave whole.

silu = x s           d silu = s (1 + x (1 - s))               s = sigmoid(x)
mish = x t           d mish = t + x s (1 - t^2)               t = tanh(softplus(x))
"""

from __future__ import annotations

from typing import Any

from bnexport.training.translations.values import constant, op


def silu_backward(grad_output: Any, input: Any) -> Any:
    """aten::silu_backward."""
    s, one = op.Sigmoid(input), constant(1.0, input.dtype)
    return op.Mul(grad_output, op.Mul(s, op.Add(one, op.Mul(input, op.Sub(one, s)))))


def mish_backward(grad_output: Any, input: Any) -> Any:
    """aten::mish_backward."""
    s, t = op.Sigmoid(input), op.Tanh(op.Softplus(input))
    slope = op.Mul(op.Mul(input, s), op.Sub(constant(1.0, input.dtype), op.Mul(t, t)))
    return op.Mul(grad_output, op.Add(t, slope))
