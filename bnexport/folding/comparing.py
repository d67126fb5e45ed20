"""Function verify: compare two models, with MMCVSyncBatchNorm converted if no library implements it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from bnexport.errors import UsageError
from bnexport.folding.folder import convert_model
from bnexport.folding.proving import prove_report
from bnexport.folding.reporting.report import FoldReport
from bnexport.model_io.read import Source, open_source
from bnexport.runtime.injection import check_providers
from bnexport.verification import models
from bnexport.verification.models import Inputs, Terms
from bnexport.verification.verdict import Verification

Report = FoldReport | Mapping[str, Any] | str | os.PathLike[str]
# Bytes of a report: some 100,000 sites.
_LARGEST = 1 << 28


def verify(
    reference: Source,
    candidate: Source,
    *,
    inputs: Inputs | None = None,
    seed: int = 0,
    samples: int = 2,
    atol: float | None = None,
    rtol: float | None = None,
    timeout: float | None = None,
    report: Report | None = None,
    providers: Sequence[str] = (),
) -> Verification:
    """Run both models on the same inputs and compare every output, or prove a fold from its report.

    What cannot be run, crashes or takes too long is a result, not an error.

    Args:
        reference: a path, ModelProto or onnx_ir.Model.
        candidate: the model to check, with the same inputs and outputs.
        inputs: arrays by the names of the inputs, one set or several; None makes random ones.
        seed: of the first random set; the others count on.
        samples: number of random sets.
        atol: absolute bound instead of the table's (`bnexport/tolerances.py`).
        rtol: bound relative to each value of the reference; what is not given of the two is 0 then.
        timeout: seconds for both models together; None for no limit.
        report: of the fold that made `candidate` of `reference`: a FoldReport, its `to_dict()`, or the path of its JSON.
            Then nothing is run: each fold is proved where it stands, in float64, and everything else has to be equal.
        providers: execution providers of ONNX Runtime that run the candidate; the reference runs on the CPU.

    Raises:
        ModelError: a file is refused.
        UsageError: `report` is no fold report, or a provider is none of this ONNX Runtime's.
    """
    if report is not None:
        data = _report_of(report)
        return prove_report(open_source(reference).model, open_source(candidate).model, data)
    first, second = open_source(reference).model, open_source(candidate).model
    chosen = tuple(check_providers(providers))
    terms = Terms(inputs, seed, samples, atol, rtol, timeout, providers=chosen)
    return models.compare_or_convert(first, second, terms, convert_model)


def _report_of(report: Report) -> Mapping[str, Any]:
    """Read the JSON of a report. Raises UsageError."""
    if isinstance(report, FoldReport):
        return report.to_dict()
    if isinstance(report, Mapping):
        return report
    try:
        if os.path.getsize(report) > _LARGEST:
            raise UsageError(f"report: {os.fspath(report)!r} has more than {_LARGEST} bytes")
        with open(report, encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"report: {os.fspath(report)!r} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"report: {os.fspath(report)!r} holds no fold report")
    return data
