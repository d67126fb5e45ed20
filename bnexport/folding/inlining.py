"""Function inline: files with model-local functions for runtimes that do not read functions.

    MMCVSyncBatchNorm in inference -> BatchNormalization, which every runtime has
    MMCVSyncBatchNorm in training  -> its portable body
    a call of any other function   -> the function's body

Nothing is folded, and a graph that trains still does.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes

from bnexport.errors import UnsupportedModelError
from bnexport.folding.api import commit
from bnexport.graph.conversion import convert
from bnexport.graph.functions import inline_functions
from bnexport.graph.nodes import is_portable_body, is_sync_batch_norm, label, training_mode
from bnexport.graph.simplify import insert_casts
from bnexport.model_io import stage, to_proto, walk
from bnexport.model_io.read import Source, open_source
from bnexport.model_io.write import check_new
from bnexport.verification import models
from bnexport.verification.process import PROCESS
from bnexport.verification.verdict import Terms, Verification

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
        judge = functools.partial(models.compare, original, terms=terms)
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
