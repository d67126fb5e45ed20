"""Arithmetic with a number that depends on the batch size; torch.onnx would make it a constant."""

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
