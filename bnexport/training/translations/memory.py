"""Tensors without values, which later operators overwrite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport.training.translations.values import constant, ints, op


def empty_permuted(size: Sequence[Any], physical_layout: Sequence[int], dtype: int = -1, **_: Any) -> Any:
    """Translate aten::empty_permuted, with zeros; `size` holds numbers and the values of dynamic sizes."""
    del physical_layout
    kind = ir.DataType(dtype) if dtype > 0 else ir.DataType.FLOAT
    parts = [op.Reshape(part, ints([1])) if isinstance(part, ir.Value) else ints([part]) for part in size]
    return op.Expand(constant(np.zeros(1), kind), op.Concat(*parts, axis=0) if parts else ints([]))
