"""Two models, the same inputs, the outputs side by side.

Both run in a process of their own (`engine_process`), so that a model which crashes its engine, or fills
the memory, costs a verification and nothing else. The bounds are those of `comparison`. A value that is
finite in the reference must be finite in the candidate. Outputs of other types must be equal. Where no
engine runs the models, or where the reference's outputs decide nothing, on smaller inputs neither
(`smaller_inputs`), the result says so; it never says "passed".

Training graphs. When the reference still has MMCVSyncBatchNorm nodes in training and the candidate has
none, the two do not mean the same. The reference is then converted first (running statistics, nothing
folded), and the result says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from bnexport.errors import BnexportError, ModelError
from bnexport.folding.converting.sync_bn import is_sync_batch_norm, training_mode
from bnexport.graph.mixed_types import insert_casts
from bnexport.graph.refusal import Refused
from bnexport.model_io import Parts, to_parts, walk
from bnexport.model_io.read import open_source
from bnexport.verification.comparison import FLOATS, OutputComparison
from bnexport.verification.isolated_process import PROCESS, EngineFailure, Shipment
from bnexport.verification.probes import Probe, find_probes
from bnexport.verification.samples import InputSpec

SCHEMA_VERSION = 1
Source = str | os.PathLike[str] | onnx.ModelProto | ir.Model
Inputs = Mapping[str, np.ndarray] | Sequence[Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class VerifyResult:
    """status: "passed", "failed" or "not verified" (then `reason` says why).

    engine: what ran the models. reference: "original", or "converted" where a training graph, or one that no
    engine runs, was compared after MMCVSyncBatchNorm had become BatchNormalization. input_scale: what the float
    inputs were multiplied by; below 1 where the outputs of the first inputs decide nothing.
    """

    status: str
    reason: str | None = None
    outputs: tuple[OutputComparison, ...] = ()
    samples: int = 0
    seed: int = 0
    reference: str = "original"
    engine: str = ""
    input_scale: float = 1.0

    @property
    def passed(self) -> bool:
        """Whether every output was compared and lies within its bound."""
        return self.status == "passed"

    @property
    def max_abs_diff(self) -> float:
        """The largest absolute difference over all outputs; 0 when none was compared."""
        return max((output.max_abs_diff for output in self.outputs), default=0.0)

    @property
    def max_rel_diff(self) -> float:
        """The largest relative difference over all outputs; 0 when none was compared."""
        return max((output.max_rel_diff for output in self.outputs), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """What the command line prints with --json."""
        return {"schema_version": SCHEMA_VERSION, "passed": self.passed, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a comparison is to use: inputs or how to make them, bounds of the caller's, and how long it may take.

    timeout: seconds for all of it. patience: seconds for the float64 run that an ill-conditioned model needs.
    """

    inputs: Inputs | None = None
    seed: int = 0
    samples: int = 2
    atol: float | None = None
    rtol: float | None = None
    timeout: float | None = None
    patience: float = 30.0


def verify(
    reference: Source,
    candidate: Source,
    *,
    inputs: Inputs | None = None,
    seed: int = 0,
    samples: int = 2,
    atol: float | None = None,
    rtol: float | None = None,
    timeout: float | None = None,
) -> VerifyResult:
    """Runs both models on the same inputs and compares every output.

    What cannot be run, crashes or takes too long is a result, not an error.

    Args:
        reference: a path, ModelProto or onnx_ir.Model.
        candidate: the model to check, with the same inputs and outputs.
        inputs: arrays by the names of the inputs, one set or several; None makes random ones.
        seed: of the first random set; the others count on.
        samples: number of random sets.
        atol: absolute bound instead of the table's (`bnexport/tolerances.py`).
        rtol: bound relative to each value of the reference; what is not given of the two is 0 then.
        timeout: seconds for both models together; None for no limit.

    Raises:
        ModelError: a file is refused.
    """
    first, second = open_source(reference).model, open_source(candidate).model
    compare_with = functools.partial(compare, terms=Terms(inputs, seed, samples, atol, rtol, timeout))
    result = compare_with(first, second)
    if result.status == "not verified" and result.reference == "original" and _has_nodes(first):
        # No engine has the operator; its converted, unfolded graph any engine runs.
        converted = compare_with(_converted(first), second)
        if converted.status != "not verified" and not _has_nodes(second):
            return dataclasses.replace(converted, reference="converted")
    return result


def compare(reference: ir.Model, candidate: ir.Model, terms: Terms) -> VerifyResult:
    """`verify` for models that are open already; they may be changed."""
    label = "original"
    if _trains(reference) and not _has_nodes(candidate):
        reference, label = _converted(reference), "converted"
    difference = _interface(reference, candidate)
    if difference:
        return VerifyResult("failed", difference, seed=terms.seed, reference=label)
    answer = _ask(reference, candidate, terms)
    outputs = tuple(OutputComparison(**output) for output in answer.pop("outputs", ()))
    return VerifyResult(outputs=outputs, seed=terms.seed, reference=label, **answer)


def _ask(reference: ir.Model, candidate: ir.Model, terms: Terms) -> dict[str, Any]:
    """The fields of the verdict, from the process that runs the models."""
    probes = find_probes(reference, candidate)
    given = [terms.inputs] if isinstance(terms.inputs, Mapping) else terms.inputs
    try:
        with Shipment() as shipment:
            request = {
                "reference": _shipped(reference, [probe.reference for probe in probes], shipment),
                "candidate": _shipped(candidate, [probe.candidate for probe in probes], shipment),
                "outputs": [str(value.name) for value in reference.graph.outputs],
                "probes": [_named(probe) for probe in probes],
                "inputs": [dataclasses.asdict(_spec(value)) for value in _inputs(reference)],
                "given": None
                if given is None
                else [[shipment.array(name, value) for name, value in sample.items()] for sample in given],
                "working": _working_type(reference, candidate),
                **{"seed": terms.seed, "count": terms.samples, "atol": terms.atol, "rtol": terms.rtol},
                "patience": terms.patience,
            }
            return PROCESS.ask(request, shipment.ready(), terms.timeout)
    except EngineFailure as failure:
        return _failure(failure)
    except ModelError as error:
        # It cannot be written for an engine: no one can run it.
        return {"status": "not verified", "reason": str(error)}


def _failure(failure: EngineFailure) -> dict[str, Any]:
    """What the end of the verifying process says about the models: a candidate that crashes an engine differs."""
    where = f" while it ran the {failure.stage} in {failure.engine}" if failure.stage else ""
    status = "failed" if failure.crashed and failure.stage == "candidate" else "not verified"
    return {"status": status, "reason": f"the verifying process: {failure}{where}", "engine": failure.engine}


def _shipped(model: ir.Model, probes: Sequence[ir.Value], shipment: Shipment) -> dict[str, Any]:
    library = no_library = None
    if _needs_library(model):
        library, no_library = _library()
    with _also_outputs(model, probes):
        parts: Parts = to_parts(model)
    return shipment.model(parts, library, no_library)


def _named(probe: Probe) -> dict[str, str]:
    return {
        "output": probe.output,
        "op_type": probe.op_type,
        "reference": str(probe.reference.name),
        "candidate": str(probe.candidate.name),
    }


@contextlib.contextmanager
def _also_outputs(model: ir.Model, values: Sequence[ir.Value]) -> Iterator[None]:
    """More graph outputs, for the time of one serialisation."""
    added = [value for value in dict.fromkeys(values) if not value.is_graph_output()]
    model.graph.outputs.extend(added)
    try:
        yield
    finally:
        for value in added:
            model.graph.outputs.remove(value)


def _needs_library(model: ir.Model) -> bool:
    """Whether a node of ours has no portable body."""
    return any(is_sync_batch_norm(node) and node.op_identifier() not in model.functions for node in walk.nodes(model))


def _library() -> tuple[str | None, str | None]:
    """The path of the custom-op library, or why there is none."""
    try:
        return importlib.import_module("bnexport.native.library").get_library_path(), None
    except ImportError:
        return None, "the custom-op library is not part of this installation"
    except BnexportError as error:
        return None, str(error)


def _inputs(model: ir.Model) -> list[ir.Value]:
    """Inputs that a caller has to give: those without an initializer."""
    return [value for value in model.graph.inputs if not value.is_initializer()]


def _spec(value: ir.Value) -> InputSpec:
    name = str(value.name)
    if not isinstance(value.type, ir.TensorType) or value.shape is None:
        return InputSpec(name)
    dtype = value.type.dtype
    kinds = (
        ("string", dtype is ir.DataType.STRING),
        ("bool", dtype is ir.DataType.BOOL),
        ("float", dtype.is_floating_point()),
        ("integer", dtype.is_integer()),
    )
    kind = next((kind for kind, holds in kinds if holds), None)
    shape = tuple(
        (size if size >= 0 else None) if isinstance(size, int) else (size.value or None) for size in value.shape
    )
    return InputSpec(name, kind, dtype.numpy().name, shape)


def _working_type(*models: ir.Model) -> str:
    """The coarsest float type of any value or parameter."""
    found = len(FLOATS) - 1
    for model in models:
        for graph in walk.graphs(model):
            outputs = (output for node in graph for output in node.outputs)
            for value in (*graph.inputs, *graph.initializers.values(), *outputs):
                if value.dtype is not None and value.dtype.is_floating_point():
                    name = value.dtype.numpy().name
                    found = min(found, FLOATS.index(name) if name in FLOATS else found)
    return FLOATS[found]


def _interface(reference: ir.Model, candidate: ir.Model) -> str | None:
    for what, first, second in (
        ("inputs", _inputs(reference), _inputs(candidate)),
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
    from bnexport.folding.folder import Engine  # the engine's report holds a VerifyResult

    Engine(model, Options()).convert()
    insert_casts(model)
    return model
