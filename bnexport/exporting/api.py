"""bnexport.export: from a torch module to a file that runs elsewhere, checked before it is kept."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import onnx_ir as ir
import torch
from torch import nn

from bnexport import choices, folding, model_io, schema, stages
from bnexport.errors import UsageError, VerificationError
from bnexport.exporting import attempts, dynamo, torch_formats, torchscript, verification, wrapper
from bnexport.exporting.dimensions.size_dependence import fix_dimensions, name_operators, plan_sizes, refuse_fixed
from bnexport.exporting.dynamo import Shapes
from bnexport.exporting.finish import finish
from bnexport.exporting.keywords import as_positional
from bnexport.exporting.portable_body import MINIMUM_OPSET
from bnexport.exporting.simplify import simplify as simplify_model
from bnexport.exporting.verification import Checked
from bnexport.folding.certifying import certify
from bnexport.folding.reporting.counts import count
from bnexport.folding.reporting.report import FoldReport
from bnexport.graph.nodes import is_standard
from bnexport.sync_bn.nesting import room_for
from bnexport.sync_bn.recognition import is_sync_batch_norm
from bnexport.verification.proving import prove_export
from bnexport.verification.reference import Reference
from bnexport.verification.verdict import Verification

_TRACERS = {"dynamo": dynamo.trace, "torchscript": torchscript.trace}


@dataclasses.dataclass(frozen=True)
class ExportResult:
    """What export made: the file, its graph, what was folded (mode deploy) and how it was verified.

    model: an onnx_ir.Model, torch.jit.ScriptModule or torch.export.ExportedProgram, as the format.
    exporter: what made the graph: "dynamo" or "torchscript"; for the format "torchscript" "script" or
    "trace", for "pt2" "torch.export". notes: what had to be done otherwise than asked for.
    """

    path: pathlib.Path
    model: Any
    mode: str
    exporter: str
    training: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    state: tuple[str, ...]
    report: Any
    verification: Verification
    notes: tuple[str, ...]
    format: str = "onnx"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as the command line prints it with --json."""
        return {
            "path": str(self.path),
            "format": self.format,
            "mode": self.mode,
            "exporter": self.exporter,
            "training": self.training,
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "state": list(self.state),
            "report": None if self.report is None else self.report.to_dict(),
            "verification": self.verification.to_dict(),
            "notes": list(self.notes),
        }


def export(
    model: nn.Module,
    args: tuple[torch.Tensor, ...] | torch.Tensor,
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, torch.Tensor] | None = None,
    mode: Literal["deploy", "custom_op"] = "deploy",
    exporter: Literal["dynamo", "torchscript"] = "dynamo",
    format: Literal["onnx", "torchscript", "pt2"] | None = None,
    dynamic: bool | Mapping[str, Mapping[int, str] | Sequence[int]] = True,
    opset_version: int = MINIMUM_OPSET,
    fold: bool = True,
    simplify: bool = True,
    external_data: bool | None = None,
    verify: bool = True,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    certificate: bool = True,
) -> ExportResult:
    """Exports `model` to a file at `path`. The module, its state and its mode stay untouched.

    mode "deploy": inference. Sync batch norm of any kind becomes BatchNormalization and is folded
    into the weights beside it; the file needs nothing of ours.

    mode "custom_op": every sync batch norm stays a node `MMCVSyncBatchNorm`, in the module's own
    mode. For a module in train mode the model's outputs come first, then each updated statistic as
    the output `name.new`; the initializer `name` (as in the state_dict) holds its old value. Batch
    norms of one process carry a portable body of standard operators; a group of several processes
    needs the custom-op library and a registered group, under the name "world" for the default one.
    It is for ONNX only.

    The formats "torchscript" (scripted, or traced where it cannot be scripted, and frozen) and "pt2"
    (torch.export.save) hold torch's own operators only, folded by `fold_module`, and load in a process
    that has nothing of ours.

    Args:
        model: the module; in mode "custom_op" its train or eval mode counts.
        args: example inputs, one tensor or a tuple of tensors for the positional parameters.
        path: the file to write, whole or not at all.
        kwargs: example inputs that forward takes by keyword; inputs of the file behind `args`.
        mode: "deploy" or "custom_op".
        exporter: for ONNX, "dynamo" (torch.export) or "torchscript" (tracing).
        format: "onnx", "torchscript" or "pt2"; None for the one that the suffix of `path` names: .onnx, .pt or .pt2.
        dynamic: dimension 0 and every dimension from 2 on of each input of rank >= 2 are dynamic, where the exported
            model is right at other sizes; the others get the example's size, with a note. A mapping chooses them one by
            one: {"x": {0: "batch", 2: "height"}} with their names, or {"x": [0]}; other inputs are static. A
            dimension that it names and that the file cannot have dynamic is an error.
        opset_version: of an ONNX graph, 18 or newer; the IR version is the lowest that it needs.
        verify: run the exported model, in ONNX Runtime or in a new process, and compare it with a copy of
            `model` itself, on `args` and at other sizes of the dynamic dimensions.
        fold: in mode "deploy", fold batch norms into the weights beside them.
        simplify: after folding, evaluate shape arithmetic and constants and remove what has no effect.
        external_data: write the weights of an ONNX file to a file beside it; None where it needs that.
        input_names: names in an ONNX graph; by default forward's parameter names.
        output_names: names in an ONNX graph; by default "output" (or "output_0", ..., or the keys of a dict).
        certificate: write the names of the nodes of each fold into an ONNX file's metadata, as `fold` does; the original
            is the graph that fold=False writes. Not where they prove no fold after simplification, with a note.

    Warns:
        NotVerifiedWarning: the file was written, and nothing could verify it.

    Raises:
        UsageError: an argument is wrong.
        UnsupportedModelError: the model cannot be exported with its semantics kept; says what to do.
        VerificationError: the exported model differs from torch; no file is written.
    """
    inputs = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    _check(model, inputs, mode, exporter)
    all_names = None
    if kwargs:
        model, inputs, all_names = as_positional(model, inputs, kwargs)
        _check(model, inputs, mode, exporter)
    target = pathlib.Path(path)
    kind = choices.choose_format(path, format)
    model_io.check_space(target, sum(tensor.nbytes for tensor in model.state_dict().values()))
    if kind != "onnx":
        _check_torch_format(kind, mode, input_names or output_names)
        return _to_torch_format(model, inputs, target, kind, dynamic=dynamic, verify=verify, fold=fold)

    reference = _reference(model, inputs, evaluate=mode == "deploy") if verify else None
    prepared = wrapper.for_deploy(model) if mode == "deploy" else wrapper.for_custom_op(model)
    state = [] if mode == "deploy" else wrapper.training_state(prepared, inputs)
    groups, shared = wrapper.group_names(prepared), wrapper.shared_names(prepared)
    names = input_names or all_names or dynamo.input_names(model, len(inputs))
    if len(names) != len(inputs):
        raise UsageError(f"input_names: got {len(names)} names, expected {len(inputs)}, one for each input")

    traced = wrapper.Traced(prepared, state)
    state_names = [tensor.name for tensor in state]
    peers = wrapper.crosses_processes(prepared)
    if reference is not None:
        reference.complete(traced, state_names)
    shapes: Shapes = dynamo.chosen_dimensions(names, inputs, dynamic)
    tracer = functools.partial(_TRACERS[exporter], opset=_check_opset(opset_version, exporter))
    notes: list[str] = []
    others = None
    if reference is not None and not peers:
        others = plan_sizes(shapes, names, inputs, reference, notes)
    while True:
        planned = [dict(shape) for shape in shapes]
        refuse_fixed(dynamic, shapes, names, notes)
        stages.report("tracing")
        with room_for(traced), wrapper.named_in_errors(model):
            graph, more, conditions = attempts.trace(tracer, traced, inputs, list(names), shapes)
        if reference is not None and not peers:
            name_operators(more, planned, shapes, names, inputs, reference)
        notes += [note for note in more if note not in notes]
        refuse_fixed(dynamic, shapes, names, notes)
        own = len(graph.graph.outputs) - len(state)
        outputs = output_names or wrapper.output_names(traced.output_spec, own)
        if len(outputs) != own:
            raise UsageError(f"output_names: got {len(outputs)} names, expected {own}, one for each output")
        finish(graph, list(outputs), {tensor.name: tensor.value for tensor in state}, groups, shared)
        report = None
        if mode == "deploy" and fold:
            unfolded, sync = graph.clone(), _sync_batch_norms(graph, model)
            report = folding.BatchNormFolder().call(graph).report
            if verify and report.changed:
                report = dataclasses.replace(report, verification=prove_export(unfolded, graph, report.to_dict()))
            report = _with_sync(report, sync)
            if simplify:
                simplify_model(graph)
                report = dataclasses.replace(report, after=count(graph))
            report = certify(graph, report, wanted=certificate, original=unfolded if simplify else None)
        if reference is None:
            checked = Checked(Verification.skipped("not asked for"))
            break
        if others is None:
            reason = "its statistics span several processes; compare it where the group runs"
            checked = Checked(Verification.skipped(reason))
            break
        if shapes != planned:
            others.plan(shapes)
        others.add(conditions, shapes)
        stages.report("verifying in ONNX Runtime")
        checked = verification.check(graph, reference, inputs, others)
        if checked.verification.status == "failed":
            raise VerificationError(
                f"{target}: the exported model differs from torch, nothing was written: {checked.verification.summary()}"
            )
        if not checked.faults:
            break
        notes += fix_dimensions(shapes, checked.faults, names, inputs, reference)
        others.plan(shapes)
    if reference is not None and mode == "custom_op" and not peers:
        notes += [
            f"buffer {name!r} changes in a forward of the model; it is constant in the file"
            for name in reference.unreturned
        ]
    model_io.save(graph, target, external_data=external_data)
    if verify:
        checked.verification.warn(str(target), stacklevel=2)
    return ExportResult(
        path=target,
        model=graph,
        mode=mode,
        exporter=exporter,
        training=bool(state),
        inputs=tuple(names),
        outputs=(*outputs, *(name + schema.NEW_SUFFIX for name in state_names)),
        state=tuple(state_names),
        report=report,
        verification=checked.verification.with_folds_of(None if report is None else report.verification),
        notes=tuple(notes),
    )


def _check_opset(version: int, exporter: str) -> int:
    """Return the opset, which both exporters write from 18 on; raise UsageError for one that this exporter does not write."""
    newest = 20 if exporter == "torchscript" else 23
    if not (isinstance(version, int) and MINIMUM_OPSET <= version <= newest):
        raise UsageError(
            f"opset_version: got {version!r}, expected {MINIMUM_OPSET} to {newest} with exporter {exporter!r}"
        )
    return version


def _sync_batch_norms(graph: ir.Model, model: nn.Module) -> int:
    """Return how many batch norms of an unfolded graph are sync batch norm modules of `model`, which are converted.

    A node has its module's path in its name. A module that the graph does not have, as of an auxiliary head, has none.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found = 0
    for node in graph.graph.all_nodes():
        if is_standard(node, "BatchNormalization"):
            path = (node.name or "").rpartition("/")[0]
            # torch's tracer calls a module `norm_1` when it runs a second time.
            called = modules.get(path) or modules.get(re.sub(r"_\d+(?=\.|$)", "", path))
            found += called is not None and is_sync_batch_norm(called)
    return found


def _with_sync(report: FoldReport, sync: int) -> FoldReport:
    """Return the report with `sync` of its batch norms before folding counted as sync batch norm."""
    plain = report.before.batch_norm - sync
    return dataclasses.replace(
        report, before=dataclasses.replace(report.before, batch_norm=plain, sync_batch_norm=sync)
    )


def _reference(model: nn.Module, inputs: tuple[torch.Tensor, ...], *, evaluate: bool) -> Reference:
    """Run the caller's module before anything is prepared; later where a run might wait for other processes."""
    reference = Reference(model, evaluate=evaluate)
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        reference.run_first(inputs)
    return reference


def _to_torch_format(
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    target: pathlib.Path,
    format: str,
    *,
    dynamic: bool | Mapping[str, Mapping[int, str] | Sequence[int]],
    verify: bool,
    fold: bool,
) -> ExportResult:
    names = dynamo.input_names(model, len(inputs))
    done = torch_formats.export(model, inputs, target, format, names=names, fold=fold, dynamic=dynamic, verify=verify)
    if verify:
        done.verification.warn(str(target), stacklevel=3)
    return ExportResult(
        path=target,
        model=done.model,
        mode="deploy",
        exporter=done.method,
        training=False,
        inputs=tuple(names),
        outputs=done.outputs,
        state=(),
        report=done.report,
        verification=done.verification.with_folds_of(None if done.report is None else done.report.verification),
        notes=done.notes,
        format=format,
    )


def _check_torch_format(format: str, mode: str, names: list[str] | None) -> None:
    if mode != "deploy":
        raise UsageError(f"mode: got {mode!r} with format {format!r}, expected 'deploy'; only ONNX can keep the node")
    if names:
        raise UsageError(f"input_names, output_names: given with format {format!r}, expected with 'onnx' only")


def _check(model: nn.Module, inputs: tuple[Any, ...], mode: str, exporter: str) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    choices.check_choice("mode", mode, choices.MODES)
    choices.check_choice("exporter", exporter, choices.EXPORTERS)
    for index, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"args[{index}]: got {type(value).__name__}, expected a torch.Tensor")
