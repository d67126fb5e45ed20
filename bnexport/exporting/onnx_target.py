"""ONNX files: traced by either exporter of torch, completed, folded, simplified, certified."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence

import onnx_ir as ir
import torch
from torch import nn

from bnexport import folding, model_io, schema
from bnexport.errors import BnexportError, LibraryError, UsageError, VerificationError, first_line
from bnexport.exporting import dynamo, torchscript, wrapper
from bnexport.exporting.dimensions import Dimensions, Note
from bnexport.exporting.finish import MINIMUM_OPSET, finish
from bnexport.exporting.job import Artifact, ExportJob, Session
from bnexport.exporting.substitutes import symbolic_int
from bnexport.exporting.wrapper import TracedGraph
from bnexport.folding.report import FoldReport, certify, count
from bnexport.graph.nodes import is_quantised, is_standard
from bnexport.graph.simplify import simplify
from bnexport.graph.standard_ops import standardise, words_for
from bnexport.model_io import Staged
from bnexport.modules.copies import room_for
from bnexport.runtime import engine
from bnexport.runtime.engine import Engine
from bnexport.sync_bn.recognition import is_sync_batch_norm
from bnexport.verification.api import Pair, prove_fold
from bnexport.verification.verdict import AS_WRITTEN

_TRACERS = {"dynamo": dynamo.trace, "torchscript": torchscript.trace}
_NEWEST_OPSET = {"dynamo": 23, "torchscript": 20}
_QUANTISED = Note("quantised", AS_WRITTEN)
# Characters of a cause in a note.
_LONGEST = 160


@dataclasses.dataclass(frozen=True)
class OnnxOptions:
    """Arguments of `export` that are for ONNX alone."""

    mode: str
    exporter: str
    opset: int
    fold: bool
    simplify: bool
    external_data: bool | None
    output_names: list[str] | None
    certificate: bool

    def __post_init__(self) -> None:
        newest = _NEWEST_OPSET[self.exporter]
        if not (isinstance(self.opset, int) and MINIMUM_OPSET <= self.opset <= newest):
            raise UsageError(
                f"opset_version: got {self.opset!r}, expected {MINIMUM_OPSET} to {newest} with exporter {self.exporter!r}"
            )


class OnnxTarget:
    """Mode "deploy", or "custom_op": every sync batch norm stays a node."""

    place = "ONNX Runtime"
    guarded = False
    declares = True

    def __init__(self, job: ExportJob, options: OnnxOptions) -> None:
        self._job, self._options = job, options
        self._deploy = options.mode == "deploy"
        prepared = wrapper.for_deploy(job.model) if self._deploy else wrapper.for_custom_op(job.model)
        state = [] if self._deploy else wrapper.training_state(prepared, job.inputs)
        self._state = {tensor.name: tensor.value for tensor in state}
        self._groups, self._shared = wrapper.group_names(prepared), wrapper.shared_names(prepared)
        self._traced = wrapper.Traced(prepared, state)
        self.unverifiable = ""
        if job.reference is not None:
            job.reference.complete(self._traced, list(self._state))
            if wrapper.crosses_processes(prepared):
                self.unverifiable = "its statistics span several processes; compare it where the group runs"
            elif any(tensor.dtype == torch.bfloat16 for tensor in job.inputs):
                self.unverifiable = "onnxruntime's Python interface takes no bfloat16 arrays"

    def build(self, dimensions: Dimensions) -> Artifact:
        with room_for(self._traced), wrapper.named_in_errors(self._job.model, self._traced, self._job.inputs):
            trace = self._trace(dimensions)
        graph, options = trace.model, self._options
        own = len(graph.graph.outputs) - len(self._state)
        outputs = options.output_names or wrapper.output_names(self._traced.output_spec, own)
        if len(outputs) != own:
            raise UsageError(f"output_names: got {len(outputs)} names, expected {own}, one for each output")
        finish(graph, list(outputs), self._state, self._groups, self._shared)
        opset = graph.graph.opset_imports.get("")
        standard = words_for(standardise(graph), opset, graph) if self._deploy else ()
        report = self._fold(graph) if self._deploy and options.fold else None
        return Artifact(
            graph,
            options.exporter,
            tuple(outputs),
            trace.dimensions,
            (
                *trace.notes,
                *self._lost(),
                *(Note("operator", text) for text in standard),
                *([_QUANTISED] if is_quantised(graph) else []),
            ),
            tuple(name + schema.NEW_SUFFIX for name in self._state),
            report,
            trace.conditions,
            limits=trace.limits,
        )

    def stage(self, artifact: Artifact) -> Staged:
        return model_io.stage(artifact.model, self._job.path, external_data=self._options.external_data)

    @contextlib.contextmanager
    def open(self, artifact: Artifact, file: str) -> Iterator[Sequence[Engine]]:
        """Open the file in every way in which it is meant to run: with the library, and by its portable body."""
        model, name = model_io.load(file), engine.label(engine.ENGINES[0])
        nodes = [node for node in model.graph.all_nodes() if node.op_type == schema.SYNC_BATCH_NORM.name]
        if not nodes:
            yield [Session(model, name)]
            return
        engines: list[Engine] = []
        has_body = all(node.op_identifier() in model.functions for node in nodes)
        try:
            engines.append(Session(model, f"{name} with the custom-op library", training=False))
        except LibraryError:
            if not has_body:
                raise
        yield [*engines, *([Session(model, f"{name} with the portable body")] if has_body else [])]

    def _trace(self, dimensions: Dimensions) -> TracedGraph:
        """TracedGraph the model with as many dynamic sizes as its exporter supports.

        Sizes of images stay symbolic through int(). Some operators need numbers, as a pooling its window, or the type int
        itself, as torch.arange(dtype=int): after a failure the exporter runs again, with int as it is. What it cannot write
        for other images at all, it writes for the example's; what not for other batches, for the example's batch.
        """
        tracer, opset = _TRACERS[self._options.exporter], self._options.opset
        if not dimensions.axes:
            return tracer(self._traced, dimensions, opset=opset)
        for int_of_sizes in (symbolic_int(self._traced.model), contextlib.nullcontext()):
            try:
                with int_of_sizes:
                    return tracer(self._traced, dimensions, opset=opset)
            except MemoryError:
                raise
            except Exception as error:  # torch raises many types
                failure = error
        if not isinstance(failure, BnexportError):
            for narrower in dimensions.narrower(f"the exporter cannot write it for other sizes: {_cause(failure)}"):
                with contextlib.suppress(Exception):
                    return tracer(self._traced, narrower, opset=opset)
        raise failure from None

    def _fold(self, graph: ir.Model) -> FoldReport:
        """Fold and simplify in place."""
        options, verify = self._options, self._job.reference is not None
        unfolded, sync = graph.clone(), _sync_batch_norms(graph, self._job.model)
        report = folding.BatchNormFolder().call(graph).report
        if verify and report.changed:
            original = Pair(unfolded, graph, inlined=report.inlined).unfolded
            verdict = prove_fold(original, graph, report.claims)
            if verdict.status == "failed":
                raise VerificationError(
                    f"the folded graph differs from the exported one, nothing was written: {verdict.reason}"
                )
            report = dataclasses.replace(report, verification=verdict)
        before = dataclasses.replace(report.before, batch_norm=report.before.batch_norm - sync, sync_batch_norm=sync)
        if options.simplify:
            simplify(graph)
        after = count(graph) if options.simplify else report.after
        report = dataclasses.replace(report, before=before, after=after)
        return certify(graph, report, wanted=options.certificate, original=unfolded if options.simplify else None)

    def _lost(self) -> list[Note]:
        """Return notes on buffers that a forward changes and that are no state of the file."""
        reference = None if self._deploy or self.unverifiable else self._job.reference
        return [
            Note("buffer", f"buffer {name!r} changes in a forward of the model; it is constant in the file")
            for name in (() if reference is None else reference.unreturned)
        ]


def _cause(error: BaseException) -> str:
    """Return the first line of the error that the others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)[:_LONGEST]


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
