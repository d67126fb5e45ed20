"""Arithmetic with a number, which may depend on the batch size; torch.onnx would make it a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from bnexport.training.translations.values import constant, op


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
