"""Files of torch's own formats, TorchScript and pt2: the module is folded, built, and checked in a new process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bnexport import model_io
from bnexport.errors import UnsupportedModelError, VerificationError
from bnexport.exporting import dynamo, pt2, torchscript_format, wrapper
from bnexport.exporting.dimensions.dynamic import Dimensions
from bnexport.exporting.dimensions.size_conditions import Limit
from bnexport.exporting.job import Artifact, ExportJob
from bnexport.exporting.notes import Note
from bnexport.exporting.substitutes.plain_parameters import with_plain_parameters
from bnexport.folding.module import ModuleOptions, fold_copy
from bnexport.folding.reporting.report import FoldReport
from bnexport.model_io import Staged
from bnexport.runtime.engine import Engine
from bnexport.sync_bn.nesting import room_for
from bnexport.torch_versions import pytree
from bnexport.verification import fresh_process


class TorchTarget:
    """The model in eval mode; every sync batch norm is folded or becomes torch's own operator.

    format: "torchscript" or "pt2". A TorchScript file declares no sizes.
    """

    place = "a process of its own"
    unverifiable = ""

    def __init__(self, job: ExportJob, format: str, *, fold: bool) -> None:
        self._job, self._format = job, format
        self.guarded = self.declares = format == "pt2"
        converted = self._work = wrapper.for_deploy(job.model)
        self._outputs = _output_names(wrapper.run(job.model, converted, job.inputs))
        self._report: FoldReport | None = None
        self._notes: list[Note] = []
        if fold:
            self._fold()
        if job.reference is not None:
            job.reference.complete(converted)

    def _fold(self) -> None:
        job = self._job
        try:
            folded, self._report = fold_copy(job.model, job.inputs, ModuleOptions(), prove=job.reference is not None)
        except UnsupportedModelError as error:
            self._notes.append(Note("unfolded", f"nothing was folded: {error}"))
            return
        proof = self._report.verification
        if proof is not None and proof.status == "failed":
            raise VerificationError(
                f"{job.path}: the folded module differs from the model, nothing was written: {proof.reason}"
            )
        self._work = wrapper.with_torchs_operators(folded)

    def build(self, dimensions: Dimensions) -> Artifact:
        model: Any
        allows, method = None, "torch.export"
        notes: list[Note] = []
        bounds: tuple[Limit, ...] = ()
        with room_for(self._work):
            if self._format == "pt2":
                model, dimensions = pt2.build(self._work, dimensions)
                allows, bounds = functools.partial(pt2.allows, model), dynamo.limits_of(model, dimensions)
            else:
                model, method, notes = torchscript_format.build(with_plain_parameters(self._work), dimensions.inputs)
        return Artifact(
            model,
            method,
            self._outputs,
            dimensions,
            (*self._notes, *notes),
            report=self._report,
            allows=allows,
            limits=bounds,
        )

    def stage(self, artifact: Artifact) -> Staged:
        save = pt2.save if self._format == "pt2" else torchscript_format.save
        return model_io.stage_file(self._job.path, lambda path: save(artifact.model, Path(path)))

    @contextlib.contextmanager
    def open(self, artifact: Artifact, file: str) -> Iterator[Sequence[Engine]]:
        with fresh_process.FreshProcess(Path(file), self._format) as engine:
            yield [engine]


def _output_names(output: Any) -> tuple[str, ...]:
    """Return names for the tensors among the model's outputs, as an ONNX graph would have them."""
    leaves, spec = pytree.tree_flatten(output)
    names = wrapper.output_names(spec, len(leaves))
    return tuple(name for name, value in zip(names, leaves) if isinstance(value, torch.Tensor))
