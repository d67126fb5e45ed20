"""Functions fold and inline: load, change, verify, then write, so that no unverified file is written."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

from bnexport import interface, schema
from bnexport.errors import UnsupportedModelError, VerificationError
from bnexport.folding.context import Leftover, Options
from bnexport.folding.folder import Folding, check_selection
from bnexport.folding.report import Counts, FoldReport, certify, count
from bnexport.graph.conversion import convert, insert_casts
from bnexport.graph.functions import inline_functions
from bnexport.graph.nodes import Refused, is_portable_body, is_quantised, is_sync_batch_norm, label, training_mode
from bnexport.graph.shapes import Shapes
from bnexport.graph.standard_ops import standardise, words_for
from bnexport.model_io import ModelSource, Staged, check_space, load, stage, to_proto, walk, write
from bnexport.model_io.read import Source, open_source, paused_collection
from bnexport.model_io.write import check_new
from bnexport.verification.verdict import AS_WRITTEN, Method, SiteProof, Terms, Verification, WindowEnd, as_method

# Parameters up to which whole models are run as well, where the caller leaves the choice.
WHOLE_BYTES = 1 << 30
_NOT_ASKED = "only whole models were compared"


@dataclasses.dataclass(frozen=True)
class FoldResult:
    """model: the folded model, owned by the caller: a ModelProto if `source` was one, else an onnx_ir.Model.

    report: what was done to it.
    """

    model: Any
    report: FoldReport

    def __repr__(self) -> str:
        return f"FoldResult({type(self.model).__name__}, {self.report!r})"

    def _repr_html_(self) -> str:
        return self.report._repr_html_()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as the command line prints it with --json."""
        return self.report.to_dict()


def fold(
    source: Source,
    target: str | os.PathLike[str] | None = None,
    *,
    verify: bool | Method = True,
    inputs: Mapping[str, np.ndarray] | Sequence[Mapping[str, np.ndarray]] | None = None,
    seed: int = 0,
    samples: int = 2,
    atol: float | None = None,
    rtol: float | None = None,
    timeout: float | None = None,
    proof_seconds: float | None = None,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    max_scale: float = 1e6,
    training_to_inference: bool = False,
    leftover: Leftover = "batch-norm",
    simplify: bool = False,
    overwrite: bool = False,
    external_data: bool | None = None,
    certificate: bool = True,
    fixed_initializers: bool = False,
    standard_ops: bool = True,
) -> FoldResult:
    """Fold every batch norm that can be folded; write the result to `target` if one is given.

    A model that nothing can run is written, and the report says "not verified".

    Args:
        source: a path, ModelProto or onnx_ir.Model; never changed.
        target: the file to write, atomically.
        verify: "local" proves each fold where it stands, in float64, and compares everything else byte by byte; "whole"
            runs both models in a process of its own, and compares their outputs; "both" does both. True is "both" up
            to 1 GiB of parameters and "local" above, False is nothing.
        inputs: as `verify` takes them, and so are seed, samples, atol, rtol, timeout and proof_seconds.
        only: labels of the nodes to fold, as the report shows them; None for all. `parallel` stands for all merges
            of branches.
        skip: labels of nodes to leave alone; `parallel` for branches.
        max_scale: largest |gamma| / std that is folded.
        training_to_inference: also turn BatchNormalization that trains into inference.
        leftover: the form of what stays: "batch-norm" as it is; "conv", a depthwise 1x1 Conv (Mul and Add for data of
            rank 2); "arithmetic", Mul and Add.
        simplify: after folding, evaluate shape arithmetic and constants and remove what has no effect, as an export does;
            the folds are proved before, and whole models are compared afterwards, whatever `verify` says but False. Needs
            onnxscript.
        overwrite: replace `target` if it exists, as a whole; it may be `source`.
        external_data: write the weights to a file beside `target`; None where the source has them so, or where
            one protobuf message cannot hold them.
        certificate: write the names of the nodes of each fold into the model's metadata (`bnexport.sites`), with which
            `verify` proves each fold. Not where nothing was folded.
        fixed_initializers: no caller overrides initializers that are inputs as well, as PyTorch up to 1.2 and MXNet wrote
            them (IR version 4 and up): they are constants, and no inputs of the result.
        standard_ops: first write the operators of MMCV and MMDeploy as standard ones, and raise the opset where these need
            it; the notes name them, and those that stay with the reason (`bnexport.graph.standard_ops`).

    Warns:
        NotVerifiedWarning: `target` was written, and nothing could verify it.

    Raises:
        UsageError: an argument is wrong, `only` or `skip` names no batch norm, or `target` exists or cannot be written.
        ModelError: the model is refused.
        VerificationError: the outputs differ; nothing was written.

    Examples:
        >>> import onnx
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 9, opset_import: ["" : 17]>
        ...     net (float[N, 1] x) => (float[N, 2] y)
        ...     <float[1, 2] w = {1, 2}, float[2] gamma = {3, 3}, float[2] beta = {1, 1},
        ...      float[2] mean = {0, 0}, float[2] var = {0.25, 1}>
        ...     {
        ...         h = MatMul(x, w)
        ...         y = BatchNormalization <epsilon = 0.0> (h, gamma, beta, mean, var)
        ...     }
        ... ''')
        >>> result = fold(model, verify=False)
        >>> [node.op_type for node in result.model.graph.node]
        ['MatMul', 'Add']
        >>> weight = next(each for each in result.model.graph.initializer if each.name == result.model.graph.node[0].input[1])
        >>> onnx.numpy_helper.to_array(weight).ravel().tolist()
        [6.0, 6.0]
        >>> [site.outcome for site in result.report.sites]
        ['folded']
    """
    write.check_new(target, overwrite)
    options = Options.of(
        max_scale=max_scale,
        only=only,
        skip=skip,
        training_to_inference=training_to_inference,
        leftover=leftover,
    )
    terms = Terms(inputs, seed, samples, atol, rtol, timeout, proof_seconds=proof_seconds)
    method = as_method(verify)
    if simplify and method == "local":
        method = "both"
    if method in ("whole", "both"):
        from bnexport.verification.process import PROCESS

        PROCESS.start()
    opened = functools.partial(open_source, source, fixed_initializers=fixed_initializers)
    keep = method is not None
    work = functools.partial(_fold, opened, target, keep, overwrite, external_data, certificate, simplify, standard_ops)
    result = None
    if target is not None:
        # Most weights can be scaled: reading them twice, only to know it before, is hardly ever worth it.
        with contextlib.suppress(Refused):
            result = work(dataclasses.replace(options, check_early=False))
    done, staged = result or work(options)
    report = dataclasses.replace(
        done.report,
        target=None if target is None else os.fspath(target),
        notes=(*done.report.notes, *_notes(staged)),
    )
    judge = None
    if method is not None and (report.changed or simplify):
        judge = functools.partial(_verify, done, method=method, chosen_here=verify is True, terms=terms)
    model, verification = commit(done.model, staged, done.report.source, judge, "folded")
    if verification is not None and verification.outputs and is_quantised(model):
        report = dataclasses.replace(report, notes=(*report.notes, AS_WRITTEN))
    report = dataclasses.replace(report, verification=verification)
    return FoldResult(to_proto(model) if isinstance(source, onnx.ModelProto) else model, report)


def _notes(staged: Staged | None) -> tuple[str, ...]:
    if staged is None or not staged.too_large:
        return ()
    return (
        f"the model is too large for one protobuf message (2 GiB); its weights are in {staged.data_name!r} beside it",
    )


def commit(
    model: ir.Model,
    staged: Staged | None,
    source: str | None,
    judge: Callable[[ir.Model], Verification] | None,
    what: str,
) -> tuple[ir.Model, Verification | None]:
    """Verify the staged file, or `model` where nothing is staged, and commit it; return the model and the verdict.

    Args:
        source: the file that `model` was read from.
        judge: compares with the original; None for no verification.
        what: how an error calls the model.

    Warns:
        NotVerifiedWarning: the file was written, and nothing could verify it.

    Raises:
        VerificationError: the outputs differ; nothing was written.
    """
    verdict = None
    try:
        if judge is not None:
            # What is verified is what was written.
            verdict = judge(model if staged is None else load(staged.path))
            if verdict.status == "failed":
                raise VerificationError(
                    f"the {what} model differs from the original: {verdict.reason}; nothing was written"
                )
        if staged is not None:
            staged.commit()
            if staged.target == source:
                # Lazy weights refer to the file that has just been replaced.
                model = load(staged.target)
            if verdict is not None:
                verdict.warn(staged.target, stacklevel=3)
    finally:
        if staged is not None:
            staged.discard()
    return model, verdict


@dataclasses.dataclass(frozen=True)
class _Transformed:
    """A fold after its changes of `model`, and the references for its verification, best first.

    unfolded: the source with its calls inlined and its sync batch norms converted, for the local proof. folded: what it is
    to prove: the model, or a copy from before it was simplified.
    """

    model: ir.Model
    folding: Folding
    references: tuple[ir.Model, ...]
    unfolded: ir.Model | None
    report: FoldReport
    folded: ir.Model


@paused_collection()
def _fold(
    open_model: Callable[[], ModelSource],
    target: str | os.PathLike[str] | None,
    verify: bool,
    overwrite: bool,
    external_data: bool | None,
    certificate: bool,
    simplify: bool,
    standard_ops: bool,
    options: Options,
) -> tuple[_Transformed, Staged | None]:
    """Fold and stage the file. Raise Refused if a weight is found not to fit its type only while it is written."""
    opened = open_model()
    if schema.TRAINING_METADATA in opened.model.metadata_props:
        raise UnsupportedModelError(
            f"{opened.path or 'model'}: it is a training step, no inference model;"
            " TrainingSession(...).export_inference(path) writes a folded one"
        )
    check_selection(opened.model, only=options.only or (), skip=options.skip)
    before = count(opened.model)
    if target is not None:
        # Batch norms leave, convolutions stay: nine tenths is a lower bound for all but tiny models.
        check_space(target, before.parameter_bytes * 9 // 10)
    if external_data is None and write.has_external_data(opened.model):
        external_data = True
    done = _transform(opened, before, options, standard_ops, keep_references=verify)
    if simplify:
        done = _simplified(done, keep_references=verify)
    unfolded = done.unfolded if simplify else None
    done = dataclasses.replace(done, report=certify(opened.model, done.report, wanted=certificate, original=unfolded))
    if target is None:
        return done, None
    own = [opened.path] if opened.path else []
    return done, write.stage(opened.model, target, inputs=own, overwrite_input=overwrite, external_data=external_data)


def _transform(
    opened: ModelSource, before: Counts, options: Options, standard_ops: bool, *, keep_references: bool
) -> _Transformed:
    """Convert and fold `opened.model` in place."""
    model = opened.model
    original = unfolded = model.clone() if keep_references else None
    called, opset = bool(model.functions), model.graph.opset_imports.get("")
    rewrites = standardise(model) if standard_ops else ()
    standard = any(each.reason is None for each in rewrites)
    folding = Folding(model, options)
    folding.convert()
    if keep_references and (folding.converted or called or standard):
        unfolded = model.clone()
        if folding.converted:
            insert_casts(unfolded)
    folding.fold()
    report = folding.report(before, (*opened.notes, *words_for(rewrites, opset, model)), opened.path)
    report = dataclasses.replace(report, standardised=sum(each.reason is None for each in rewrites))
    # The caller asked for another meaning of a training graph: its original says nothing.
    kept = (None if folding.training_converted else original, unfolded if folding.converted or standard else None)
    references = tuple(reference for reference in kept if reference is not None)
    return _Transformed(model, folding, references, unfolded, report, model)


def _simplified(done: _Transformed, *, keep_references: bool) -> _Transformed:
    """Simplify the model in place. Raises MissingPackageError without onnxscript."""
    try:
        from bnexport.graph.simplify import simplify
    except ImportError as error:
        raise interface.missing("onnxscript", "simplify=True") from error
    folded = done.model.clone() if keep_references else done.model
    # What a file declares for its outputs is its interface; simplification evaluates what it believes to be constant.
    declared = [output.shape for output in done.model.graph.outputs]
    for output in done.model.graph.outputs:
        output.shape = None
    Shapes(done.model).confirm()
    simplify(done.model)
    for output, shape in zip(done.model.graph.outputs, declared, strict=True):
        output.shape = shape
    return dataclasses.replace(done, folded=folded, report=dataclasses.replace(done.report, after=count(done.model)))


def _verify(done: _Transformed, candidate: ir.Model, method: Method, chosen_here: bool, terms: Terms) -> Verification:
    """Verify by the chosen methods. chosen_here: leave out whole models where they are large."""
    proof = None
    is_simplified = done.folded is not done.model
    if method != "whole" and done.unfolded is not None:
        from bnexport.verification.api import prove_fold

        proof = prove_fold(
            done.unfolded,
            done.folded if is_simplified else candidate,
            done.report.claims,
            terms.proof_seconds,
        )
        if done.folding.converted:
            proof = dataclasses.replace(proof, reference="converted")
        large = chosen_here and done.report.before.parameter_bytes > WHOLE_BYTES
        if method == "local" or proof.status == "failed" or (large and proof and not is_simplified):
            return proof
    result = _run(done, candidate, terms, () if proof is None or is_simplified else proof.ends)
    if proof is not None:
        return proof.joined(result)
    names = (" + ".join(site.nodes) for site in done.folding.sites if site.changed)
    return dataclasses.replace(result, sites=tuple(SiteProof(name, "not_run", reason=_NOT_ASKED) for name in names))


def _run(done: _Transformed, candidate: ir.Model, terms: Terms, ends: Sequence[WindowEnd]) -> Verification:
    """Run against the first reference that an engine can run: the original, else the converted but unfolded graph."""
    from bnexport.verification import api

    result = Verification.skipped("there is no reference")
    for index, reference in enumerate(done.references):
        result = api.compare(reference, candidate, terms, ends)
        if index or done.folding.training_converted:
            result = dataclasses.replace(result, reference="converted")
        if result.status != "not_verified":
            break
    return result


# Function inline: files with model-local functions for runtimes that do not read functions.
#
#     MMCVSyncBatchNorm in inference -> BatchNormalization, which every runtime has
#     MMCVSyncBatchNorm in training  -> its portable body
#     a call of any other function   -> the function's body
#
# Nothing is folded, and a graph that trains still does.

_STANDARD = frozenset(("", "ai.onnx", "ai.onnx.ml"))


@dataclasses.dataclass(frozen=True)
class InlineResult:
    """model: without functions; a ModelProto if `source` was one, else an onnx_ir.Model.

    calls: how many calls of each function were replaced, by "domain:name". converted: sync batch norms in inference that
    became BatchNormalization. foreign: operators outside ONNX's own domains that remain, as "domain:name".
    """

    model: Any
    calls: Mapping[str, int]
    converted: int
    foreign: tuple[str, ...]
    verification: Verification | None

    @property
    def changed(self) -> bool:
        """Whether there was anything to inline."""
        return bool(self.calls or self.converted)

    def to_dict(self) -> dict[str, Any]:
        """Return what the command line prints with --json."""
        return {
            "changed": self.changed,
            "calls": dict(self.calls),
            "converted": self.converted,
            "foreign": list(self.foreign),
            "verification": None if self.verification is None else self.verification.to_dict(),
        }


def inline(
    source: Source,
    target: str | os.PathLike[str] | None = None,
    *,
    verify: bool = True,
    inputs: Mapping[str, np.ndarray] | Sequence[Mapping[str, np.ndarray]] | None = None,
    seed: int = 0,
    samples: int = 2,
    atol: float | None = None,
    rtol: float | None = None,
    timeout: float | None = None,
    overwrite: bool = False,
    external_data: bool | None = None,
) -> InlineResult:
    """Replace every call of a model-local function by its body; write the result to `target` if one is given.

    For runtimes that do not read functions, such as OpenVINO, tract and onnx2torch; for inference, `fold` makes a
    smaller file.

    Args:
        source: a path, ModelProto or onnx_ir.Model; never changed.
        target: the file to write, atomically.
        verify: run both models in a process of its own and compare their outputs.
        inputs: as `verify` takes them, and so are seed, samples, atol, rtol and timeout.
        overwrite: replace `target` if it exists, as a whole; it may be `source`.
        external_data: write the weights to a file beside `target`; None where the source has them so, or where
            one protobuf message cannot hold them.

    Warns:
        NotVerifiedWarning: `target` was written, and nothing could verify it.

    Raises:
        UsageError: `target` exists or cannot be written.
        ModelError: the model is refused: a call that cannot be inlined, or a sync batch norm that trains over several
            processes, which no standard operators compute.
        VerificationError: the outputs differ; nothing was written.
    """
    check_new(target, overwrite)
    terms = Terms(inputs, seed, samples, atol, rtol, timeout)
    if verify:
        from bnexport.verification.process import PROCESS

        PROCESS.start()
    opened = open_source(source)
    model = opened.model
    original = model.clone() if verify else None
    calls, converted = _inline(model)
    foreign = sorted({f"{node.domain}:{node.op_type}" for node in walk.nodes(model) if node.domain not in _STANDARD})
    staged = None
    if target is not None:
        own = [opened.path] if opened.path else []
        staged = stage(model, target, inputs=own, overwrite_input=overwrite, external_data=external_data)
    judge = None
    if original is not None and (calls or converted):
        from bnexport.verification import api

        judge = functools.partial(api.compare, original, terms=terms)
    model, verification = commit(model, staged, opened.path, judge, "inlined")
    made = to_proto(model) if isinstance(source, onnx.ModelProto) else model
    return InlineResult(made, calls, converted, tuple(foreign), verification)


def _inline(model: ir.Model) -> tuple[dict[str, int], int]:
    """Inline in place; return the calls of each function and the number of converted sync batch norms."""
    calls = inline_functions(model, keep=is_portable_body)
    converted = _convert_inference(model)
    for node in walk.nodes(model):
        if is_sync_batch_norm(node) and node.op_identifier() not in model.functions:
            raise UnsupportedModelError(
                f"{label(node)}: this {node.op_type} trains and has no body of standard operators, as those of several"
                " processes and of training steps; it needs the custom-op library, or `bnexport fold` for inference"
            )
    calls |= inline_functions(model)
    if calls or converted:
        passes.RemoveUnusedNodesPass()(model)
        passes.RemoveUnusedOpsetsPass()(model)
    return calls, converted


def _convert_inference(model: ir.Model) -> int:
    """Convert sync batch norms in inference to BatchNormalization; count them."""
    if not any(is_sync_batch_norm(node) for node in walk.nodes(model)):
        return 0
    done = convert(model, choose=lambda node: not training_mode(node))
    insert_casts(model)
    return sum(each.batch_norm is not None for each in done)
