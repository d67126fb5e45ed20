"""Comparison of an exported step in ONNX Runtime with the same step of the caller's own module in torch.

Both are measured from that step computed in float64. Its gradients take over from each what reaches its kinks (`kinks`):
a ReLU whose input is zero but for rounding goes either way, and a float64 that goes the other way than the graph says
nothing about the graph. What the forward makes is compared with a float64 that takes over nothing: there, a small error of
each layer adds up. Errors and bounds are those of `judgement`; torch's own error is measured where they need it.

The first step starts from the weights of the caller's module. The second starts from others, from the statistics and
counters that the first one made, and runs on twice the rows where the graph takes any number: what was recorded as a
constant, a parameter or the size in a mean, is wrong there. Tensors of zeros, which would hide the gradients behind
them, are filled. torch's module holds its state itself (`OwnState`). The optimizer starts from random state: from
zeros, Adam's first update is the gradient's sign, and rounding would decide many of them. The learning rate is one, so
that a change is no smaller than the rounding of what it changes.
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
from bnexport.errors import LibraryError, UnsupportedModelError, VerificationError, first_line
from bnexport.exporting.wrapper import crosses_processes
from bnexport.modules.copies import copy_model
from bnexport.modules.tensors import Array, in_double, to_array
from bnexport.runtime import engine
from bnexport.runtime.engine import EngineFailure
from bnexport.schema import NEW_SUFFIX
from bnexport.training.graph import uses_library
from bnexport.training.state import ACCUMULATED, GRADIENT_SUFFIX, LEARNING_RATE, STEP
from bnexport.training.step import Follower, OwnState, Recorder, Step
from bnexport.verification.verdict import OutputComparison, Verification, nearest

# Judgement of a step that was run: errors of what it makes and changes, and what is allowed.
#
# What the forward makes (loss, outputs, buffers) is held, element by element, to the bound of whole models, or to four
# times torch's own error where that is more. A running mean is held to it relative to the spread of the values it
# averages, which may cancel.
#
# What a step changes by gradients is held in the 2-norm:
#
#     ||d - d64|| <= max(2^-8 ||d64||, 4 ||d_torch - d64||) + 16 u ||t64|| + z
#
# d is a gradient, or the change of a parameter or of optimizer state. The terms added are the rounding of t, and that of
# gradients that are zero but for rounding, as of a bias before batch norm: z is 64 times torch's error, between u and 16 u
# of the largest norm of the kind. Where four times torch's own error is needed and exceeds a tenth of ||d64||, and 1 % of
# the largest norm of its kind, it would accept a wrong step: nothing is decided. The same holds for the forward above 1 %
# of an output.
#
# One error of torch's is a draw: a change that is off by less than 2^-4 is compared in up to two further samples, with each
# weight moved by some 2^-7 of it. A wrong gradient is wrong in all of them.

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


Tensor = torch.Tensor

_OF_SIZES = "; a model whose code takes the batch size as a number exports with dynamic=False"
_OF_STATE = ", in a step from other weights and statistics: the code reads state from elsewhere than its modules"

_WARM_STEPS = 10
_MORE_SAMPLES = 2
_MOVED, _CHANGED, _FILLED = 2.0**-7, 2.0**-4, 2.0**-3


def check(
    model: ir.Model,
    step: Step,
    original: torch.nn.Module,
    batch: dict[str, Tensor],
    lr: Tensor | None,
    others: Sequence[dict[str, Tensor]] = (),
    kinks_reached: Sequence[str] = (),
) -> Verification:
    """Run the graph and the function, from two states. Raises VerificationError if ORT cannot.

    original: a copy of the caller's module; where it cannot run here, the reference is the step's own model. lr: None
    for a graph without optimizer.
    others: batches of other sizes, of which the model's code asks. Sizes that the module refuses are left out.
    kinks_reached: the graph's values that reach kinks, in order; "" where it has none.
    """
    if crosses_processes(step.problem.model):
        return Verification.skipped("its statistics span several processes; compare it where the group runs")
    try:
        label = engine.label(engine.ENGINES[0])
        compared, returned = _results(model, step), set(kinks_reached) - {""}
        with _returned(model, {*compared, *returned}):
            runtime = engine.open(model, options=engine.default_options(True if uses_library(model) else None))
    except ImportError:
        return Verification.skipped("onnxruntime is not installed")
    except LibraryError as error:
        return Verification.skipped(str(error))
    except EngineFailure as failure:
        if any(value.dtype == ir.DataType.BFLOAT16 for node in model.graph for value in node.outputs):
            raise UnsupportedModelError(
                "the step computes in bfloat16, as torch.autocast does on CPUs, which onnxruntime cannot run"
                f" ({failure.detail}); export without autocast, or with torch.autocast(..., dtype=torch.float16)"
            ) from failure
        raise VerificationError(f"{label} cannot load the exported training step: {failure.detail}") from failure
    state = _warm(step.initial_state())
    runs, cause = _Runs(runtime, label, step, original, lr is not None, kinks_reached), ""
    batches = _batches(model, batch)
    try:
        errors = runs.judge(compared, state, batch)
    except VerificationError:
        raise
    except Exception as error:  # what the model's code raises: some packages' batch norms run on GPUs only
        runs, cause = runs.of(step.problem.model), first_line(error)
        errors = runs.judge(compared, state, batch)
    judged, second = 1, _second(state, step, runs.forward(state, batch))
    for arrays in () if any(error.failed for error in errors) else (batches[-1], *others):
        try:
            found = runs.judge(compared, second, arrays)
            if any(error.failed for error in found):
                sized = arrays is not batch and not any(each.failed for each in runs.judge(compared, second, batch))
                more = f", with {_sizes(arrays)}{_OF_SIZES}" if sized else _OF_STATE
                found = [dataclasses.replace(error, reason=error.reason + more) for error in found if error.failed]
        except VerificationError:
            raise
        except Exception:  # a size that the model's code refuses
            continue
        errors += found
        judged += 1
        if any(error.failed for error in found):
            break
    return Verification.of(
        nearest([dataclasses.replace(error, engine=label) for error in errors]),
        engine=label,
        reason=cause,
        reference="converted" if cause else "original",
        samples=judged,
    )


def _results(model: ir.Model, step: Step) -> list[str]:
    """Return what is compared: the outputs, and the gradients, which old momenta hide in an update."""
    outputs = [str(value.name) for value in model.graph.outputs]
    made = {value.name for node in model.graph for value in node.outputs if value.dtype is not None}
    gradients = [name + GRADIENT_SUFFIX for name in step.problem.trainable]
    return [*outputs, *(name for name in gradients if name in made and name not in outputs)]


@contextlib.contextmanager
def _returned(model: ir.Model, names: set[str]) -> Iterator[None]:
    """Add the values `names` to the outputs."""
    outputs = model.graph.outputs
    own = list(outputs)
    outputs.extend(value for node in model.graph for value in node.outputs if value.name in names and value not in own)
    try:
        yield
    finally:
        outputs[:] = own


class _Runs:
    """The same step in ONNX Runtime, and in torch with `reference` in float32 and in float64."""

    def __init__(
        self,
        runtime: Any,
        label: str,
        step: Step,
        reference: torch.nn.Module,
        learns: bool,
        kinks_reached: Sequence[str],
    ) -> None:
        self._runtime, self._label = runtime, label
        self._step, self._own = step, _with_model(step, copy_model(reference))
        self._exact: Step | None = None
        self._learns, self._kinks = learns, kinks_reached
        self._lr = torch.ones((), dtype=torch.float64) if learns else None

    def of(self, reference: torch.nn.Module) -> _Runs:
        """Return the same runs with another reference."""
        return _Runs(self._runtime, self._label, self._step, reference, self._learns, self._kinks)

    def forward(self, state: Named, arrays: Named) -> Named:
        """Run torch's own forward."""
        return self._own.forward(state, tuple(arrays.values()))

    def judge(self, names: Sequence[str], state: Named, arrays: Named) -> list[OutputComparison]:
        """Compare the results `names`. Raises VerificationError if ONNX Runtime cannot run."""
        found: dict[str, OutputComparison] = {}
        undecided: Sequence[str] = names
        for attempt in range(2 + _MORE_SAMPLES):
            start = state if attempt < 2 else _moved(state, self._step, attempt)
            sample = self._sample(names, start, arrays, own_errors=attempt > 0)
            compared = {name: sample.compare(name) for name in undecided}
            found |= {name: comparison for name, (comparison, _) in compared.items()}
            undecided = [name for name, (_, again) in compared.items() if again]
            if not undecided:
                break
        return [found[name] for name in names]

    def _sample(self, names: Sequence[str], state: Named, arrays: Named, *, own_errors: bool) -> Sample:
        """Run all three. own_errors: measure torch's own, too."""
        recorder = Recorder() if own_errors else None
        own = self._own(state, tuple(arrays.values()), self._lr, kinks=recorder)
        arguments = {**state, **arrays, **({} if self._lr is None else {LEARNING_RATE: self._lr})}
        try:
            feeds = {key: to_array(arguments[key]) for key in self._runtime.inputs}
            got = dict(zip(self._runtime.outputs, self._runtime.run(feeds, self._runtime.outputs)))
        except EngineFailure as error:
            raise VerificationError(
                f"{self._label} cannot run the exported training step on {_sizes(arrays)}: {error.detail}"
            ) from error
        forward = self._exactly(state, arrays, None)
        exact = self._exactly(state, arrays, [got.get(name) for name in self._kinks]) | forward
        of_own = None
        if recorder is not None:
            of_own = self._exactly(state, arrays, [value.numpy() for value in recorder.values]) | forward
        results = {
            name: Measured(
                got[name],
                to_array(own[name]),
                to_array(exact[name]),
                None if of_own is None else to_array(of_own[name]),
            )
            for name in names
        }
        return Sample(state, results, self._own)

    def _exactly(self, state: Named, arrays: Named, reached: Sequence[Array | None] | None) -> Named:
        """Run the step in float64, following `reached` at its kinks, or for None its forward alone; in float32 where it has
        no float64.
        """

        def run(step: Step, state: Named, arrays: Named) -> Named:
            rows = tuple(arrays.values())
            if reached is None:
                return step.forward(state, rows)
            model = step.problem.model
            follower = Follower(reached, [*state.values(), *rows, *model.parameters(), *model.buffers()])
            return step(state, rows, self._lr, kinks=follower)

        try:
            self._exact = self._exact or in_float64(self._own)
            return run(self._exact, in_double(state), in_double(arrays))
        except (RuntimeError, TypeError):
            # The loss holds float32 tensors, or the model calls something without float64.
            return run(self._own, state, arrays)


def _sizes(arrays: Named) -> str:
    return ", ".join(f"{name} {tuple(rows.shape)}" for name, rows in arrays.items())


def _batches(model: ir.Model, batch: Named) -> list[Named]:
    """Return the example batch, and twice its rows if the graph takes any number of them."""
    dynamic = {value.name for value in model.graph.inputs if value.shape is not None and not value.shape.is_static()}
    if not dynamic & batch.keys():
        return [batch]
    return [batch, {name: torch.cat([rows, rows]) if name in dynamic else rows for name, rows in batch.items()}]


def in_float64(step: Step) -> Step:
    """Return the same step with a model, and a loss that is a module, in float64."""
    exact = _with_model(step, copy_model(step.problem.model).double())
    if isinstance(exact.problem.loss, torch.nn.Module):
        exact.problem.loss = copy.deepcopy(exact.problem.loss).double()
    return exact


def _with_model(step: Step, model: torch.nn.Module) -> Step:
    """Return the same step with another model, whose parameters and buffers have the same names."""
    other = copy.copy(step)
    other.problem = OwnState(step.problem, model)
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


def _second(state: Named, step: Step, made: Named) -> Named:
    """Return the state of a later step: moved weights, the buffers and the seed that a forward made, and a due update.

    Weights that are all zero, as the last scale of a residual branch may be, are filled: they hide gradients.
    """
    second = {name: made.get(name + NEW_SUFFIX, tensor) for name, tensor in state.items()}
    second = _moved(second, step, 0, _CHANGED, _FILLED)
    if STEP in second:
        second[STEP] = second[STEP] + 1
    if ACCUMULATED in second:
        second[ACCUMULATED] = torch.full_like(second[ACCUMULATED], step.accumulate - 1)
    return second


def _moved(state: Named, step: Step, seed: int, share: float = _MOVED, filled: float = 0.0) -> Named:
    """Move each weight by a random share of it: other sums round. filled: size of those that are all zero."""
    generator = torch.Generator().manual_seed(seed)
    moved = dict(state)
    for name in step.problem.parameters:
        noise = torch.randn(state[name].shape, generator=generator, dtype=torch.float32).to(state[name].dtype)
        moved[name] = state[name] * (1.0 + share * noise) if state[name].any() else filled * noise
    return moved
