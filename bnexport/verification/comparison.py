"""Comparison of one output of two models, number by number.

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

Sequences and maps are compared array by array; they must be of the same lengths and keys.

What cannot be decided. A reference that is not finite says nothing: an infinity of an intermediate overflow may be
a number in a folded model. Where the two are not finite alike that passes; where only the reference is not, or
where it has no finite value at all, the output is undecided. It fails only where numbers differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bnexport import tolerances
from bnexport.verification.verdict import OutputComparison

# Smaller inputs, for models whose outputs on the first ones decide nothing: not finite, or mostly rounding error.
#
# Float inputs x are multiplied by SCALES, powers of two, which keep every digit. The smaller x is, the less of an
# output depends on it: near x = 0 a model with wrong weights and the right biases would pass. So a pass on smaller
# inputs counts only if the bound is small next to what x changes, |y(x) - y(x / 2)|.

SCALES = tuple(2.0**-power for power in (3, 6, 9, 12))
# Largest bound, as a share of max |y(x) - y(x / 2)|. Float16's bound is 1.6 % of max |y|: x must make a sixth of y.
_VISIBLE = 0.1
HIDDEN = "where the inputs are small enough for a reference that is finite and accurate, it hardly depends on them"


def is_float(array: Any) -> bool:
    """Whether it is an array or a tensor of a float type."""
    if isinstance(array, np.ndarray):
        return array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    return bool(getattr(getattr(array, "dtype", None), "is_floating_point", False))


def scaled(inputs: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Return the inputs, arrays or tensors, those of a float type times `scale`."""
    return {name: _times(value, scale) if scale != 1.0 and is_float(value) else value for name, value in inputs.items()}


def _times(value: Any, scale: float) -> Any:
    if isinstance(value, np.ndarray):
        return (value.astype(np.float64) * scale).astype(value.dtype)
    return value * scale


def is_finite(values: Iterable[Any]) -> bool:
    """Whether all values of float types are finite."""
    return all(bool(np.isfinite(array).all()) for array in values if is_float(array))


def shows_inputs(output: OutputComparison, expected: Sequence[Any], halved: Sequence[Any]) -> bool:
    """Whether an output depends on its inputs by more than its bound hides.

    expected: the reference's values for each x; halved: those for each x / 2.
    """
    pairs = [(one.astype(np.float64), two.astype(np.float64)) for one, two in zip(expected, halved) if is_float(one)]
    if not pairs or any(one.shape != two.shape for one, two in pairs):
        return True
    bound = output.atol + output.rtol * max(float(np.abs(one).max(initial=0.0)) for one, _ in pairs)
    return is_small(bound, pairs)


def is_small(bound: float, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> bool:
    """Whether a bound of an output hides little of what x changes. pairs: y(x) and y(x / 2)."""
    return bound <= _VISIBLE * max(float(np.abs(one - two).max(initial=0.0)) for one, two in pairs)


def as_hidden(output: OutputComparison) -> OutputComparison:
    """Return the output, undecided if it passed."""
    if not output.passed:
        return output
    return dataclasses.replace(output, passed=False, decided=False, reason=HIDDEN)


def with_smaller(reason: str) -> str:
    """Extend the reason why the first inputs decide nothing, once smaller ones have been tried."""
    return f"{reason}; inputs down to 1/{round(1 / SCALES[-1])} of their size decide nothing either"


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
    found = _Differences(working, atol, rtol, table)
    for index, (reference, value) in enumerate(zip(expected, got, strict=True)):
        if not _is_alike(reference, value):
            found.elements += 1
            found.refute("sequences or maps differ in length or keys")
            continue
        for one, other in zip(_arrays(reference), _arrays(value), strict=True):
            found.add(one, other, None if before is None else before[index])
    return found.comparison(name)


class _Differences:
    """The largest differences of the arrays of one output, and the first reason to fail or to doubt."""

    def __init__(
        self, working: str, atol: float | None, rtol: float | None, table: tolerances.Tolerance | None
    ) -> None:
        self._working, self._table = working, table
        self._given = None if atol is None and rtol is None else tolerances.Tolerance(rtol or 0.0, atol or 0.0)
        self._bound = self._given or tolerances.Tolerance(0.0, 0.0)
        self._reason, self._doubt = "", ""
        # The difference and the bound of the sample that is nearest to its own bound.
        self._share = self._absolute = self._relative = 0.0
        self._dtype = "unknown"
        self.elements = 0

    def refute(self, reason: str) -> None:
        self._reason = self._reason or reason

    def add(self, reference: np.ndarray, value: np.ndarray, before: Any) -> None:
        self._dtype = str(reference.dtype)
        self.elements += reference.size
        if reference.shape != value.shape or reference.dtype != value.dtype:
            self.refute(f"got {value.dtype}{list(value.shape)}, expected {self._dtype}{list(reference.shape)}")
        elif not is_float(reference):
            unequal = int((reference != value).sum())
            if unequal:
                self.refute(f"{unequal} of {reference.size} values differ")
        else:
            self._add_floats(reference.astype(np.float64), value.astype(np.float64), before)

    def _add_floats(self, exact: np.ndarray, near: np.ndarray, before: Any) -> None:
        bound = self._given or self._bound_of(exact if before is None else before, saturated=before is not None)
        if not self._share:
            self._bound = bound
        finite = np.isfinite(exact)
        if not np.isfinite(near[finite]).all():
            self.refute("it has NaN or infinite values where the reference has finite ones")
            return
        if exact.size and not finite.any():
            self._doubt = self._doubt or "the reference has no finite value to compare with"
        elif not np.array_equal(exact[~finite], near[~finite], equal_nan=True):
            text = f"the reference has {int((~finite).sum())} of {exact.size} values that are NaN or infinite"
            self._doubt = self._doubt or text
        exact, near = exact[finite], near[finite]
        difference = np.abs(near - exact)
        largest = float(np.abs(exact).max(initial=0.0))
        worst = float(difference.max(initial=0.0))
        share = worst / (bound.atol or 1.0)
        if share >= self._share:
            self._share, self._absolute, self._bound = share, worst, bound
        self._relative = max(self._relative, worst / largest if largest else (np.inf if worst else 0.0))
        excess = difference - bound.atol - bound.rtol * np.abs(exact)
        if excess.size and excess.max() > 0:
            self.refute(f"differs by {worst:.3g}, allowed {bound}")

    def _bound_of(self, values: Any, *, saturated: bool) -> tolerances.Tolerance:
        coarsest = coarser(self._working, self._dtype)
        bound = self._table or tolerances.model(coarsest, values)
        if saturated:
            bound += tolerances.Tolerance(0.0, _SATURATING * tolerances.UNIT_ROUNDOFF[coarsest])
        return bound

    def comparison(self, name: str) -> OutputComparison:
        return OutputComparison(
            name,
            self._dtype,
            self.elements,
            self._absolute,
            self._relative,
            self._bound.atol,
            self._bound.rtol,
            passed=not self._reason and not self._doubt,
            reason=self._reason or self._doubt,
            bound="table" if self._given is None else "caller",
            decided=bool(self._reason) or not self._doubt,
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
    partly = False
    for sample in zip(expected, got, truth, strict=True):
        if not _is_alike(*sample[:2]) or not _is_alike(*sample[1:]):
            return failed
        for reference, value, exact in zip(*map(_arrays, sample), strict=True):
            if not reference.shape == value.shape == exact.shape or reference.dtype != value.dtype:
                return failed
            if not all(map(is_float, (reference, value, exact))):
                return failed
            wide = [array.astype(np.float64) for array in (reference, value, exact)]
            finite = np.isfinite(wide[0])
            if not all(np.isfinite(array[finite]).all() for array in wide):
                return failed
            partly = partly or not np.array_equal(wide[0][~finite], wide[1][~finite], equal_nan=True)
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
    reason = "the reference has values that are NaN or infinite" if partly else ""
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


def is_same(first: Any, second: Any) -> bool:
    """Whether two values of an output are equal, bit for bit but for NaNs."""
    return _is_alike(first, second) and all(
        one.dtype == other.dtype and np.array_equal(one, other, equal_nan=is_float(one))
        for one, other in zip(_arrays(first), _arrays(second), strict=True)
    )


def _is_alike(first: Any, second: Any) -> bool:
    """Whether two values have arrays at the same places of sequences of the same lengths and maps of the same keys."""
    return bool(_outline(first) == _outline(second))


def _outline(value: Any) -> Any:
    """Return a value with None in place of each array."""
    if isinstance(value, (list, tuple)):
        return [_outline(each) for each in value]
    return {key: _outline(each) for key, each in value.items()} if isinstance(value, dict) else None


def _arrays(value: Any) -> list[np.ndarray]:
    """Return the arrays of a value: its own, or those of a sequence or map, in the order of its keys."""
    if isinstance(value, (list, tuple)):
        return [array for item in value for array in _arrays(item)]
    if isinstance(value, dict):
        return [array for key in sorted(value) for array in _arrays(value[key])]
    return [np.asarray(value)]


def coarser(first: str, second: str) -> str:
    """Return the coarser of two types."""
    return min(first, second, key=lambda name: FLOATS.index(name) if name in FLOATS else len(FLOATS))
