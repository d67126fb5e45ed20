"""Two models, the same inputs, the outputs side by side.

The bounds are those of `comparison`. A value that is finite in the reference must be finite in the candidate. Outputs of other types
must be equal. Where no engine runs the models the result says so; it never says "passed".

Training graphs. When the reference still has MMCVSyncBatchNorm nodes in training and the candidate has
none, the two do not mean the same. The reference is then converted first (running statistics, nothing
folded), and the result says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from bnexport.errors import BnexportError
from bnexport.folding import samples
from bnexport.folding.comparison import OutputComparison, compare_output, working_type
from bnexport.folding.mixed_types import insert_casts
from bnexport.folding.probes import Probe, find_probes
from bnexport.folding.refusal import Refused
from bnexport.folding.runner import ReferenceRunner, Runner, RuntimeRunner, needs_library
from bnexport.folding.sync_bn import is_sync_batch_norm, training_mode
from bnexport.model_io import walk
from bnexport.model_io.read import ModelSource, open_source

SCHEMA_VERSION = 1
Source = str | os.PathLike[str] | onnx.ModelProto | ir.Model


@dataclasses.dataclass(frozen=True)
class VerifyResult:
    """status: "passed", "failed" or "not verified" (then `reason` says why).

    engine: what ran the models. reference: "original", or "converted" where a training graph, or one that no
    engine runs, was compared after MMCVSyncBatchNorm had become BatchNormalization.
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
    first, second = open_source(reference), open_source(candidate)
    compare_with = functools.partial(compare, inputs=inputs, seed=seed, count=samples, atol=atol, rtol=rtol)
    result = compare_with(first, second)
    if result.status == "not verified" and result.reference == "original" and _has_nodes(first.model):
        # No engine has the operator; its converted, unfolded graph any engine runs.
        converted = compare_with(ModelSource(_converted(first.model), None), second)
        if converted.status != "not verified" and not _has_nodes(second.model):
            return dataclasses.replace(converted, reference="converted")
    return result


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
    probes = find_probes(reference.model, candidate.model)
    reasons = []
    for engine in (RuntimeRunner, ReferenceRunner):
        try:
            runs = _run_both(engine, reference, candidate, probes, _given(inputs), seed, count)
            break
        except _CandidateError as error:
            return VerifyResult("failed", str(error), seed=seed, reference=label, engine=engine.name)
        except BnexportError as error:
            reasons.append(str(error))
    else:
        return VerifyResult("not verified", "; ".join(reasons), seed=seed, reference=label)
    outputs = _compare_all(reference.model, candidate.model, runs, atol, rtol)
    failed = next((output for output in outputs if not output.passed), None)
    status = "passed" if failed is None else "failed"
    reason = None if failed is None else f"output {failed.name!r}: {failed.reason}"
    if failed is None and not any(output.elements for output in outputs):
        status, reason = "not verified", "the outputs are empty"
    return VerifyResult(status, reason, outputs, len(runs.inputs), seed, label, engine.name)


@dataclasses.dataclass(frozen=True)
class _Runs:
    """inputs: the samples. expected, got: for each sample the values of the outputs and then of the probes."""

    inputs: list[dict[str, np.ndarray]]
    expected: list[list[Any]]
    got: list[list[Any]]
    probes: tuple[Probe, ...]


def _run_both(
    engine: type[RuntimeRunner] | type[ReferenceRunner],
    reference: ModelSource,
    candidate: ModelSource,
    probes: tuple[Probe, ...],
    given: list[dict[str, np.ndarray]] | None,
    seed: int,
    count: int,
) -> _Runs:
    outputs = [str(value.name) for value in reference.model.graph.outputs]
    with contextlib.closing(engine(reference.model, reference.path, [probe.reference for probe in probes])) as runner:
        if not runner.can_probe:
            probes = ()
        names = outputs + [str(probe.reference.name) for probe in probes]
        chosen, expected = _inputs_that_run(reference.model, runner, given, seed, count, names)
    try:
        with contextlib.closing(
            engine(candidate.model, candidate.path, [probe.candidate for probe in probes])
        ) as runner:
            if not runner.can_probe:
                probes, expected = (), [row[: len(outputs)] for row in expected]
            names = outputs + [str(probe.candidate.name) for probe in probes]
            return _Runs(chosen, expected, [runner.run(sample, names) for sample in chosen], probes)
    except BnexportError as error:
        if needs_library(candidate.model):
            raise
        raise _CandidateError(str(error)) from error


def _compare_all(
    reference: ir.Model, candidate: ir.Model, runs: _Runs, atol: float | None, rtol: float | None
) -> tuple[OutputComparison, ...]:
    """The outputs, each with what is in front of it where that was probed, and then the probes."""
    working = working_type(reference, candidate)
    names = [str(value.name) for value in reference.graph.outputs]
    places = {probe.output: len(names) + index for index, probe in enumerate(runs.probes)}
    names += [f"{probe.output} (before {probe.op_type})" for probe in runs.probes]

    def column(rows: list[list[Any]], index: int) -> list[Any]:
        return [row[index] for row in rows]

    return tuple(
        compare_output(
            name,
            column(runs.expected, index),
            column(runs.got, index),
            working,
            atol,
            rtol,
            column(runs.expected, places[name]) if name in places else None,
        )
        for index, name in enumerate(names)
    )


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
    free = any(
        not isinstance(size, int) or size < 0 for value in samples.model_inputs(model) for size in value.shape or ()
    )
    sizes = samples.FREE_SIZES if free else samples.FREE_SIZES[:1]
    for index, free_size in enumerate(sizes):
        chosen = list(samples.samples(model, seed, count, free_size))
        try:
            return chosen, [runner.run(sample, names) for sample in chosen]
        except BnexportError:
            if index == len(sizes) - 1:
                raise
    raise AssertionError("FREE_SIZES is empty")


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
