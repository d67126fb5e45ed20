"""Constants and sizes for the translations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import opset18

from bnexport.errors import UnsupportedModelError

# The stubs of onnxscript know finished tensors only, not the symbolic values of an exporter.
op: Any = opset18


def ints(values: Sequence[int]) -> Any:
    """Return a constant int64 vector."""
    return op.Constant(value_ints=[int(value) for value in values])


def constant(value: np.ndarray | float, dtype: ir.DataType) -> Any:
    """Return a constant of any rank, rounded once to its type.

    Types and shapes are known of an operator's arguments; values that a translation makes have none yet.
    """
    return op.Constant(value=ir.tensor(np.array(value, dtype.numpy(), order="C")))


def sizes(value: Any) -> list[int | None]:
    """Return the shape of `value`; None for a dynamic size."""
    return [size if isinstance(size, int) else None for size in value.shape]


def static_sizes(value: Any, first: int, operator: str) -> list[int]:
    """Return the sizes of `value` from dimension `first` on, which have to be static for `operator`.

    A {} in the operator's name stands for the number of spatial dimensions.
    """
    result = sizes(value)[first:]
    known = [size for size in result if size is not None]
    if len(known) != len(result):
        shown = ", ".join(str(size) for size in value.shape)
        raise UnsupportedModelError(
            f"{operator.format(len(value.shape) - 2)}: got a tensor of shape ({shown}), expected static sizes from dimension {first} on; "
            "export with only the batch dimension dynamic"
        )
    return known


def spread(values: Sequence[int] | int, count: int) -> list[int]:
    """Expand torch's sizes of a window: one number stands for all `count` dimensions."""
    numbers = [values] if isinstance(values, int) else [int(value) for value in values]
    return numbers * count if len(numbers) == 1 else numbers


def reshape(value: Any, shape: Sequence[int]) -> Any:
    """Reshape with ONNX's 0 (keep) and -1 (infer)."""
    return op.Reshape(value, ints(shape))


def crop(value: Any, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int]) -> Any:
    return op.Slice(value, ints(starts), ints(ends), ints(axes))


def only_needed(gradients: Iterable[Any]) -> tuple[Any, ...]:
    """Return outputs for torch.onnx, which does not support None: an unused constant in its place."""
    return tuple(op.Constant(value_float=0.0) if gradient is None else gradient for gradient in gradients)
