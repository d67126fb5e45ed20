"""fold: load, convert, fold, verify, write - in this order, so that nothing unverified is written."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport.errors import VerificationError
from bnexport.folding import verification
from bnexport.folding.context import Options
from bnexport.folding.engine import Engine, count
from bnexport.folding.mixed_types import insert_casts
from bnexport.folding.report import FoldReport
from bnexport.folding.verification import Source, VerifyResult
from bnexport.model_io import ModelSource, write
from bnexport.model_io.read import open_source

SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True)
class FoldResult:
    """model: the folded model, the caller's own. report: what was done to it."""

    model: ir.Model
    report: FoldReport

    def to_dict(self) -> dict[str, Any]:
        return self.report.to_dict()


def fold(
    source: Source,
    target: str | os.PathLike[str] | None = None,
    *,
    verify: bool = True,
    inputs: Mapping[str, np.ndarray] | Sequence[Mapping[str, np.ndarray]] | None = None,
    seed: int = 0,
    samples: int = 2,
    atol: float | None = None,
    rtol: float | None = None,
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    max_scale: float = 1e6,
    training_to_inference: bool = False,
    rules: Iterable[str] | None = None,
    overwrite_input: bool = False,
    external_data: bool | None = None,
) -> FoldResult:
    """Folds every batch norm that can be folded; writes the result to `target` if one is given.

    source is never changed. verify, inputs, seed, samples, atol, rtol: as `verify` takes them. only,
    skip: labels of nodes, as the report shows them. max_scale: largest |gamma| / std that is folded.
    training_to_inference: also turn BatchNormalization that trains into inference. rules: names of the
    rules that may be used (`bnexport.folding.rules.ALL`).

    Raises ModelError for a model that is refused, VerificationError (then nothing is written) when the
    outputs differ. A model that nothing can run is written, and the report says "not verified".
    """
    opened = open_source(source)
    model = opened.model
    options = Options(
        max_scale=max_scale,
        only=None if only is None else frozenset(only),
        skip=frozenset(skip),
        training_to_inference=training_to_inference,
        rules=None if rules is None else frozenset(rules),
    )
    before = count(model)
    references = [ModelSource(model.clone(), opened.path)] if verify else []
    engine = Engine(model, options)
    engine.convert()
    if verify and engine.converted:
        if engine.training_converted:
            references.clear()
        converted = model.clone()
        insert_casts(converted)
        references.append(ModelSource(converted, None))
    engine.fold()
    if engine.converted:
        insert_casts(model)
    report = FoldReport(
        sites=tuple(engine.sites),
        before=before,
        after=count(model),
        meaning_changed=engine.meaning_changed,
        source=opened.path,
        target=None if target is None else os.fspath(target),
    )
    staged = None
    try:
        if target is not None:
            own = [opened.path] if opened.path else []
            staged = write.stage(
                model, target, inputs=own, overwrite_input=overwrite_input, external_data=external_data
            )
        if verify and report.changed:
            candidate = ModelSource(model, None if staged is None else staged.path)
            arguments = {"inputs": inputs, "seed": seed, "count": samples, "atol": atol, "rtol": rtol}
            result = _verify(references, candidate, engine.training_converted, arguments)
            report = dataclasses.replace(report, verification=result)
            if result.status == "failed":
                raise VerificationError(
                    f"the folded model differs from the original: {result.reason}; nothing was written"
                )
        if staged is not None:
            staged.commit()
    finally:
        if staged is not None:
            staged.discard()
    return FoldResult(model, report)


def _verify(
    references: list[ModelSource], candidate: ModelSource, training: bool, arguments: dict[str, Any]
) -> VerifyResult:
    """Against the first reference that can be run: the original, or else the converted but unfolded graph."""
    result = VerifyResult("not verified", "there is no reference")
    for index, reference in enumerate(references):
        result = verification.compare(reference, candidate, **arguments)
        if index or training:
            result = dataclasses.replace(result, reference="converted")
        if result.status != "not verified":
            break
    return result
