"""Judgement of a step that was run: errors of what it makes and changes, and what is allowed.

What the forward makes (loss, outputs, buffers) is held, element by element, to the bound of whole models, or to four
times torch's own error where that is more. A running mean is held to it relative to the spread of the values it
averages, which may cancel.

What a step changes by gradients is held in the 2-norm:

    ||d - d64|| <= max(2^-8 ||d64||, 4 ||d_torch - d64||) + 16 u ||t64|| + z

d is a gradient, or the change of a parameter or of optimizer state. The terms added are the rounding of t, and that of
gradients that are zero but for rounding, as of a bias before batch norm: z is 64 times torch's error, between u and 16 u
of the largest norm of the kind. Where four times torch's own error is needed and exceeds a tenth of ||d64||, and 1 % of
the largest norm of its kind, it would accept a wrong step: nothing is decided. The same holds for the forward above 1 %
of an output.

One error of torch's is a draw: a change that is off by less than 2^-4 is compared in up to two further samples, with each
weight moved by some 2^-7 of it. A wrong gradient is wrong in all of them.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from bnexport import tolerances
from bnexport.schema import NEW_SUFFIX
from bnexport.training.building.description import GRADIENT_SUFFIX
from bnexport.training.building.step import Step
from bnexport.verification.torch_outputs import Array, to_array
from bnexport.verification.verdict import OutputComparison

Named = dict[str, torch.Tensor]

_ROUNDINGS, _OF_ZERO = 16.0, 64.0
# Largest share of a change by which it may be off, by which another sample is tried, and by which a bound can still tell.
_SHARE, _CLOSE, _LARGEST_BOUND = 2.0**-8, 2.0**-4, 0.1


@dataclasses.dataclass(frozen=True)
class Measured:
    """A result of the exported step and of torch's own; each in float64 with its kinks.

    own_exact: None where torch's own error is not measured, and counts as zero.
    """

    got: Array
    own: Array
    exact: Array
    own_exact: Array | None


class Sample:
    """The results of a step from one state on one batch. step: torch's own."""

    def __init__(self, state: Named, results: dict[str, Measured], step: Step) -> None:
        self.results = results
        self._old = {name + NEW_SUFFIX: to_array(tensor) for name, tensor in state.items()}
        problem = step.problem
        self._model = problem.model
        self._forward = {name + NEW_SUFFIX for name in problem.buffers} | set(results) - set(self._old)
        self._forward -= {name + GRADIENT_SUFFIX for name in problem.trainable}
        self._norms: dict[str, float] = {}
        for name, result in results.items():
            kind = _kind(name)
            self._norms[kind] = max(self._norms.get(kind, 0.0), _norm(result.exact - self._old.get(name, 0)))

    def _simple(self, name: str) -> OutputComparison | None:
        """Return the comparison of a result that is not of numbers, or not of finite ones."""
        result = self.results[name]
        got, own, exact = result.got, result.own, result.exact
        if got.shape != own.shape or got.dtype != own.dtype:
            reason = f"got {got.dtype}{list(got.shape)}, expected {own.dtype}{list(own.shape)}"
            return OutputComparison(name, own.dtype.name, own.size, float("inf"), 0.0, 0.0, 0.0, False, reason)
        if not (np.isfinite(own).all() and np.isfinite(exact).all()):
            return _held(name, own, 0.0, 0.0, doubt="torch's own values are not finite")
        if not np.issubdtype(own.dtype, np.floating):
            return _held(name, own, _largest(got - exact), 0.0)
        return None

    def compare(self, name: str) -> tuple[OutputComparison, bool]:
        """Compare a result. True where more may decide otherwise: torch's own error, if it is not measured, or another
        sample, for a change that is nearly right.
        """
        found = self._simple(name)
        if found is not None:
            return found, False
        result = self.results[name]
        error = result.got.astype(np.float64) - result.exact
        measured = result.own_exact is not None
        own_error = np.zeros(()) if result.own_exact is None else result.own - result.own_exact
        if name in self._forward:
            found = self._of_forward(name, error, own_error)
            return found, not found.passed and not measured
        found = self._of_change(name, error, own_error)
        close = _norm(error) <= _CLOSE * _norm(result.exact - self._old.get(name, 0)) + found.atol
        return found, not found.passed and (not measured or close)

    def _of_forward(self, name: str, errors: Array, own_errors: Array) -> OutputComparison:
        result, error = self.results[name], _largest(errors)
        reference = np.append(result.exact, self._scale_of_mean(name))
        table, size = tolerances.model(result.got.dtype.name.replace("64", "32"), reference).atol, _largest(reference)
        bound = max(table, tolerances.OWN_ERROR * _largest(own_errors))
        ill = error > table and not tolerances.is_evidence(bound, table, size)
        doubt = _ILL_CONDITIONED if ill else ""
        return _held(name, result.own, error, bound, doubt=doubt, relative=error / size if size else 0.0)

    def _of_change(self, name: str, errors: Array, own_errors: Array) -> OutputComparison:
        result, error, own_error = self.results[name], _norm(errors), _norm(own_errors)
        # eps and momentum are float32 attributes in ONNX; torch holds them in float64.
        dtype = result.own.dtype
        unit = tolerances.UNIT_ROUNDOFF["float32" if dtype == np.float64 else dtype.name]
        size, kind = _norm(result.exact - self._old.get(name, 0)), self._norms[_kind(name)]
        # Gradients that are zero but for rounding have an error of this size in torch, too; small ones have not.
        zero = float(np.clip(_OF_ZERO * own_error, unit * kind, _ROUNDINGS * unit * kind))
        rounding = _ROUNDINGS * unit * _norm(result.exact) + zero
        by_own = tolerances.OWN_ERROR * own_error
        ill = error - rounding > _SHARE * size and by_own > max(_LARGEST_BOUND * size, tolerances.LARGEST_SHARE * kind)
        largest = max(size, kind)
        return _held(
            name,
            result.own,
            error,
            max(_SHARE * size, by_own) + rounding,
            doubt=_ILL_CONDITIONED if ill else "",
            relative=error / largest if largest else 0.0,
            source="norm",
        )

    def _scale_of_mean(self, name: str) -> float:
        """Return the scale of a running mean's rounding: the spread of the values averaged over the batch."""
        layer, _, kind = name.removesuffix(NEW_SUFFIX).rpartition(".")
        variance = f"{layer}.running_var{NEW_SUFFIX}".lstrip(".")
        if kind != "running_mean" or variance not in self.results:
            return 0.0
        momentum = getattr(self._model.get_submodule(layer), "momentum", None) or 1.0
        of_batch = (self.results[variance].exact - (1.0 - momentum) * self._old[variance]) / momentum
        return float(momentum * np.sqrt(np.nan_to_num(of_batch).max(initial=0.0)))


_ILL_CONDITIONED = "the step is ill-conditioned on this batch: torch itself is as far from the step in float64"


def _held(
    name: str, own: Array, error: float, bound: float, *, doubt: str = "", relative: float = 0.0, source: str = "table"
) -> OutputComparison:
    """Return the comparison of one result. doubt: why an error within the bound decides nothing."""
    within = bool(error <= bound)
    reason = doubt if within else f"differs by {error:.3g}, allowed {bound:.3g}"
    passed, decided = within and not doubt, not (within and doubt)
    return OutputComparison(
        name, own.dtype.name, own.size, error, relative, bound, 0.0, passed, reason, source, decided
    )


def _kind(name: str) -> str:
    """Return the kind of an optimizer state, or "grad"; values of one kind have one scale: `optimizer.conv.weight.exp_avg.new`
    is "exp_avg".
    """
    if name.endswith(GRADIENT_SUFFIX):
        return GRADIENT_SUFFIX
    return name.removesuffix(NEW_SUFFIX).rpartition(".")[2] if name.startswith("optimizer.") else ""


def _norm(values: Array) -> float:
    """Compute the 2-norm; NaN counts as infinite."""
    return float(np.nan_to_num(np.linalg.norm(np.asarray(values, np.float64)), nan=np.inf))


def _largest(values: Array) -> float:
    """Return the largest magnitude; NaN counts as infinite."""
    return float(np.nan_to_num(np.abs(np.asarray(values, np.float64)), nan=np.inf).max(initial=0.0))
