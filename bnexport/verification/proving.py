"""Prove a fold from its report, or with nothing else at hand: what the local proof is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from bnexport.errors import BnexportError, UsageError, VerificationError, first_line
from bnexport.graph.converting.inference import convert
from bnexport.graph.inlining import inline_calls
from bnexport.graph.mixed_types import insert_casts
from bnexport.graph.nodes import is_standard, label
from bnexport.graph.sync_bn_nodes import has_sync_batch_norm
from bnexport.model_io import walk
from bnexport.verification.certificate import KEY, changes, decode
from bnexport.verification.local.search import prove
from bnexport.verification.verdict import CHANGED, Claim, Verification


def prove_fold(unfolded: ir.Model, folded: ir.Model, claims: Sequence[Claim]) -> Verification:
    """Prove each claim of a report where it stands. unfolded: the source, converted and with its calls inlined."""
    casts = _casts(unfolded)
    around = ([cast for node in claim.nodes for cast in casts.get(node, ())] for claim in claims)
    wider = [
        dataclasses.replace(claim, nodes=(*claim.nodes, *more)) for claim, more in zip(claims, around, strict=True)
    ]
    return prove(unfolded, folded, wider)


def prove_report(source: ir.Model, folded: ir.Model, report: Mapping[str, Any]) -> Verification:
    """Prove each fold in a report's JSON. source: the model that was folded; it is converted here.

    Raises UsageError where the report is no fold report.
    """
    claims, trained = _read_report(report)
    if report.get("inlined"):
        inline_calls(source)
    converted = _convert(source, trained=trained)
    verdict = prove_fold(source, folded, claims)
    return dataclasses.replace(verdict, reference="converted") if converted else verdict


def prove_between(source: ir.Model, changed: ir.Model) -> Verification:
    """Prove the folds between two models, where the certificate in `changed` says that they are; both are only read.

    Unless it proves every fold, the folds are searched for as well, and the verdict is the search's: regions that are
    only compared, at points, may have been chosen to hide something. The marks are those that leave less unproved.
    """
    claimed = prove_certified(source, changed)
    if claimed is None:
        return prove_unaided(source, changed)
    if claimed.passed and not _unproved(claimed):
        return dataclasses.replace(claimed, certificate="used")
    found = prove_unaided(source, changed)
    if not claimed.passed or found.status == "failed":
        return dataclasses.replace(found, certificate=f"not used: {claimed.reason or 'a fold is wrong'}")
    if not found.passed:
        reason = f"not every fold is proved, and without the certificate: {found.reason}"
        return dataclasses.replace(claimed, status="not_verified", reason=reason, certificate="used")
    if _unproved(found) < _unproved(claimed):
        return dataclasses.replace(found, certificate="not used: more is proved without it")
    return dataclasses.replace(claimed, certificate="used")


def _unproved(verdict: Verification) -> int:
    return sum(proof.method != "proved" for proof in verdict.sites)


def prove_certified(source: ir.Model, changed: ir.Model) -> Verification | None:
    """Prove the folds of the certificate in `changed`; None where it has none. Both are only read."""
    text = changed.metadata_props.get(KEY)
    if text is None:
        return None
    try:
        certificate = decode(text)
        original, converted = source, False
        if source.functions or has_sync_batch_norm(source):
            original = source.clone()
            if certificate.inlined:
                inline_calls(original)
            converted = _convert(original, trained=False)
        sites = changes(certificate, original, changed)
        if not sites:
            return Verification.skipped("every node that it names is still there")
        verdict = prove_fold(original, changed, [site.claim for site in sites])
    except (BnexportError, MemoryError) as error:
        return Verification.skipped(first_line(error))
    return dataclasses.replace(verdict, reference="converted") if converted else verdict


def prove_unaided(source: ir.Model, changed: ir.Model) -> Verification:
    """Find the folds between two models and prove them; both are only read. Sync batch norms are converted first."""
    if not has_sync_batch_norm(source) or has_sync_batch_norm(changed):
        return prove(source, changed)
    unfolded = source.clone()
    if not source.functions.keys() <= changed.functions.keys():
        inline_calls(unfolded)
    _convert(unfolded, trained=False)
    return dataclasses.replace(prove(unfolded, changed), reference="converted")


def _convert(model: ir.Model, *, trained: bool) -> bool:
    """Convert in place, as a fold does; whether there was anything to convert."""
    converted = any(each.batch_norm is not None for each in convert(model, trained=trained))
    if converted:
        insert_casts(model)
    return converted


def prove_export(unfolded: ir.Model, folded: ir.Model, report: Mapping[str, Any]) -> Verification:
    """Prove a fold that was made in place. Raises VerificationError where it is wrong."""
    verdict = prove_report(unfolded, folded, report)
    if verdict.status == "failed":
        raise VerificationError(
            f"the folded graph differs from the exported one, nothing was written: {verdict.reason}"
        )
    return verdict


def _read_report(report: Mapping[str, Any]) -> tuple[list[Claim], bool]:
    """Return the claims in a report's JSON, and whether BatchNormalization in training was converted. Raises UsageError."""

    def text(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError(f"got {type(value).__name__}, expected a string")
        return value

    def names(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise TypeError(f"got {type(value).__name__}, expected a list of names")
        return tuple(map(text, value))

    claims, trained = [], False
    try:
        for site in report["sites"]:
            nodes, region, scope = names(site["nodes"]), names(site["region"]), text(site["graph"])
            trained |= site.get("training") is True and text(site["op_type"]) == "BatchNormalization"
            if text(site["outcome"]) in CHANGED:
                claims.append(Claim(" + ".join(nodes), scope, region or nodes))
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"the report is no fold report of this version ({type(error).__name__}: {error}); fold again with --json"
        ) from error
    return claims, trained


def _casts(model: ir.Model) -> dict[str, list[str]]:
    """Find the Casts around each batch norm, by its name: they are removed with it."""
    found: dict[str, list[str]] = {}
    for node in walk.nodes(model):
        if is_standard(node, "BatchNormalization") and node.inputs and node.inputs[0] is not None:
            around = [node.inputs[0].producer(), *(use.node for use in node.outputs[0].uses())]
            names = [label(each) for each in around if each is not None and each.op_type == "Cast"]
            if names:
                found.setdefault(label(node), []).extend(names)
    return found
