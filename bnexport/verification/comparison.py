"""One output of two models, number by number.

The bound is that of `bnexport.tolerances.model`, relative to the largest value of the output, in the
coarsest float type that the models compute in. A Sigmoid, Softmax or Tanh is computed to an absolute
error of about u, whatever its value, and its slope is at most 1: such an output is bounded by the bound
of the values in front of it plus 4 u, and those values are compared as an output of their own.

Ill-conditioned models. Where |mean| / std of a batch norm's input is in the thousands, so are the rounding
errors of every implementation: z - mean cancels. What the bound refuses is held against the model in
float64, y*. The reference has the error e = max |y_ref - y*| itself. A folded model rounds at three places
where the reference does at one or two (weights, the sums of products, the shift), each of the size of e, so

    max |y - y*| <= 4 e

is the bound then, where it is more than the first. It grows only as the reference's own error does, and a fold
that is wrong by a thousandth of |mean| / std is far outside. Above 1 % of the output (`tolerances.is_evidence`) it
would accept a wrong fold as well: what exceeds it fails, what does not is undecided - but for a model within the first
bound, relative to y*, of y* itself, which is right whatever the reference's error is.

What cannot be decided. A reference that is not finite says nothing: an infinity of an intermediate overflow may be
a number in a folded model. Where the two are not finite alike that passes; where only the reference is not, or
where it has no finite value at all, the output is undecided. It fails only where numbers differ.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bnexport import tolerances
from bnexport.verification.verdict import OutputComparison

# Coarsest first.
FLOATS = ("bfloat16", "float16", "float32", "float64")
_SATURATING = 4.0


def compare_output(
    name: str,
    expected: list[Any],
    got: list[Any],
    working: str,
    atol: float | None = None,
    rtol: float | None = None,
    before: list[Any] | None = None,
    table: tolerances.Tolerance | None = None,
) -> OutputComparison:
    """Compare all samples of one output; return the largest errors, and the first reason to fail.

    before: the reference's values in front of a saturating function that makes this output. table: the bound instead
    of that of `bnexport.tolerances.model`.
    """
    worst_abs = worst_rel = 0.0
    elements, bound = 0, tolerances.Tolerance(rtol or 0.0, atol or 0.0)
    reason: str | None = None
    doubt: str | None = None
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
            bound = table or tolerances.model(_coarser(working, dtype), exact if before is None else before[index])
            if before is not None:
                bound += tolerances.Tolerance(0.0, _SATURATING * tolerances.UNIT_ROUNDOFF[_coarser(working, dtype)])
        finite = np.isfinite(exact)
        if not np.isfinite(near[finite]).all():
            reason = reason or "it has NaN or infinite values where the reference has finite ones"
            continue
        if exact.size and not finite.any():
            doubt = doubt or "the reference has no finite value to compare with"
        elif not np.array_equal(exact[~finite], near[~finite], equal_nan=True):
            count = int((~finite).sum())
            doubt = doubt or f"the reference has {count} of {exact.size} values that are NaN or infinite"
        difference = np.abs(near - exact, where=finite, out=np.zeros_like(exact))
        largest = float(np.abs(exact[finite]).max(initial=0.0))
        worst = float(difference.max(initial=0.0))
        worst_abs = max(worst_abs, worst)
        worst_rel = max(worst_rel, worst / largest if largest else (np.inf if worst else 0.0))
        excess = difference - bound.atol - bound.rtol * np.abs(exact, where=finite, out=np.zeros_like(exact))
        if excess.size and excess.max() > 0:
            reason = reason or f"differs by {worst:.3g}, allowed {bound}"
    source = "table" if atol is None and rtol is None else "caller"
    passed, decided = reason is None and doubt is None, reason is not None or doubt is None
    return OutputComparison(
        name,
        dtype,
        elements,
        worst_abs,
        worst_rel,
        bound.atol,
        bound.rtol,
        passed,
        reason or doubt or "",
        source,
        decided,
    )


def compare_with_truth(
    failed: OutputComparison, expected: list[Any], got: list[Any], truth: list[Any], scale: float = 0.0
) -> OutputComparison:
    """Compare an output that differs by more than the table allows with the model in float64.

    expected, got, truth: the values in the reference, the candidate and the float64 model. scale: size of the data that
    the output averages, where that is more than its own. Returns `failed` where they have no errors to compare, or where
    the candidate's is too large; undecided where the reference's is too large to judge by.
    """
    own = worst = largest = size = 0.0
    for reference, value, exact in zip(expected, got, truth, strict=True):
        arrays = (reference, value, exact)
        if not all(isinstance(array, np.ndarray) for array in arrays):
            return failed
        if not reference.shape == value.shape == exact.shape or reference.dtype != value.dtype:
            return failed
        wide = [np.asarray(array, np.float64) for array in arrays]
        finite = np.isfinite(wide[0])
        if not all(np.array_equal(finite, np.isfinite(array)) for array in wide[1:]):
            return failed
        wide = [array[finite] for array in wide]
        own = max(own, float(np.abs(wide[0] - wide[2]).max(initial=0.0)))
        worst = max(worst, float(np.abs(wide[1] - wide[2]).max(initial=0.0)))
        largest = max(largest, float(np.abs(wide[2]).max(initial=0.0)))
        size = max(size, float(np.abs(wide[0]).max(initial=0.0)))
    relative = worst / largest if largest else 0.0
    near = failed.atol * min(1.0, max(largest, scale) / size) if size else failed.atol
    bound = near if worst <= near else max(failed.atol, tolerances.OWN_ERROR * own)
    if worst > bound:
        more = f"; from the model in float64 it differs by {worst:.3g}, the reference by {own:.3g}"
        return dataclasses.replace(failed, reason=f"{failed.reason}{more}")
    reason = ""
    if worst > near and not tolerances.is_evidence(bound, failed.atol, max(size, scale)):
        reason = (
            f"the network is ill-conditioned on these inputs: the reference itself differs from the model in float64"
            f" by {own:.3g}, where its largest value is {size:.3g}"
        )
    return dataclasses.replace(
        failed,
        max_abs_diff=worst,
        max_rel_diff=relative,
        atol=bound,
        rtol=0.0,
        passed=not reason,
        reason=reason,
        bound="float64",
        decided=not reason,
    )


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    return bool(np.array_equal(first, second))


def _coarser(first: str, second: str) -> str:
    return min(first, second, key=lambda name: FLOATS.index(name) if name in FLOATS else len(FLOATS))
