"""The outputs of an exported model against those of its torch reference, by the bounds of `comparison`.

Statistics come in the output's own units: a running mean may be 0 by cancellation, and its rounding errors are those
of data of the size of the standard deviation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from bnexport import schema, tolerances
from bnexport.verification.comparison import compare_output, compare_with_truth
from bnexport.verification.verdict import OutputComparison

Array = np.ndarray[Any, Any]


def compare(
    names: Sequence[str],
    got: Sequence[Array],
    expected: Sequence[Array],
    exact: Callable[[], Sequence[Array] | None],
    engine: str,
) -> list[OutputComparison]:
    """Compare all outputs for one set of inputs.

    exact: computes the reference in float64 for these inputs, where a bound is missed; None where that fails.
    """
    references = dict(zip(names, expected, strict=True))
    scales = [_scale(name, references) for name in names]
    outputs = [
        compare_output(name, [reference], [value], reference.dtype.name, table=_table(reference, scale))
        for name, value, reference, scale in zip(names, got, expected, scales, strict=True)
    ]
    if any(output.failed and 0 < output.max_abs_diff < np.inf for output in outputs):
        truths = exact()
        if truths is not None:
            outputs = [
                compare_with_truth(output, [reference], [value], [truth], scale) if output.failed else output
                for output, value, reference, truth, scale in zip(outputs, got, expected, truths, scales, strict=True)
            ]
    return [dataclasses.replace(output, engine=engine) for output in outputs]


def to_array(tensor: torch.Tensor) -> Array:
    """Return the values in NumPy; bfloat16 by way of its bits."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _scale(name: str, references: dict[str, Array]) -> float:
    """Return the size of the data that a running mean averages; 0 for other outputs."""
    stem = name.removesuffix(f"running_mean{schema.NEW_SUFFIX}")
    variance = references.get(f"{stem}running_var{schema.NEW_SUFFIX}")
    if stem == name or variance is None:
        return 0.0
    return float(np.sqrt(np.abs(variance).max(initial=0.0)))


def _table(reference: Array, scale: float) -> tolerances.Tolerance | None:
    if reference.dtype.name not in tolerances.UNIT_ROUNDOFF:
        return None
    values = np.append(reference.astype(np.float64), scale)
    bound = tolerances.model(reference.dtype.name, values)
    if reference.dtype == np.float64:
        # eps and momentum are float32 attributes in ONNX; torch holds them in float64.
        largest = float(np.abs(values[np.isfinite(values)]).max(initial=0.0))
        bound += tolerances.Tolerance(0.0, tolerances.UNIT_ROUNDOFF["float32"] * largest)
    return bound
