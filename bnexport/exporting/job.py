"""One export: a module and its example inputs become a file, in one loop.

build -> stage -> judge the staged file -> make wrong dimensions static and build again, or commit
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import nn

from bnexport import interface
from bnexport.errors import LibraryError, MissingPackageError, VerificationError, first_line
from bnexport.exporting.dimensions import Dimensions, Limit, Note, SizeConditions, is_constant, resized, shapes
from bnexport.exporting.other_sizes import Fault, OtherSizes, without_faults
from bnexport.folding.report import FoldReport
from bnexport.graph.nodes import is_quantised
from bnexport.model_io import Staged
from bnexport.model_io.write import tensor_total
from bnexport.modules.tensors import Array, bound, to_array
from bnexport.runtime import engine
from bnexport.runtime.engine import Engine, EngineFailure
from bnexport.verification.inputs import FeedGroup
from bnexport.verification.judge import Rules, judge
from bnexport.verification.reference import Reference
from bnexport.verification.verdict import Verification, nearest

# Comparison of an exported file with the caller's own module.

Tensors = tuple[torch.Tensor, ...]

_LARGEST_OPTIMISED = 1 << 28  # bytes of weights


@dataclasses.dataclass(frozen=True)
class Checked:
    """A verdict, and the dynamic dimensions with wrong results; while there are any, the verdict is open."""

    verification: Verification
    faults: tuple[Fault, ...] = ()


def verdict(
    engines: Sequence[Engine], names: Sequence[str], reference: Reference, inputs: Tensors, others: OtherSizes
) -> Checked:
    """Return the verdict on an exported model for the example inputs and other sizes.

    Statistics compare like outputs. A model that draws random numbers (Dropout in train mode) is not compared. names: of the
    outputs. Raises VerificationError where the exported model does not run on `inputs`.
    """
    expected = reference(inputs)
    if reference.is_random(inputs):
        return Checked(Verification.skipped("the model draws random numbers"))

    def judged(feeds: Sequence[Tensors], expected: Sequence[Tensors]) -> list[Verification]:
        return [_in_each(engines, names, reference, *pair) for pair in zip(feeds, expected, strict=True)]

    feeds, own = [inputs], [expected]
    if any(map(is_constant, inputs)):
        # Zeros hide most differences: random numbers of the same size as well.
        varied = resized(inputs, {})
        with contextlib.suppress(Exception):  # what the model's code raises on other values
            own.append(reference(varied))
            feeds.append(varied)
    count = len(feeds)
    outcomes = judged([*feeds, *(run.inputs for run in others.runs)], [*own, *(run.expected for run in others.runs)])
    held, elsewhere = outcomes[:count], outcomes[count:]
    refused = next((outcome for outcome in held if not outcome.ran), None)
    if refused is not None:
        raise VerificationError(f"the exported model cannot run: {refused.reason}")
    faults, tried = [], [shapes(inputs, {})]
    if all(outcome.passed for outcome in held):
        faults = others.faults(elsewhere, judged)
        held += [outcome for outcome in elsewhere if outcome.passed]
        tried += [others.shapes(run) for run, outcome in zip(others.runs, elsewhere) if outcome.passed]
    errors = nearest([output for outcome in held for output in outcome.outputs])
    verification = Verification.of(
        errors,
        engine=" and ".join(each.name for each in engines),
        reason=reference.cause,
        reference="converted" if reference.cause else "original",
        samples=len(held),
        input_scale=outcomes[0].input_scale,
        sizes=tuple(tried),
    )
    return Checked(verification, tuple(faults))


def _in_each(
    engines: Sequence[Engine], names: Sequence[str], reference: Reference, inputs: Tensors, expected: Tensors
) -> Verification:
    """Judge the exported model in each engine, for one set of inputs."""
    group = FeedGroup([{str(index): value for index, value in enumerate(inputs)}], [list(map(to_array, expected))])
    results, refused = [], []
    for each in engines:
        try:
            rules = Rules(names, bound=functools.partial(bound, rounds=isinstance(each, Session) and each.rounds))
            results.append(judge(reference, each, [group], rules))
        except EngineFailure as failure:
            refused.append(f"{each.name}: {failure.detail}")
    if refused:
        return Verification("failed", "; ".join(refused))
    outputs = [
        dataclasses.replace(output, engine=each.name)
        for each, result in zip(engines, results)
        for output in result.outputs
    ]
    return Verification.of(outputs, input_scale=min(result.input_scale for result in results))


class Session:
    """One session of ONNX Runtime, which takes the tensors of an export in their order; weights stay in their file.

    rounds: whether numbers of its model are rounded to float32.
    """

    def __init__(self, model: ir.Model, name: str, training: bool | None = None) -> None:
        self.name, self.rounds = name, _rounds_numbers(model)
        wide = any(value.dtype == ir.DataType.DOUBLE for value in model.graph.inputs)
        # ONNX Runtime's optimisations change the layout of weights, in a copy of each: too much for a large model. Some
        # round the numbers of float64 arithmetic to float32, others make integer arithmetic of quantised values.
        optimised = not wide and not is_quantised(model) and tensor_total(model) <= _LARGEST_OPTIMISED
        options = engine.default_options(training, optimised=optimised)
        try:
            self._engine = engine.open(model, options=options, mapped=True)
        except EngineFailure as failure:
            if _has_bfloat16(model):
                raise LibraryError(f"{name} cannot run its bfloat16 operators: {first_line(failure)}") from failure
            way_out = "; it has few operators in float64: export model.float(), or with verify=False" if wide else ""
            raise VerificationError(f"{name} cannot load the exported model: {failure.detail}{way_out}") from failure

    def run(self, feeds: Mapping[str, torch.Tensor], outputs: Sequence[str]) -> list[Array]:
        arrays = dict(zip(self._engine.inputs, map(to_array, feeds.values())))
        return [np.asarray(value) for value in self._engine.run(arrays, outputs)]


def _rounds_numbers(model: ir.Model) -> bool:
    """Whether an operator has a number that float32 rounds, as eps of a batch norm: attributes are float32 in ONNX."""
    nodes = [*model.graph.all_nodes(), *(node for each in model.functions.values() for node in each.all_nodes())]
    numbers = (np.float32(number) for node in nodes for number in _numbers(model, node))
    return any(float(str(number)) != float(number) for number in numbers)


def _numbers(model: ir.Model, node: ir.Node) -> Iterator[float]:
    """Return a node's float attributes: its own, its operator's defaults, and those of the function that defines it."""
    for own in node.attributes.values():
        if own.type == ir.AttributeType.FLOAT and not own.is_ref():
            yield own.as_float()
    version = model.opset_imports.get(node.domain)
    if version is None or not onnx.defs.has(node.op_type, node.domain):
        return
    schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    for name, attribute in schema.attributes.items():
        if name not in node.attributes and attribute.default_value.type == onnx.AttributeProto.FLOAT:
            yield attribute.default_value.f
    for inner in schema.function_body.node:
        yield from (each.f for each in inner.attribute if each.type == onnx.AttributeProto.FLOAT)


def _has_bfloat16(model: ir.Model) -> bool:
    values = (value for node in model.graph.all_nodes() for value in node.outputs)
    casts = (node.attributes["to"] for node in model.graph.all_nodes() if "to" in node.attributes)
    return ir.DataType.BFLOAT16 in {value.dtype for value in values} or ir.DataType.BFLOAT16 in {
        a.as_int() for a in casts
    }


@dataclasses.dataclass(frozen=True)
class ExportJob:
    """model: the caller's own. reference: None without verification."""

    model: nn.Module
    dimensions: Dimensions
    path: Path
    reference: Reference | None

    @property
    def inputs(self) -> Tensors:
        return self.dimensions.inputs


@dataclasses.dataclass(frozen=True)
class Artifact:
    """The result of building a target.

    model: an onnx_ir.Model, ScriptModule or ExportedProgram. outputs: names of what a forward returns; state: of those that are
    updated, whose new values follow. conditions, limits: on sizes, which an ONNX file does not keep. allows: whether the file
    says that it is for these inputs.
    """

    model: Any
    exporter: str
    outputs: tuple[str, ...]
    dimensions: Dimensions
    notes: tuple[Note, ...] = ()
    state: tuple[str, ...] = ()
    report: FoldReport | None = None
    conditions: SizeConditions | None = None
    allows: Callable[[Tensors], bool] | None = None
    limits: tuple[Limit, ...] = ()


class Target(Protocol):
    """A format.

    place: where its files are run. unverifiable: why a file cannot be judged here, or empty. guarded: its files refuse sizes
    that they are not for. declares: its files say which dimensions are dynamic.
    """

    place: str
    unverifiable: str
    guarded: bool
    declares: bool

    def build(self, dimensions: Dimensions) -> Artifact:
        """Make the model, with these dimensions or fewer."""

    def stage(self, artifact: Artifact) -> Staged:
        """Write it completely, under a temporary name."""

    def open(self, artifact: Artifact, file: str) -> contextlib.AbstractContextManager[Sequence[Engine]]:
        """Open the file in every engine that it is for."""


def run(job: ExportJob, target: Target) -> tuple[Artifact, Verification]:
    """Write the file; return what is in it and the verdict on it.

    Raises VerificationError where it differs from torch, UnsupportedModelError where it cannot be made, or not with the
    dimensions that the caller names; then nothing is written.
    """
    dimensions, others = job.dimensions, None
    if job.reference is not None and not target.unverifiable:
        dimensions, others = _plan(dimensions, target, job.reference)
    while True:
        dimensions.check_required()
        interface.report("tracing")
        artifact = target.build(dimensions)
        artifact.dimensions.check_required()
        staged = target.stage(artifact)
        try:
            if others is None or job.reference is None:
                checked = Checked(Verification.skipped(target.unverifiable or "not asked for"))
            else:
                _follow(others, artifact, dimensions)
                interface.report(f"verifying in {target.place}")
                checked = _judge(artifact, staged.path, target, job.reference, others)
            _refuse(job.path, target, checked)
            if job.reference is None or not (checked.faults and target.declares):
                staged.commit()
                return _with_limits(artifact, others), _without_baked(artifact, checked.verification)
        finally:
            staged.discard()
        dimensions = without_faults(artifact.dimensions, checked.faults, artifact.conditions)
        if others is not None:
            others.plan(dimensions.free)


def _plan(dimensions: Dimensions, target: Target, reference: Reference) -> tuple[Dimensions, OtherSizes]:
    """Choose other sizes at which the reference runs; what it runs at no other size of becomes static."""
    others = OtherSizes(dimensions.inputs, reference, guarded=target.guarded)
    comparable = False
    with contextlib.suppress(Exception):  # what the model's code raises; the exporter reports it
        comparable = not reference.is_random(dimensions.inputs)
    if comparable:
        others.plan(dimensions.free)
        if others.unseen:
            seen = dimensions.without([axis for fault in others.unseen for axis in fault.axes], "static")
            if target.declares:
                dimensions = without_faults(dimensions, others.unseen)
            others.plan(seen.free)
    return dimensions, others


def _follow(others: OtherSizes, artifact: Artifact, before: Dimensions) -> None:
    """Choose the sizes again where the file has fewer dynamic dimensions or refuses some; add those that its conditions ask for."""
    if artifact.allows is not None:
        others.allows = artifact.allows
    if artifact.dimensions.free != before.free or not all(others.allows(each.inputs) for each in others.runs):
        others.plan(artifact.dimensions.free)
    others.exceed(artifact.limits, artifact.dimensions.free)
    if artifact.conditions is not None:
        others.add(artifact.conditions, artifact.dimensions.free)


def _with_limits(artifact: Artifact, others: OtherSizes | None) -> Artifact:
    """Add notes on the sizes that the model limits; beyond a limit that is harmless, the file was right."""
    dimensions = artifact.dimensions
    limits = [each for each in artifact.limits if each.counts] if others is None else others.within(artifact.limits)
    notes = [
        Note("limited", str(limit), dimensions.names[place], index, dimensions.free[place][index])
        for limit in limits
        for place, index in [limit.axis]
    ]
    return dataclasses.replace(artifact, notes=(*artifact.notes, *notes))


def _without_baked(artifact: Artifact, verification: Verification) -> Verification:
    """Withdraw the verdict on a file that keeps what the model made of the example's values."""
    note = next((note for note in artifact.notes if note.kind == "values"), None)
    if note is None or not verification.passed:
        return verification
    return dataclasses.replace(verification, status="not_verified", reason=note.reason)


def _judge(artifact: Artifact, file: str, target: Target, reference: Reference, others: OtherSizes) -> Checked:
    try:
        with target.open(artifact, file) as engines:
            return verdict(engines, (*artifact.outputs, *artifact.state), reference, artifact.dimensions.inputs, others)
    except LibraryError as error:
        return Checked(Verification.skipped(str(error)))
    except MissingPackageError as error:
        if error.name != "onnxruntime":
            raise
        return Checked(Verification.skipped("onnxruntime is not installed"))


def _refuse(path: Path, target: Target, checked: Checked) -> None:
    """Raise VerificationError for a file that differs at the example's sizes, or at others that it does not refuse."""
    wrong = next((fault for fault in checked.faults if fault.outcome is not None), None)
    if wrong is not None and not target.declares:
        reason = f"{wrong.reason}, though not at the example's size, which dynamic=False asks for"
    elif checked.verification.status == "failed":
        reason = checked.verification.summary()
    else:
        return
    raise VerificationError(f"{path}: the exported model differs from torch, nothing was written: {reason}")
