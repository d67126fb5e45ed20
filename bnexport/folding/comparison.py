"""One output of two models, number by number.

The bound is that of `bnexport.tolerances.model`, relative to the largest value of the output, in the
coarsest float type that the models compute in. A Sigmoid, Softmax or Tanh is computed to an absolute
error of about u, whatever its value, and its slope is at most 1: such an output is bounded by the bound
of the values in front of it plus 4 u, and those values are compared as an output of their own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport import tolerances
from bnexport.model_io import walk

# Coarsest first.
_FLOATS = ("bfloat16", "float16", "float32", "float64")
_SATURATING = 4.0


@dataclasses.dataclass(frozen=True)
class OutputComparison:
    """One output over all samples. max_rel_diff: max_abs_diff over the largest finite reference value."""

    name: str
    dtype: str
    elements: int
    max_abs_diff: float
    max_rel_diff: float
    atol: float
    rtol: float
    passed: bool
    reason: str | None = None


def compare_output(
    name: str,
    expected: list[Any],
    got: list[Any],
    working: str,
    atol: float | None = None,
    rtol: float | None = None,
    before: list[Any] | None = None,
) -> OutputComparison:
    """All samples of one output; the largest errors, and the first reason to fail.

    before: the reference's values in front of a saturating function that makes this output.
    """
    worst_abs = worst_rel = 0.0
    elements, reason, bound = 0, None, tolerances.Tolerance(rtol or 0.0, atol or 0.0)
    dtype = "unknown"
    for index, (reference, value) in enumerate(zip(expected, got, strict=True)):
        if not isinstance(reference, np.ndarray) or not isinstance(value, np.ndarray):
            reason = reason or (None if _same(reference, value) else "sequences or maps differ")
            elements += 1
            continue
        dtype = str(reference.dtype)
        elements += reference.size
        if reference.shape != value.shape or reference.dtype != value.dtype:
            reason = reason or f"got {value.dtype}{list(value.shape)}, expected {dtype}{list(reference.shape)}"
            continue
        if reference.dtype.kind not in "f" and dtype != "bfloat16":
            unequal = int((reference != value).sum())
            reason = reason or (f"{unequal} of {reference.size} values differ" if unequal else None)
            continue
        exact, near = reference.astype(np.float64), value.astype(np.float64)
        if atol is None and rtol is None:
            bound = tolerances.model(_coarser(working, dtype), exact if before is None else before[index])
            if before is not None:
                bound += tolerances.Tolerance(0.0, _SATURATING * tolerances.UNIT_ROUNDOFF[_coarser(working, dtype)])
        finite = np.isfinite(exact)
        if not np.array_equal(finite, np.isfinite(near)) or not np.array_equal(
            exact[~finite], near[~finite], equal_nan=True
        ):
            reason = reason or "NaN or infinite values are not at the same places"
            continue
        if exact.size and not finite.any():
            reason = reason or "the reference has no finite value to compare with"
        difference = np.abs(near - exact, where=finite, out=np.zeros_like(exact))
        largest = float(np.abs(exact[finite]).max(initial=0.0))
        worst = float(difference.max(initial=0.0))
        worst_abs = max(worst_abs, worst)
        worst_rel = max(worst_rel, worst / largest if largest else (np.inf if worst else 0.0))
        excess = difference - bound.atol - bound.rtol * np.abs(exact, where=finite, out=np.zeros_like(exact))
        if excess.size and excess.max() > 0:
            reason = reason or f"differs by {worst:.3g}, allowed {bound.atol:.3g} + {bound.rtol:.3g} * |value|"
    return OutputComparison(name, dtype, elements, worst_abs, worst_rel, bound.atol, bound.rtol, reason is None, reason)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    return bool(np.array_equal(first, second))


def _coarser(first: str, second: str) -> str:
    return min(first, second, key=lambda name: _FLOATS.index(name) if name in _FLOATS else len(_FLOATS))


def working_type(*models: ir.Model) -> str:
    """The coarsest float type of any value or parameter."""
    found = "float64"
    for model in models:
        for graph in walk.graphs(model):
            values = [
                *graph.inputs,
                *graph.initializers.values(),
                *(output for node in graph for output in node.outputs),
            ]
            for value in values:
                name = value.dtype.numpy().name if value.dtype is not None and value.dtype.is_floating_point() else ""
                if name in _FLOATS:
                    found = _coarser(found, name)
    return found
