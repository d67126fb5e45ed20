"""Comparison of an exported step in ONNX Runtime with the same step of the caller's own module in torch.

Both are measured from that step computed in float64. What the forward makes (loss, outputs, buffers) is
held, element by element, to the bound of whole models, or to four times torch's own error where that is more.
A running mean is held to it relative to the spread of the values it averages, which may cancel.

Gradients jump: a ReLU or a maximum whose inputs are equal but for rounding goes either way, and one that
goes the other way changes every gradient before it, by 1e-3 to 2e-2 of its 2-norm in networks from a few
layers to ResNet-50, in torch as in any runtime. So what a step changes by gradients is held in the 2-norm:

    ||d - d64|| <= max(2^-4 ||d64||, 4 ||d_torch - d64||) + 16 u ||t64|| + 16 u (largest norm of its kind)

Where torch's own error makes that bound larger than ||d64||, and than 1 % of the largest norm of its kind, it
would accept any step: such a batch decides nothing. The same holds for the forward above 1 % of an output.

d is the change of a parameter or of optimizer state (a gradient itself in mode "gradients"). The third term
is the rounding of t; the last is for gradients that are zero but for rounding, as that of a bias before
batch norm. A wrong translation is off by the size of the gradient itself. The optimizer starts from random
state: from zeros, Adam's first update is the gradient's sign, and rounding would decide many of them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch

from bnexport import tolerances
from bnexport.errors import LibraryError, VerificationError, first_line
from bnexport.exporting.wrapper import crosses_processes
from bnexport.runtime import engine
from bnexport.runtime.engine import EngineFailure
from bnexport.schema import NEW_SUFFIX
from bnexport.sync_bn.copies import copy_model
from bnexport.training.building.description import GRADIENT_SUFFIX, STEP
from bnexport.training.building.graph import uses_library
from bnexport.training.building.step import Step
from bnexport.verification.torch_outputs import Array, in_double, to_array
from bnexport.verification.verdict import OutputComparison, Verification, nearest

Tensor = torch.Tensor
Named = dict[str, Tensor]

_WARM_STEPS = 10
_JUMP = 2.0**-4


def check(
    model: ir.Model,
    step: Step,
    original: torch.nn.Module,
    batch: dict[str, Tensor],
    lr: Tensor | None,
    others: Sequence[dict[str, Tensor]] = (),
) -> Verification:
    """Run the graph and the function on `batch` from one state. Raises VerificationError if ORT cannot.

    Where the graph takes batches of any size, both run on a doubled batch, too: what was recorded as a number, such
    as the size in a mean, is wrong there.

    original: a copy of the caller's module; where it cannot run here, the reference is the step's own model.
    others: batches of other sizes, of which the model's code asks. Sizes that the module refuses are left out.
    """
    if crosses_processes(step.problem.model):
        return Verification.skipped("its statistics span several processes; compare it where the group runs")
    try:
        label = engine.label(engine.ENGINES[0])
        runtime = engine.open(model, options=engine.session_options(True if uses_library(model) else None))
    except ImportError:
        return Verification.skipped("onnxruntime is not installed")
    except LibraryError as error:
        return Verification.skipped(str(error))
    except EngineFailure as failure:
        raise VerificationError(f"{label} cannot load the exported training step: {failure.detail}") from failure
    state, names = _warm(step.initial_state()), runtime.outputs
    reference, cause = _with_model(step, original), ""
    errors: list[OutputComparison] = []
    judged = 0
    for index, arrays in enumerate([*_batches(model, batch), *others]):
        tensors = tuple(arrays.values())
        try:
            own = reference(state, tensors, lr)
        except Exception as error:  # what the model's code raises: some packages' batch norms run on GPUs only
            if index:
                continue
            reference, cause = step, first_line(error)
            own = reference(state, tensors, lr)
        arguments = {**state, **arrays, **({} if lr is None else {"lr": lr})}
        try:
            got = dict(zip(names, runtime.run({key: to_array(arguments[key]) for key in runtime.inputs}, names)))
        except EngineFailure as error:
            sizes = ", ".join(f"{name} {tuple(rows.shape)}" for name, rows in arrays.items())
            raise VerificationError(
                f"{label} cannot run the exported training step on {sizes}: {error.detail}"
            ) from error
        try:
            exact = in_float64(reference)(in_double(state), tuple(in_double(arrays).values()), lr)
        except (RuntimeError, TypeError):
            # The loss holds float32 tensors, or the model calls something without float64: torch's own is the truth.
            exact = own
        judge = _Judge(state, {name: (got[name], to_array(own[name]), to_array(exact[name])) for name in names}, step)
        found = [dataclasses.replace(judge(name), engine=label) for name in names]
        if index and any(error.failed for error in found):
            sizes = ", ".join(f"{name} {tuple(rows.shape)}" for name, rows in arrays.items())
            more = f", with {sizes}; a model whose code takes the batch size as a number exports with dynamic=False"
            found = [dataclasses.replace(error, reason=error.reason + more) for error in found if error.failed]
        errors += found
        judged += 1
    return Verification.of(
        nearest(errors),
        engine=label,
        reason=cause,
        reference="converted" if cause else "original",
        samples=judged,
    )


def _batches(model: ir.Model, batch: Named) -> list[Named]:
    """Return the example batch, and twice its rows if the graph takes any number of them."""
    dynamic = {
        value.name for value in model.graph.inputs if value.shape is not None and not all(map(_is_fixed, value.shape))
    }
    if not dynamic & batch.keys():
        return [batch]
    return [batch, {name: torch.cat([rows, rows]) if name in dynamic else rows for name, rows in batch.items()}]


def _is_fixed(size: int | ir.SymbolicDim) -> bool:
    return isinstance(size, int)


def in_float64(step: Step) -> Step:
    """Return the same step with a model, and a loss that is a module, in float64."""
    exact = _with_model(step, copy_model(step.problem.model).double())
    if isinstance(exact.problem.loss, torch.nn.Module):
        exact.problem.loss = copy.deepcopy(exact.problem.loss).double()
    return exact


def _with_model(step: Step, model: torch.nn.Module) -> Step:
    """Return the same step with another model, whose parameters and buffers have the same names."""
    problem, other = copy.copy(step.problem), copy.copy(step)
    problem.model = copy_model(model, share_parameters=True)
    other.problem = problem
    return other


def _warm(state: Named) -> Named:
    """Create random optimizer state as after some steps: momenta of both signs, second moments above zero."""
    generator = torch.Generator().manual_seed(0)
    warm = dict(state)
    for name, tensor in state.items():
        if name == STEP:
            warm[name] = torch.full_like(tensor, _WARM_STEPS)
        elif name.startswith("optimizer.") and tensor.is_floating_point():
            values = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
            squared = name.endswith("exp_avg_sq")
            warm[name] = (1e-4 * (0.5 + values) if squared else 1e-2 * (values - 0.5)).to(tensor.dtype)
    return warm


class _Judge:
    """Comparison of the results of one step: name -> (exported, torch's own, float64)."""

    def __init__(self, state: Named, results: dict[str, tuple[Array, Array, Array]], step: Step) -> None:
        self._results = results
        self._old = {name + NEW_SUFFIX: to_array(tensor) for name, tensor in state.items()}
        problem = step.problem
        self._model = problem.model
        self._forward = {name + NEW_SUFFIX for name in problem.buffers} | set(results) - set(self._old)
        self._forward -= {name + GRADIENT_SUFFIX for name in problem.trainable}
        self._norms: dict[str, float] = {}
        for name, (_, _, exact) in results.items():
            kind = _kind(name)
            self._norms[kind] = max(self._norms.get(kind, 0.0), _norm(exact - self._old.get(name, 0)))

    def __call__(self, name: str) -> OutputComparison:
        got, own, exact = self._results[name]
        if got.shape != own.shape or got.dtype != own.dtype:
            reason = f"got {got.dtype}{list(got.shape)}, expected {own.dtype}{list(own.shape)}"
            return OutputComparison(name, own.dtype.name, own.size, float("inf"), 0.0, 0.0, 0.0, False, reason)
        if not (np.isfinite(own).all() and np.isfinite(exact).all()):
            return _held(name, own, 0.0, 0.0, doubt="torch's own values are not finite")
        if not np.issubdtype(own.dtype, np.floating):
            return _held(name, own, _largest(got - exact), 0.0)
        # eps and momentum are float32 attributes in ONNX; torch holds them in float64.
        unit = tolerances.UNIT_ROUNDOFF["float32" if own.dtype == np.float64 else own.dtype.name]
        error, own_error = got.astype(np.float64) - exact, own - exact
        if name in self._forward:
            reference = np.append(exact, self._scale_of_mean(name))
            table = tolerances.model(got.dtype.name.replace("64", "32"), reference).atol
            return _judged(
                name, own, _largest(error), table, tolerances.OWN_ERROR * _largest(own_error), _largest(reference)
            )
        change, kind = _norm(exact - self._old.get(name, 0)), self._norms[_kind(name)]
        rounding = 16.0 * unit * (_norm(exact) + kind)
        own_bound = tolerances.OWN_ERROR * _norm(own_error) + rounding
        # A wrong translation is off by the change itself; a change of rounding errors alone shows nothing.
        size = max(change / tolerances.LARGEST_SHARE, kind)
        return _judged(name, own, _norm(error), _JUMP * change + rounding, own_bound, size, "norm")

    def _scale_of_mean(self, name: str) -> float:
        """Return the scale of a running mean's rounding: the spread of the values averaged over the batch."""
        layer, _, kind = name.removesuffix(NEW_SUFFIX).rpartition(".")
        variance = f"{layer}.running_var{NEW_SUFFIX}".lstrip(".")
        if kind != "running_mean" or variance not in self._results:
            return 0.0
        momentum = getattr(self._model.get_submodule(layer), "momentum", None) or 1.0
        of_batch = (self._results[variance][2] - (1.0 - momentum) * self._old[variance]) / momentum
        return float(momentum * np.sqrt(np.nan_to_num(of_batch).max(initial=0.0)))


def _judged(
    name: str, own: Array, error: float, table: float, own_bound: float, size: float, source: str = "table"
) -> OutputComparison:
    """Compare with the larger of two bounds, if that can detect a wrong step."""
    largest = max(table, own_bound)
    doubt = ""
    if error > table and not tolerances.is_evidence(largest, table, size):
        doubt = "the step is ill-conditioned on this batch: torch itself is as far from the step in float64"
    return _held(name, own, error, largest, doubt=doubt, relative=error / size if size else 0.0, source=source)


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
    """Return the kind of an optimizer state; values of one kind have one scale: `optimizer.conv.weight.exp_avg.new` is "exp_avg"."""
    return name.removesuffix(NEW_SUFFIX).rpartition(".")[2] if name.startswith("optimizer.") else ""


def _norm(values: Array) -> float:
    """Compute the 2-norm; NaN counts as infinite."""
    return float(np.nan_to_num(np.linalg.norm(np.asarray(values, np.float64)), nan=np.inf))


def _largest(values: Array) -> float:
    """Return the largest magnitude; NaN counts as infinite."""
    return float(np.nan_to_num(np.abs(np.asarray(values, np.float64)), nan=np.inf).max(initial=0.0))
