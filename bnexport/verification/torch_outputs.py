"""The outputs of an exported model against those of its reference, number by number.

The bound is that of `bnexport.tolerances.model`, relative to the largest value of the output. An output that cancels
loses the digits that its largest value suggests, in torch as in the exported model: what the bound refuses is held
against the reference in float64, and four times the reference's own distance from that is the bound instead. Above
1 % of the output (`tolerances.is_evidence`) it would accept a wrong model as well: what exceeds it fails, what does
not is undecided, unless the exported model lies within the first bound of the float64 one.

A value that is finite in the reference must be finite in the exported model. Values that are not finite in the
reference say nothing, unless they are the same in both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from bnexport import tolerances

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class OutputError:
    """One output compared: its largest absolute difference and the bound it was held to.

    decided: False where the reference's values, as `reason` says, can show neither equality nor a difference.
    """

    name: str
    max_abs_error: float
    bound: float
    engine: str = ""
    reason: str = ""
    decided: bool = True

    @property
    def failed(self) -> bool:
        """Whether the output differs by more than its bound."""
        return not self.max_abs_error <= self.bound

    @property
    def passed(self) -> bool:
        """Whether the output was compared and lies within its bound."""
        return self.decided and not self.failed

    def summary(self) -> str:
        text = f"output {self.name!r} differs by {self.max_abs_error:.3g}, bound {self.bound:.3g} ({self.engine})"
        return f"{text}: {self.reason}" if self.reason else text


def compare(
    names: Sequence[str],
    got: Sequence[Array],
    expected: Sequence[Array],
    exact: Callable[[], Sequence[Array] | None],
    engine: str,
) -> list[OutputError]:
    """All outputs for one set of inputs.

    exact: computes the reference in float64 for these inputs, where a bound is missed; None where that fails.
    """
    references = dict(zip(names, expected, strict=True))
    errors = [
        _compare(name, value, reference, _scale(name, references))
        for name, value, reference in zip(names, got, expected, strict=True)
    ]
    if any(error.failed and np.isfinite(error.max_abs_error) for error in errors):
        truths = exact()
        if truths is not None:
            errors = [
                _hold_against_truth(error, value, reference, truth, _scale(error.name, references))
                for error, value, reference, truth in zip(errors, got, expected, truths, strict=True)
            ]
    return [dataclasses.replace(error, engine=engine) for error in errors]


def to_array(tensor: torch.Tensor) -> Array:
    """The values; bfloat16 by way of its bits."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _scale(name: str, references: dict[str, Array]) -> float:
    """A running mean may be 0 by cancellation: its rounding errors are those of data of size std."""
    stem = name.removesuffix("running_mean.new")
    variance = references.get(f"{stem}running_var.new")
    if stem == name or variance is None:
        return 0.0
    return float(np.sqrt(np.abs(variance).max(initial=0.0)))


def _compare(name: str, got: Array, reference: Array, scale: float) -> OutputError:
    if got.shape != reference.shape or got.dtype != reference.dtype:
        reason = f"got {got.dtype}{list(got.shape)}, expected {reference.dtype}{list(reference.shape)}"
        return OutputError(name, float("inf"), 0.0, reason=reason)
    bound, doubt = 0.0, ""
    dtype = reference.dtype.name
    if dtype in tolerances.UNIT_ROUNDOFF:
        values = np.append(reference.astype(np.float64), scale)
        bound = tolerances.model(dtype, values).atol
        if dtype == "float64":
            # eps and momentum are float32 attributes in ONNX; torch holds them in float64.
            bound += tolerances.UNIT_ROUNDOFF["float32"] * _largest(values)
        doubt = _doubt(got.astype(np.float64), reference.astype(np.float64))
    return OutputError(name, _difference(got, reference), bound, reason=doubt, decided=not doubt)


def _doubt(got: Array, reference: Array) -> str:
    """What hinders a decision, where the reference has values that are not finite."""
    finite = np.isfinite(reference)
    if finite.all():
        return ""
    if not finite.any():
        return "the reference has no finite value to compare with"
    if np.array_equal(got[~finite], reference[~finite], equal_nan=True):
        return ""
    return f"the reference has {int((~finite).sum())} of {finite.size} values that are NaN or infinite"


def _hold_against_truth(error: OutputError, got: Array, reference: Array, truth: Array, scale: float) -> OutputError:
    if not error.failed or got.shape != truth.shape or got.shape != reference.shape:
        return error
    own, distance = _difference(reference, truth), _difference(got, truth)
    if distance <= error.bound:
        return dataclasses.replace(error, max_abs_error=distance)
    bound = max(error.bound, tolerances.OWN_ERROR * own)
    largest = max(_largest(reference.astype(np.float64)), scale)
    doubt = error.reason
    if not tolerances.is_evidence(bound, error.bound, largest):
        doubt = doubt or (
            "the network is ill-conditioned on these inputs: torch itself differs from the model in float64 by"
            f" {own:.3g}, where its largest value is {largest:.3g}"
        )
    return OutputError(error.name, distance, bound, reason=doubt, decided=not doubt)


def _largest(values: Array) -> float:
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def _difference(one: Array, two: Array) -> float:
    """Largest absolute difference at places where the second is finite; infinite where the first is not, there."""
    one, two = one.astype(np.float64), two.astype(np.float64)
    finite = np.isfinite(two)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.abs(one[finite] - two[finite])
    return float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max(initial=0.0))
