"""bnexport.export: from a torch module to a file that runs elsewhere, checked before it is kept."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from bnexport import interface, model_io, schema, torch_versions
from bnexport.errors import UsageError
from bnexport.exporting import arguments, dynamo
from bnexport.exporting.dimensions import Dimensions, Note
from bnexport.exporting.finish import MINIMUM_OPSET
from bnexport.exporting.job import ExportJob, Target, run
from bnexport.exporting.onnx_target import OnnxOptions, OnnxTarget
from bnexport.exporting.torch_target import TorchTarget
from bnexport.sync_bn.recognition import known_kind
from bnexport.verification.reference import Reference
from bnexport.verification.verdict import Verification


@dataclasses.dataclass(frozen=True)
class ExportResult:
    """Result of an export: the file, its graph, the folds (mode deploy) and the verification.

    model: an onnx_ir.Model, torch.jit.ScriptModule or torch.export.ExportedProgram, as the format.
    exporter: what made the graph: "dynamo" or "torchscript"; for the format "torchscript" "script" or
    "trace", for "pt2" "torch.export". notes: deviations from what was asked for.
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

    def __repr__(self) -> str:
        return f"ExportResult({str(self.path)!r}, {self.verification.status}, {len(self.notes)} notes)"

    def _repr_html_(self) -> str:
        folds = "" if self.report is None else self.report._repr_html_()
        return f"{folds}\n{self.verification._repr_html_()}"

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
    model: nn.Module | torch.export.ExportedProgram | str | os.PathLike[str],
    args: Any,
    path: str | os.PathLike[str] = "",
    *,
    kwargs: Mapping[str, Any] | None = None,
    mode: Literal["deploy", "custom_op"] = "deploy",
    exporter: Literal["dynamo", "torchscript"] | None = None,
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
    overwrite: bool = False,
) -> ExportResult:
    """Exports `model` to a file at `path`. The module, its state and its mode stay untouched.

    mode "deploy": inference. Sync batch norm of any kind becomes BatchNormalization and is folded
    into the neighbouring weights; the file needs no part of bnexport.

    mode "custom_op": every sync batch norm stays a node `MMCVSyncBatchNorm`, in the module's own
    mode. For a module in train mode the model's outputs come first, then each updated statistic as
    the output `name.new`; the initializer `name` (as in the state_dict) holds its old value. Batch
    norms of one process carry a portable body of standard operators; a group of several processes
    needs the custom-op library and a registered group, under the name "world" for the default one.
    It is for ONNX only.

    The formats "torchscript" (scripted, or traced where it cannot be scripted, and frozen) and "pt2"
    (torch.export.save) hold torch's own operators only, folded by `fold_module`, and load without
    bnexport.

    Args:
        model: the module; in mode "custom_op" its train or eval mode counts. The one inside DistributedDataParallel,
            DataParallel or torch.compile is exported. Or a torch.export.ExportedProgram, or the name of a .pt2 file with one:
            what is constant in the program is static in the file.
        args: example inputs for the positional parameters: a tensor, or a tuple of tensors, dicts, lists and tuples of
            tensors, numbers, strings and None. Each tensor is an input of the file, anything else a constant.
        path: the file to write, atomically.
        kwargs: example inputs that forward takes by keyword; inputs of the file behind `args`.
        mode: "deploy" or "custom_op".
        exporter: for ONNX, "dynamo" (torch.export; torch 2.9 or newer) or "torchscript" (tracing); None for dynamo where
            this torch has it, else TorchScript, with a note.
        format: "onnx", "torchscript" or "pt2"; None for the one that the suffix of `path` names: .onnx, .pt or .pt2.
        dynamic: dimension 0 and every dimension from 2 on of each input of rank >= 2 are dynamic, where the exported
            model is right at other sizes; the others get the example's size, with a note. A mapping chooses them one by
            one: {"x": {0: "batch", 2: "height"}} with their names, or {"x": [0]}; other inputs are static. A
            dimension that it names and that the file cannot have dynamic is an error.
        opset_version: of an ONNX graph, 18 or newer; the IR version is the lowest that it needs.
        verify: run the exported model, in ONNX Runtime or in a new process, and compare it with a copy of
            `model` itself, on `args` and at other sizes of the dynamic dimensions.
        fold: in mode "deploy", fold batch norms into the neighbouring weights.
        simplify: after folding, evaluate shape arithmetic and constants and remove nodes without effect.
        external_data: write the weights of an ONNX file to a second file; None: only if the file would be too large.
        input_names: names in an ONNX graph; by default forward's parameter names.
        output_names: names in an ONNX graph; by default "output" (or "output_0", ..., or the keys of a dict).
        certificate: write the names of the nodes of each fold into an ONNX file's metadata, as `fold` does; the original
            is the graph that fold=False writes. It is left out, with a note, if simplification breaks the proof.
        overwrite: replace a file at `path`.

    Warns:
        NotVerifiedWarning: the file was written, and nothing could verify it.

    Raises:
        UsageError: an argument is wrong.
        UnsupportedModelError: the model cannot be exported with its semantics kept; says what to do.
        VerificationError: the exported model differs from torch; no file is written.
    """
    interface.check_choice("mode", mode, interface.MODES)
    tracer, exporter_note = _choose_exporter(exporter)
    arguments.check_path(path, overwrite)
    program = arguments.program_of(model)
    given = arguments.read(model if program is None else program.module(), args, kwargs or {})
    file = pathlib.Path(path)
    kind = interface.choose_format(file, format)
    if kind != "onnx":
        _check_torch_format(kind, mode, input_names or output_names)
    names = tuple(input_names or given.names)
    if len(names) != len(given.inputs):
        raise UsageError(f"input_names: got {len(names)} names, expected {len(given.inputs)}, one for each input")
    options = OnnxOptions(mode, tracer, opset_version, fold, simplify, external_data, output_names, certificate)
    model_io.check_space(file, sum(tensor.nbytes for tensor in given.model.state_dict().values()))
    dimensions = Dimensions.chosen(names, given.inputs, dynamic)
    job = ExportJob(
        given.model,
        dimensions if program is None else dynamo.bound(dimensions, program),
        file,
        _reference(given.model, given.inputs, evaluate=mode == "deploy") if verify else None,
    )
    target: Target = OnnxTarget(job, options) if kind == "onnx" else TorchTarget(job, kind, fold=fold)
    artifact, verification = run(job, target)
    if verify:
        verification.warn(str(file), stacklevel=2)
    report, notes = artifact.report, [*given.notes, *artifact.dimensions.static.values(), *artifact.notes]
    if mode == "deploy" and any(module.training and known_kind(module) for module in given.model.modules()):
        notes.append(Note("mode", "the module is in train mode; mode 'deploy' writes it in eval mode"))
    if kind != "onnx" and report is not None and report.kept:
        notes.append(Note("unfolded", "ONNX files fold more: where that takes a new operator, or a change of the code"))
    if exporter_note is not None and kind == "onnx":
        notes.append(exporter_note)
    for note in notes:
        if note.kind in ("scripting", "mode"):
            warnings.warn(str(note), UserWarning, stacklevel=2)
    return ExportResult(
        path=file,
        model=artifact.model,
        mode=mode,
        exporter=artifact.exporter,
        training=bool(artifact.state),
        inputs=names,
        outputs=(*artifact.outputs, *artifact.state),
        state=tuple(name.removesuffix(schema.NEW_SUFFIX) for name in artifact.state),
        report=report,
        verification=verification.with_folds_of(None if report is None else report.verification),
        notes=tuple(map(str, notes)),
        format=kind,
    )


def _choose_exporter(given: str | None) -> tuple[str, Note | None]:
    """Return the exporter, and a note if it is not dynamo by default."""
    needed = torch_versions.DYNAMO_EXPORTER
    if given is None and not torch_versions.has(needed):
        wanted = ".".join(map(str, needed))
        text = f"written by the TorchScript exporter: the dynamo exporter needs torch {wanted}, got {torch.__version__}"
        return "torchscript", Note("exporter", text)
    chosen = "dynamo" if given is None else given
    interface.check_choice("exporter", chosen, interface.EXPORTERS)
    if chosen == "dynamo":
        torch_versions.require(needed, "exporter='dynamo'")
    return chosen, None


def _reference(model: nn.Module, inputs: tuple[torch.Tensor, ...], *, evaluate: bool) -> Reference:
    """Run the caller's module before anything is prepared; later where a run might wait for other processes."""
    reference = Reference(model, evaluate=evaluate)
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        reference.run_first(inputs)
    return reference


def _check_torch_format(format: str, mode: str, names: list[str] | None) -> None:
    if mode != "deploy":
        raise UsageError(f"mode: got {mode!r} with format {format!r}, expected 'deploy'; only ONNX can keep the node")
    if names:
        raise UsageError(f"input_names, output_names: given with format {format!r}, expected with 'onnx' only")
