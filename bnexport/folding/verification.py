"""Two models, the same inputs, the outputs side by side.

The bound comes from `bnexport.tolerances.model` with the coarsest float type that the models compute
in. A value that is finite in the reference must be finite in the candidate. Outputs of other types
must be equal. Where no engine runs the models the result says so; it never says "passed".

Training graphs. When the reference still has MMCVSyncBatchNorm nodes in training and the candidate has
none, the two do not mean the same. The reference is then converted first (running statistics, nothing
folded), and the result says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from bnexport import tolerances
from bnexport.errors import BnexportError
from bnexport.folding import samples
from bnexport.folding.mixed_types import insert_casts
from bnexport.folding.refusal import Refused
from bnexport.folding.runner import ReferenceRunner, Runner, RuntimeRunner, needs_library
from bnexport.folding.sync_bn import is_sync_batch_norm, training_mode
from bnexport.model_io import walk
from bnexport.model_io.read import ModelSource, open_source

SCHEMA_VERSION = 1
Source = str | os.PathLike[str] | onnx.ModelProto | ir.Model

# Coarsest first.
_FLOATS = ("bfloat16", "float16", "float32", "float64")


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


@dataclasses.dataclass(frozen=True)
class VerifyResult:
    """status: "passed", "failed" or "not verified" (then `reason` says why).

    engine: what ran the models. reference: "original", or "converted" where a training graph was compared in inference.
    """

    status: str
    reason: str | None = None
    outputs: tuple[OutputComparison, ...] = ()
    samples: int = 0
    seed: int = 0
    reference: str = "original"
    engine: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    @property
    def max_abs_diff(self) -> float:
        return max((output.max_abs_diff for output in self.outputs), default=0.0)

    @property
    def max_rel_diff(self) -> float:
        return max((output.max_rel_diff for output in self.outputs), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, "passed": self.passed, **dataclasses.asdict(self)}


def verify(
    reference: Source,
    candidate: Source,
    *,
    inputs: Mapping[str, np.ndarray] | Sequence[Mapping[str, np.ndarray]] | None = None,
    seed: int = 0,
    samples: int = 2,
    atol: float | None = None,
    rtol: float | None = None,
) -> VerifyResult:
    """Runs both models on the same inputs and compares every output.

    inputs: one set of inputs by name, or several; None makes `samples` random ones. atol, rtol: bounds
    of the caller's instead of the table's. Raises ModelError for files that cannot be read; what cannot
    be run is a result, not an error.
    """
    return compare(
        open_source(reference), open_source(candidate), inputs=inputs, seed=seed, count=samples, atol=atol, rtol=rtol
    )


def compare(
    reference: ModelSource,
    candidate: ModelSource,
    *,
    inputs: Mapping[str, np.ndarray] | Sequence[Mapping[str, np.ndarray]] | None = None,
    seed: int = 0,
    count: int = 2,
    atol: float | None = None,
    rtol: float | None = None,
) -> VerifyResult:
    """`verify` for models that are open already; they may be changed."""
    label = "original"
    if _trains(reference.model) and not _has_nodes(candidate.model):
        reference, label = ModelSource(_converted(reference.model), None), "converted"
    difference = _interface(reference.model, candidate.model)
    if difference:
        return VerifyResult("failed", difference, seed=seed, reference=label)
    names = [str(value.name) for value in reference.model.graph.outputs]
    reasons = []
    for engine in (RuntimeRunner, ReferenceRunner):
        try:
            chosen, expected, got = _run_both(engine, reference, candidate, _given(inputs), seed, count)
            break
        except _CandidateError as error:
            return VerifyResult("failed", str(error), seed=seed, reference=label, engine=engine.name)
        except BnexportError as error:
            reasons.append(str(error))
    else:
        return VerifyResult("not verified", "; ".join(reasons), seed=seed, reference=label)
    working = _working_type(reference.model, candidate.model)
    outputs = tuple(
        _compare_output(name, [row[index] for row in expected], [row[index] for row in got], working, atol, rtol)
        for index, name in enumerate(names)
    )
    failed = next((output for output in outputs if not output.passed), None)
    status = "passed" if failed is None else "failed"
    reason = None if failed is None else f"output {failed.name!r}: {failed.reason}"
    if failed is None and not any(output.elements for output in outputs):
        status, reason = "not verified", "the outputs are empty"
    return VerifyResult(status, reason, outputs, len(chosen), seed, label, engine.name)


def _run_both(
    engine: type[RuntimeRunner] | type[ReferenceRunner],
    reference: ModelSource,
    candidate: ModelSource,
    given: list[dict[str, np.ndarray]] | None,
    seed: int,
    count: int,
) -> tuple[list[dict[str, np.ndarray]], list[list[Any]], list[list[Any]]]:
    """The inputs, the outputs of the reference and those of the candidate."""
    names = [str(value.name) for value in reference.model.graph.outputs]
    with contextlib.closing(engine(reference.model, reference.path)) as runner:
        chosen, expected = _inputs_that_run(reference.model, runner, given, seed, count, names)
    try:
        with contextlib.closing(engine(candidate.model, candidate.path)) as runner:
            return chosen, expected, [runner.run(sample, names) for sample in chosen]
    except BnexportError as error:
        if needs_library(candidate.model):
            raise
        raise _CandidateError(str(error)) from error


class _CandidateError(Exception):
    """The reference runs and the candidate does not: that is a difference."""


def _given(
    inputs: Mapping[str, np.ndarray] | Sequence[Mapping[str, np.ndarray]] | None,
) -> list[dict[str, np.ndarray]] | None:
    if inputs is None:
        return None
    return [dict(inputs)] if isinstance(inputs, Mapping) else [dict(sample) for sample in inputs]


def _inputs_that_run(
    model: ir.Model,
    runner: Runner,
    given: list[dict[str, np.ndarray]] | None,
    seed: int,
    count: int,
    names: list[str],
) -> tuple[list[dict[str, np.ndarray]], list[list[Any]]]:
    """Inputs that the reference accepts, and its outputs."""
    if given is not None:
        return given, [runner.run(sample, names) for sample in given]
    free = any(not isinstance(size, int) for value in samples.model_inputs(model) for size in value.shape or ())
    sizes = samples.FREE_SIZES if free else samples.FREE_SIZES[:1]
    for index, free_size in enumerate(sizes):
        chosen = list(samples.samples(model, seed, count, free_size))
        try:
            return chosen, [runner.run(sample, names) for sample in chosen]
        except BnexportError:
            if index == len(sizes) - 1:
                raise
    raise AssertionError("FREE_SIZES is empty")


def _compare_output(
    name: str, expected: list[Any], got: list[Any], working: str, atol: float | None, rtol: float | None
) -> OutputComparison:
    """All samples of one output; the largest errors, and the first reason to fail."""
    worst_abs = worst_rel = 0.0
    elements, reason, bound = 0, None, tolerances.Tolerance(rtol or 0.0, atol or 0.0)
    dtype = "unknown"
    for reference, value in zip(expected, got, strict=True):
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
            bound = tolerances.model(_coarser(working, dtype), exact)
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


def _working_type(*models: ir.Model) -> str:
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


def _interface(reference: ir.Model, candidate: ir.Model) -> str | None:
    for what, first, second in (
        ("inputs", samples.model_inputs(reference), samples.model_inputs(candidate)),
        ("outputs", reference.graph.outputs, candidate.graph.outputs),
    ):
        names, others = [value.name for value in first], [value.name for value in second]
        if names != others:
            return f"the {what} differ: {names[:8]} and {others[:8]}"
    return None


def _has_nodes(model: ir.Model) -> bool:
    return any(is_sync_batch_norm(node) for node in walk.nodes(model))


def _trains(model: ir.Model) -> bool:
    for node in walk.nodes(model):
        if is_sync_batch_norm(node):
            try:
                if training_mode(node):
                    return True
            except Refused:
                return True
    return False


def _converted(model: ir.Model) -> ir.Model:
    from bnexport.folding.context import Options
    from bnexport.folding.engine import Engine  # the engine's report holds a VerifyResult

    Engine(model, Options()).convert()
    insert_casts(model)
    return model
