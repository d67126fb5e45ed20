"""Export to the formats of torch itself: fold, build, write aside, check in a new process, move into place."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bnexport.errors import UnsupportedModelError, UsageError, VerificationError
from bnexport.exporting import dynamo, pt2, torchscript_format, wrapper
from bnexport.exporting.dimensions.other_sizes import OtherSizes
from bnexport.exporting.dimensions.size_dependence import fix_dimensions, name_operators, plan_sizes, refuse_fixed
from bnexport.exporting.substitutes.plain_parameters import with_plain_parameters
from bnexport.exporting.verification import Checked, verdict
from bnexport.folding.module import ModuleOptions, fold_copy
from bnexport.folding.reporting.report import FoldReport
from bnexport.model_io.staging import whole_file
from bnexport.sync_bn.copies import copy_model
from bnexport.sync_bn.nesting import room_for
from bnexport.torch_versions import pytree
from bnexport.verification import fresh_process
from bnexport.verification.reference import Reference
from bnexport.verification.verdict import Verification

FORMATS = ("torchscript", "pt2")


@dataclasses.dataclass(frozen=True)
class Exported:
    """model: a ScriptModule or an ExportedProgram. method: "script", "trace" or "torch.export"."""

    model: Any
    method: str
    outputs: tuple[str, ...]
    report: FoldReport | None
    verification: Verification
    notes: tuple[str, ...]


def export(
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    target: Path,
    format: str,
    *,
    names: list[str],
    fold: bool,
    dynamic: bool | Mapping[str, Mapping[int, str] | Sequence[int]],
    verify: bool,
) -> Exported:
    """Write the file of `model` in eval mode; every sync batch norm is folded or becomes torch's own operator."""
    report, work, notes = None, None, []
    reference = Reference(model, evaluate=True) if verify else None
    if reference is not None:
        reference.run_first(inputs)
    converted = wrapper.for_deploy(model)
    outputs = _output_names(copy_model(converted, share_parameters=True), inputs)
    if fold:
        try:
            folded, report = fold_copy(model, inputs, ModuleOptions(), prove=verify)
            work = wrapper.with_torchs_operators(folded)
        except UnsupportedModelError as error:
            notes.append(f"nothing was folded: {error}")
        if report is not None and report.verification is not None and report.verification.status == "failed":
            reason = report.verification.reason
            raise VerificationError(
                f"{target}: the folded module differs from the model, nothing was written: {reason}"
            )
    if work is None:
        work = converted
    others: OtherSizes | None = None
    shapes: dynamo.Shapes = dynamo.chosen_dimensions(names, inputs, dynamic)
    if reference is not None:
        reference.complete(converted)
        fixed: list[str] = []
        others = plan_sizes(shapes, names, inputs, reference, fixed, guarded=format == "pt2")
        notes += fixed if format == "pt2" else []
    with whole_file(target) as staged:
        temporary = Path(staged)
        while True:
            planned = [dict(shape) for shape in shapes]
            if format == "pt2":
                refuse_fixed(dynamic, shapes, names, notes)
            built: Any
            with room_for(work):
                if format == "torchscript":
                    built, method, more = torchscript_format.build(with_plain_parameters(work), inputs)
                    torchscript_format.save(built, temporary)
                else:
                    built, more = pt2.build(work, inputs, names, shapes)
                    method = "torch.export"
                    pt2.save(built, temporary)
            if format == "pt2" and reference is not None:
                name_operators(more, planned, shapes, names, inputs, reference)
            notes += [note for note in more if note not in notes]
            if format == "pt2":
                refuse_fixed(dynamic, shapes, names, notes)
            if reference is None or others is None:
                checked = Checked(Verification.skipped("not asked for"))
                break
            if format == "pt2":
                others = _allowed_sizes(built, inputs, reference, others, shapes, shapes != planned)
            with fresh_process.FreshProcess(temporary, format) as engine:
                checked = verdict([engine], outputs, reference, inputs, others)
            wrong = next((fault for fault in checked.faults if fault.outcome is not None), None)
            if checked.verification.status == "failed" or (wrong is not None and format == "torchscript"):
                reason = checked.verification.summary()
                if wrong is not None:
                    reason = f"{wrong.reason}, though not at the example's size, which dynamic=False asks for"
                raise VerificationError(
                    f"{target}: the exported model differs from torch, nothing was written: {reason}"
                )
            if not checked.faults or format == "torchscript":
                break
            notes += fix_dimensions(shapes, checked.faults, names, inputs, reference)
            others.plan(shapes)
    if method == "trace":
        warnings.warn(next(note for note in notes if note.startswith("scripting fails")), UserWarning, stacklevel=4)
    return Exported(built, method, tuple(outputs), report, checked.verification, tuple(notes))


def _allowed_sizes(
    program: torch.export.ExportedProgram,
    inputs: tuple[torch.Tensor, ...],
    reference: Reference,
    others: OtherSizes,
    shapes: dynamo.Shapes,
    changed: bool,
) -> OtherSizes:
    """Return the runs, repeated if dimensions have become static or the program's ranges forbid one."""
    if not changed and all(pt2.allows(program, run.inputs) for run in others.runs):
        return others
    again = OtherSizes(inputs, lambda feed: reference(feed) if pt2.allows(program, feed) else None, guarded=True)
    again.plan(shapes)
    return again


def _output_names(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[str]:
    """Return names for the tensors among the model's outputs, as an ONNX graph would have them."""
    try:
        with torch.no_grad():
            leaves, spec = pytree.tree_flatten(model(*(value.clone() for value in inputs)))
    except Exception as error:  # what the model's code raises
        shapes = ", ".join(str(tuple(value.shape)) for value in inputs)
        raise UsageError(f"args: the model fails on inputs of shape {shapes}: {error}") from error
    names = wrapper.output_names(spec, len(leaves))
    return [name for name, value in zip(names, leaves) if isinstance(value, torch.Tensor)]
