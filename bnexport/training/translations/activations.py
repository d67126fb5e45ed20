"""Gradients of activations.

relu = max(x, 0)     d relu = 0 where x <= 0, else 1; hardtanh likewise at both of its ends. x may be the output.

silu = x s           d silu = s (1 + x (1 - s))               s = sigmoid(x)
mish = x t           d mish = t + x s (1 - t^2)               t = tanh(softplus(x))
"""

from __future__ import annotations

from typing import Any

from bnexport.training.translations.values import constant, op


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
