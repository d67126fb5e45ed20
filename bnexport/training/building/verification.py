"""Comparison of an exported step in ONNX Runtime with the same step of the caller's own module in torch.

Both are measured from that step computed in float64. What the forward makes (loss, outputs, buffers) is
held, element by element, to the bound of whole models, or to four times torch's own error where that is more.
A running mean is held to it relative to the spread of the values it averages, which may cancel.

Gradients jump: a ReLU or a maximum whose inputs are equal but for rounding goes either way, and one that
goes the other way changes every gradient before it, by 1e-3 to 2e-2 of its 2-norm in networks from a few
layers to ResNet-50, and by all of it where a batch norm sees four values, in torch as in any runtime. Other
weights jump elsewhere, and a wrong gradient is wrong with all of them. So what a step changes by gradients is
held in the 2-norm in up to five samples, of which all but the first have each weight moved by some 2^-7 of it:

    e = (||d - d64|| - 16 u ||t64|| - z) / ||d64||        o = ||d_torch - d64|| / ||d64||

    smallest e <= max(2^-8, 4 smallest o)               first e <= max(2^-4, 4 largest o)

d is a gradient, or the change of a parameter or of optimizer state. The terms subtracted are the rounding of t,
and that of gradients that are zero but for rounding, as of a bias before batch norm: z is 64 times torch's smallest error, between
u and 16 u of the largest norm of the kind. Samples are drawn until each tensor has
met 2^-8 in one of them: most networks need the first alone. Where four times torch's own error is needed and exceeds a
tenth of ||d64||, and 1 % of the largest norm of its kind, it would accept a wrong step: nothing is decided. The same
holds for the forward above 1 % of an output.

The weights are those of the caller's module, and with twice the rows the same but for tensors of zeros, which would
hide the gradients behind them. The optimizer starts from random state: from zeros, Adam's first update is the
gradient's sign, and rounding would decide many of them. The learning rate is one, so that a change is no smaller than
the rounding of what it changes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

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
from bnexport.training.building.description import GRADIENT_SUFFIX, LEARNING_RATE, STEP
from bnexport.training.building.graph import uses_library
from bnexport.training.building.step import Step
from bnexport.verification.torch_outputs import Array, in_double, to_array
from bnexport.verification.verdict import OutputComparison, Verification, nearest

Tensor = torch.Tensor
Named = dict[str, Tensor]

_WARM_STEPS = 10
_ROUNDINGS, _OF_ZERO = 16.0, 64.0
_SAMPLES = 5
_MOVED, _FILLED = 2.0**-7, 2.0**-3
# Largest share of a change by which one sample may be off, the batch as it is may be off, and a bound can still tell.
_SMALLEST, _JUMP, _LARGEST_BOUND = 2.0**-8, 2.0**-4, 0.1


def check(
    model: ir.Model,
    step: Step,
    original: torch.nn.Module,
    batch: dict[str, Tensor],
    lr: Tensor | None,
    others: Sequence[dict[str, Tensor]] = (),
) -> Verification:
    """Run the graph and the function on `batch` from one state. Raises VerificationError if ORT cannot.

    Where the graph takes batches of any size, the second of both runs is on a doubled batch: what was recorded as a
    number, such as the size in a mean, is wrong there.

    original: a copy of the caller's module; where it cannot run here, the reference is the step's own model. lr: None
    for a graph without optimizer.
    others: batches of other sizes, of which the model's code asks. Sizes that the module refuses are left out.
    """
    if crosses_processes(step.problem.model):
        return Verification.skipped("its statistics span several processes; compare it where the group runs")
    try:
        label = engine.label(engine.ENGINES[0])
        with _gradients_returned(model, step):
            runtime = engine.open(model, options=engine.session_options(True if uses_library(model) else None))
    except ImportError:
        return Verification.skipped("onnxruntime is not installed")
    except LibraryError as error:
        return Verification.skipped(str(error))
    except EngineFailure as failure:
        raise VerificationError(f"{label} cannot load the exported training step: {failure.detail}") from failure
    state = _warm(step.initial_state())
    filled = _filled(state, step)
    runs, cause = _Runs(runtime, label, step, original, lr is not None), ""
    batches = _batches(model, batch)
    starts = [(state, batch), *((filled, each) for each in (*batches[1:], *others))]
    if len(batches) == 1 and any(filled[name] is not state[name] for name in state):
        starts.append((filled, batch))
    errors: list[OutputComparison] = []
    judged = 0
    for index, (start, arrays) in enumerate(starts):
        try:
            samples = [runs.sample(start, arrays)]
        except VerificationError:
            raise
        except Exception as error:  # what the model's code raises: some packages' batch norms run on GPUs only
            if index:
                continue
            runs, cause = _Runs(runtime, label, step, step.problem.model, lr is not None), first_line(error)
            samples = [runs.sample(start, arrays)]
        found, undecided = _decided(runtime.outputs, samples)
        while undecided and len(samples) < _SAMPLES:
            samples.append(runs.sample(_moved(start, step, len(samples)), arrays))
            found, undecided = _decided(runtime.outputs, samples)
        found = [dataclasses.replace(each, engine=label) for each in found]
        if index and len(batches) > 1 and any(error.failed for error in found):
            more = f", with {_sizes(arrays)}; a model whose code takes the batch size as a number exports with dynamic=False"
            found = [dataclasses.replace(error, reason=error.reason + more) for error in found if error.failed]
        errors += found
        judged += 1
        if any(error.failed for error in found):
            break
    return Verification.of(
        nearest(errors),
        engine=label,
        reason=cause,
        reference="converted" if cause else "original",
        samples=judged,
    )


@contextlib.contextmanager
def _gradients_returned(model: ir.Model, step: Step) -> Iterator[None]:
    """Add the gradients to the outputs: in an update, old momenta hide small ones."""
    outputs = model.graph.outputs
    own = list(outputs)
    names = {name + GRADIENT_SUFFIX for name in step.problem.trainable}
    outputs.extend(
        value
        for node in model.graph
        for value in node.outputs
        if value.name in names and value not in own and value.dtype is not None
    )
    try:
        yield
    finally:
        outputs[:] = own


class _Runs:
    """The same step in ONNX Runtime, and in torch with `reference` in float32 and in float64."""

    def __init__(self, runtime: Any, label: str, step: Step, reference: torch.nn.Module, learns: bool) -> None:
        self._runtime, self._label = runtime, label
        self._own = _with_model(step, reference)
        self._exact: Step | None = None
        self._lr = torch.ones((), dtype=torch.float64) if learns else None

    def sample(self, state: Named, arrays: Named) -> _Judge:
        """Run all three. Raises VerificationError if ONNX Runtime cannot."""
        tensors, names = tuple(arrays.values()), self._runtime.outputs
        own = self._own(state, tensors, self._lr)
        arguments = {**state, **arrays, **({} if self._lr is None else {LEARNING_RATE: self._lr})}
        try:
            feeds = {key: to_array(arguments[key]) for key in self._runtime.inputs}
            got = dict(zip(names, self._runtime.run(feeds, names)))
        except EngineFailure as error:
            raise VerificationError(
                f"{self._label} cannot run the exported training step on {_sizes(arrays)}: {error.detail}"
            ) from error
        try:
            self._exact = self._exact or in_float64(self._own)
            exact = self._exact(in_double(state), tuple(in_double(arrays).values()), self._lr)
        except (RuntimeError, TypeError):
            # The loss holds float32 tensors, or the model calls something without float64: torch's own is the truth.
            exact = own
        results = {name: (got[name], to_array(own[name]), to_array(exact[name])) for name in names}
        return _Judge(state, results, self._own)


def _sizes(arrays: Named) -> str:
    return ", ".join(f"{name} {tuple(rows.shape)}" for name, rows in arrays.items())


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


def _filled(state: Named, step: Step) -> Named:
    """Replace trained weights that are all zero, as the last scale of a residual branch may be: they hide gradients."""
    generator = torch.Generator().manual_seed(0)
    filled = dict(state)
    for name in step.problem.trainable:
        if not state[name].any():
            noise = torch.randn(state[name].shape, generator=generator, dtype=torch.float32)
            filled[name] = (_FILLED * noise).to(state[name].dtype)
    return filled


def _moved(state: Named, step: Step, seed: int) -> Named:
    """Move each trained weight by a random share of it: other sums round, and other maxima are nearly equal."""
    generator = torch.Generator().manual_seed(seed)
    moved = dict(state)
    for name in step.problem.trainable:
        noise = torch.randn(state[name].shape, generator=generator, dtype=torch.float32)
        moved[name] = state[name] * (1.0 + _MOVED * noise).to(state[name].dtype)
    return moved


@dataclasses.dataclass(frozen=True)
class _Error:
    """Errors of one result in one sample: elements of the forward, or the 2-norm of a change.

    size: what they are a share of. table: the bound that holds whatever torch's own error is; of a change, the rounding of
    what changes. kind: the largest size of its kind, and its rounding; 0 for the forward.
    """

    error: float
    own: float
    size: float
    table: float
    kind: float = 0.0
    kind_rounding: float = 0.0

    def share(self, value: float) -> float:
        return value / max(self.size, 1e-300)


class _Judge:
    """Comparison of the results of one sample: name -> (exported, torch's own, float64)."""

    def __init__(self, state: Named, results: dict[str, tuple[Array, Array, Array]], step: Step) -> None:
        self.results = results
        self._old = {name + NEW_SUFFIX: to_array(tensor) for name, tensor in state.items()}
        problem = step.problem
        self._model = problem.model
        self._forward = {name + NEW_SUFFIX for name in problem.buffers} | set(results) - set(self._old)
        self._forward -= {name + GRADIENT_SUFFIX for name in problem.trainable}
        self._norms: dict[str, float] = {}
        for name, (_, _, exact) in results.items():
            kind = _kind(name)
            self._norms[kind] = max(self._norms.get(kind, 0.0), _norm(exact - self._old.get(name, 0)))

    def simple(self, name: str) -> OutputComparison | None:
        """Return the comparison of a result that no other sample changes: not of numbers, or not of finite ones."""
        got, own, exact = self.results[name]
        if got.shape != own.shape or got.dtype != own.dtype:
            reason = f"got {got.dtype}{list(got.shape)}, expected {own.dtype}{list(own.shape)}"
            return OutputComparison(name, own.dtype.name, own.size, float("inf"), 0.0, 0.0, 0.0, False, reason)
        if not (np.isfinite(own).all() and np.isfinite(exact).all()):
            return _held(name, own, 0.0, 0.0, doubt="torch's own values are not finite")
        if not np.issubdtype(own.dtype, np.floating):
            return _held(name, own, _largest(got - exact), 0.0)
        return None

    def error(self, name: str) -> _Error:
        got, own, exact = self.results[name]
        # eps and momentum are float32 attributes in ONNX; torch holds them in float64.
        unit = tolerances.UNIT_ROUNDOFF["float32" if own.dtype == np.float64 else own.dtype.name]
        error, own_error = got.astype(np.float64) - exact, own - exact
        if name in self._forward:
            reference = np.append(exact, self._scale_of_mean(name))
            table = tolerances.model(got.dtype.name.replace("64", "32"), reference).atol
            return _Error(_largest(error), _largest(own_error), _largest(reference), table)
        change, kind = _norm(exact - self._old.get(name, 0)), self._norms[_kind(name)]
        return _Error(_norm(error), _norm(own_error), change, _ROUNDINGS * unit * _norm(exact), kind, unit * kind)

    def _scale_of_mean(self, name: str) -> float:
        """Return the scale of a running mean's rounding: the spread of the values averaged over the batch."""
        layer, _, kind = name.removesuffix(NEW_SUFFIX).rpartition(".")
        variance = f"{layer}.running_var{NEW_SUFFIX}".lstrip(".")
        if kind != "running_mean" or variance not in self.results:
            return 0.0
        momentum = getattr(self._model.get_submodule(layer), "momentum", None) or 1.0
        of_batch = (self.results[variance][2] - (1.0 - momentum) * self._old[variance]) / momentum
        return float(momentum * np.sqrt(np.nan_to_num(of_batch).max(initial=0.0)))


def _decided(names: Sequence[str], samples: Sequence[_Judge]) -> tuple[list[OutputComparison], list[str]]:
    """Return the comparisons after these samples, and the names that another sample may decide."""
    found, unsettled = [], []
    for name in names:
        comparison = samples[0].simple(name)
        if comparison is None:
            own = samples[0].results[name][1]
            errors = [judge.error(name) for judge in samples if judge.simple(name) is None]
            judge = _forward_comparison if errors[0].kind == 0.0 else _change_comparison
            comparison, settled = judge(name, own, errors)
            unsettled += [] if settled else [name]
        found.append(comparison)
    return found, unsettled


def _forward_comparison(name: str, own: Array, errors: Sequence[_Error]) -> tuple[OutputComparison, bool]:
    first = errors[0]
    own_bound = tolerances.OWN_ERROR * max(each.own for each in errors)
    bound, doubt = max(first.table, own_bound), ""
    if first.error > first.table and not tolerances.is_evidence(bound, first.table, first.size):
        doubt = _ILL_CONDITIONED
    relative = first.share(first.error) if first.size else 0.0
    return _held(name, own, first.error, bound, doubt=doubt, relative=relative), first.error <= bound


def _change_comparison(name: str, own: Array, errors: Sequence[_Error]) -> tuple[OutputComparison, bool]:
    """Compare a change in all samples."""
    # Gradients that are zero but for rounding have an error of this size in torch, too; small ones have not.
    zero = _OF_ZERO * min(each.own for each in errors)
    rounding = [
        each.table + float(np.clip(zero, each.kind_rounding, _ROUNDINGS * each.kind_rounding)) for each in errors
    ]
    shares = [each.share(max(each.error - allowed, 0.0)) for each, allowed in zip(errors, rounding)]
    owns = [each.share(each.own) for each in errors]
    smallest, jump = tolerances.OWN_ERROR * min(owns), max(_JUMP, tolerances.OWN_ERROR * max(owns))
    index = int(np.argmin(shares)) if shares[0] <= jump else 0
    bound = max(_SMALLEST, smallest) if shares[0] <= jump else jump
    best = errors[index]
    doubt = ""
    if shares[index] > _SMALLEST and bound > max(_LARGEST_BOUND, best.share(tolerances.LARGEST_SHARE * best.kind)):
        doubt = _ILL_CONDITIONED
    size = max(best.size, best.kind)
    comparison = _held(
        name,
        own,
        best.error,
        bound * best.size + rounding[index],
        doubt=doubt,
        relative=best.error / size if size else 0.0,
        source="norm",
    )
    return comparison, shares[index] <= _SMALLEST and shares[0] <= jump


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
