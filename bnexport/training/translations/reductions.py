"""aten::sum and aten::mean of a whole tensor, as losses end with.

ONNX Runtime adds float32 values one after the other in a few lanes, which loses 2e-6 of a mean over a map of scores;
torch adds in blocks. Here they are added in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from bnexport.training.translations.values import op


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
