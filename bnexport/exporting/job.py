"""One export: a module and its example inputs become a file, in one loop.

build -> stage -> judge the staged file -> make wrong dimensions static and build again, or commit
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from bnexport import stages
from bnexport.errors import LibraryError, MissingPackageError, VerificationError
from bnexport.exporting.dimensions.dynamic import Dimensions
from bnexport.exporting.dimensions.other_sizes import OtherSizes
from bnexport.exporting.dimensions.size_conditions import Limit, SizeConditions
from bnexport.exporting.dimensions.size_dependence import name_at_any, without_faults
from bnexport.exporting.notes import Note
from bnexport.exporting.verification import Checked, verdict
from bnexport.folding.reporting.report import FoldReport
from bnexport.model_io import Staged
from bnexport.runtime.engine import Engine
from bnexport.verification.reference import Reference
from bnexport.verification.verdict import Verification

Tensors = tuple[torch.Tensor, ...]


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
        stages.report("tracing")
        artifact = target.build(dimensions)
        if others is not None and job.reference is not None:
            artifact = _with_causes(artifact, dimensions, job.reference)
        artifact.dimensions.check_required()
        staged = target.stage(artifact)
        try:
            if others is None or job.reference is None:
                checked = Checked(Verification.skipped(target.unverifiable or "not asked for"))
            else:
                _follow(others, artifact, dimensions)
                stages.report(f"verifying in {target.place}")
                checked = _judge(artifact, staged.path, target, job.reference, others)
            _refuse(job.path, target, checked)
            if job.reference is None or not (checked.faults and target.declares):
                staged.commit()
                return _with_limits(artifact, others), _without_baked(artifact, checked.verification)
        finally:
            staged.discard()
        dimensions = without_faults(artifact.dimensions, checked.faults, job.reference, artifact.conditions)
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
                dimensions = without_faults(dimensions, others.unseen, reference)
            others.plan(seen.free)
    return dimensions, others


def _with_causes(artifact: Artifact, before: Dimensions, reference: Reference) -> Artifact:
    """Name the operator in the notes on dimensions that the exporter has made static."""
    gone = artifact.dimensions.static.keys() - before.static.keys()
    operator = name_at_any(before, sorted(gone), reference)
    return (
        dataclasses.replace(artifact, dimensions=artifact.dimensions.caused_by(gone, operator))
        if operator
        else artifact
    )


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
