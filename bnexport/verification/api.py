"""Function verify: compare two models, with MMCVSyncBatchNorm converted if no library implements it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import onnx_ir as ir

from bnexport.errors import UsageError
from bnexport.model_io.read import Source, open_source
from bnexport.runtime.injection import check_providers
from bnexport.verification import models
from bnexport.verification.positions import match_by_position
from bnexport.verification.proving import prove_between, prove_report
from bnexport.verification.terms import Inputs, Terms
from bnexport.verification.verdict import Method, Verification


class _HasDictionary(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


Report = _HasDictionary | Mapping[str, Any] | str | os.PathLike[str]
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
    method: Method = "both",
    report: Report | None = None,
    providers: Sequence[str] = (),
    fixed_initializers: bool = False,
) -> Verification:
    """Run both models on the same inputs and compare every output; prove the folds that tell them apart.

    What cannot be run, crashes or takes too long is a result, not an error.

    Args:
        reference: a path, ModelProto or onnx_ir.Model.
        candidate: the model to check, with the same inputs and outputs; those of other names are matched by position where
            their types and shapes agree, and the verdict's `reason` says so.
        inputs: arrays by the names of the inputs, one set or several; None makes random ones, of several scales and
            sizes of dynamic dimensions.
        seed: of the first random set; the others count on.
        samples: number of random sets at the first sizes; one of them has another scale.
        atol: absolute bound instead of the table's (`bnexport/tolerances.py`).
        rtol: bound relative to each value of the reference; what is not given of the two is 0 then.
        timeout: seconds for both models together; None for no limit.
        method: "local" finds where the candidate folds batch norms of the reference, whatever tool did it, and proves or
            refutes each fold in float64; nothing is run. The certificate that `fold` wrote into the candidate says where
            to look; it is not trusted. "whole" runs both models. "both" does both, or "whole" where
            atol or rtol is given.
        report: of the fold that made `candidate` of `reference`: a FoldReport, its `to_dict()`, or the path of its JSON.
            Then nothing is run: each fold is proved where it stands, in float64, and everything else has to be equal.
        providers: execution providers of ONNX Runtime that run the candidate; the reference runs on the CPU.
        fixed_initializers: no caller overrides initializers that are inputs as well; either model may lack those inputs.

    Raises:
        ModelError: a file is refused.
        UsageError: `report` is no fold report, or a provider is none of this ONNX Runtime's.
    """
    if method not in ("local", "whole", "both"):
        raise UsageError(f'method: got {method!r}, expected "local", "whole" or "both"')
    for name, bound in (("atol", atol), ("rtol", rtol)):
        if bound is not None and not 0 <= bound < math.inf:
            raise UsageError(f"{name}: got {bound}, expected a number that is not negative and not infinite")
    first, second = (open_source(each, fixed_initializers=fixed_initializers).model for each in (reference, candidate))
    if report is not None:
        return prove_report(first, second, _report_of(report))
    second, matched = match_by_position(first, second)
    terms = Terms(inputs, seed, samples, atol, rtol, timeout, providers=tuple(check_providers(providers)))
    verdict = _verdict(first, second, terms, method)
    return dataclasses.replace(verdict, reason=matched) if matched and verdict.passed else verdict


def _verdict(first: ir.Model, second: ir.Model, terms: Terms, method: Method) -> Verification:
    # Bounds of the caller's are for models that differ by more than a fold.
    whole = method == "whole" or (method == "both" and (terms.atol is not None or terms.rtol is not None))
    proof = None if whole else prove_between(first, second)
    if proof is not None and method == "local":
        return proof
    result = models.compare_or_convert(first, second, terms)
    # Where nothing was folded the proof is about nothing.
    if proof is None or not (proof.sites or proof.another):
        return dataclasses.replace(result, certificate="" if proof is None else proof.certificate)
    return proof.joined(result)


def _report_of(report: Report) -> Mapping[str, Any]:
    """Read the JSON of a report. Raises UsageError."""
    if isinstance(report, Mapping):
        return report
    if not isinstance(report, str | os.PathLike):
        return report.to_dict()
    try:
        with open(report, "rb") as file:
            # A device or a pipe has no size; what is read is bounded all the same.
            text = file.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise UsageError(f"report: {os.fspath(report)!r} has more than {_LARGEST} bytes")
        data = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"report: {os.fspath(report)!r} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"report: {os.fspath(report)!r} holds no fold report")
    return data
