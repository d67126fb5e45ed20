"""Prove a fold from its report: what the local check is given for each site."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from bnexport.errors import BnexportError, UsageError, VerificationError
from bnexport.folding.context import Options
from bnexport.folding.reporting.report import FoldReport, SiteReport
from bnexport.folding.steps import Folding
from bnexport.graph.mixed_types import insert_casts
from bnexport.graph.nodes import is_standard, label
from bnexport.graph.sync_bn_nodes import has_sync_batch_norm
from bnexport.model_io import walk
from bnexport.verification.certificate import KEY, changes, decode
from bnexport.verification.local.check import Claim, prove
from bnexport.verification.local.differences import prove_differences
from bnexport.verification.verdict import Verification


def prove_fold(unfolded: ir.Model, folded: ir.Model, sites: Sequence[SiteReport]) -> Verification:
    """Prove each fold of the report where it stands. unfolded: the source, converted and with its calls inlined."""
    casts = _casts(unfolded)
    changed = [site for site in sites if site.outcome in ("folded", "merged")]
    claims = [_claim(" + ".join(site.nodes), site.graph, site.region or site.nodes, casts) for site in changed]
    return prove(unfolded, folded, claims)


def prove_report(source: ir.Model, folded: ir.Model, report: Mapping[str, Any]) -> Verification:
    """Prove each fold in a report's JSON. source: the model that was folded; it is converted here.

    Raises UsageError where the report is no fold report.
    """
    sites = read_sites(report)
    trained = any(site.training and site.op_type == "BatchNormalization" for site in sites)
    converted = _convert(source, inline=bool(report.get("inlined")), training_to_inference=trained)
    verdict = prove_fold(source, folded, sites)
    return dataclasses.replace(verdict, reference="converted") if converted else verdict


def prove_between(source: ir.Model, changed: ir.Model) -> Verification:
    """Prove the folds between two models, where the certificate in `changed` says that they are; both are only read.

    Unless it proves every fold, the folds are searched for as well. The search refutes what it refutes; of two proofs the
    one that leaves less unproved counts.
    """
    claimed = prove_certified(source, changed)
    if claimed is None:
        return prove_unaided(source, changed)
    if claimed.passed and not _unproved(claimed):
        return dataclasses.replace(claimed, certificate="used")
    found = prove_unaided(source, changed)
    better = found.status == "not_verified" or (found.passed and _unproved(claimed) <= _unproved(found))
    if claimed.passed and better:
        return dataclasses.replace(claimed, certificate="used")
    reason = claimed.reason or "more is proved without it"
    return dataclasses.replace(found, certificate=f"not used: {reason}")


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
            converted = _convert(original, inline=certificate.inlined)
        sites = changes(certificate, original, changed)
        if not sites:
            return Verification.skipped("every node that it names is still there")
        casts = _casts(original)
        verdict = prove(original, changed, [_claim(site.name, site.graph, site.region, casts) for site in sites])
    except BnexportError as error:
        return Verification.skipped(str(error))
    return dataclasses.replace(verdict, reference="converted") if converted else verdict


def prove_unaided(source: ir.Model, changed: ir.Model) -> Verification:
    """Find the folds between two models and prove them; both are only read. Sync batch norms are converted first."""
    if not has_sync_batch_norm(source) or has_sync_batch_norm(changed):
        return prove_differences(source, changed)
    converted = source.clone()
    _convert(converted)
    return dataclasses.replace(prove_differences(converted, changed), reference="converted")


def _convert(model: ir.Model, *, inline: bool | None = None, training_to_inference: bool = False) -> bool:
    """Convert sync batch norms in place as a fold does; return whether there were any. inline: as `Folding.prepare`."""
    folding = Folding(model, Options(training_to_inference=training_to_inference))
    folding.prepare(inline=inline)
    folding.convert()
    if folding.converted:
        insert_casts(model)
    return folding.converted


def prove_export(unfolded: ir.Model, folded: ir.Model, report: FoldReport) -> Verification:
    """Prove a fold that was made in place. Raises VerificationError where it is wrong."""
    verdict = prove_report(unfolded, folded, report.to_dict())
    if verdict.status == "failed":
        raise VerificationError(
            f"the folded graph differs from the exported one, nothing was written: {verdict.reason}"
        )
    return verdict


def read_sites(report: Mapping[str, Any]) -> list[SiteReport]:
    """Read what a proof needs of the sites in a report's JSON. Raises UsageError."""

    def text(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError(f"got {type(value).__name__}, expected a string")
        return value

    def names(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise TypeError(f"got {type(value).__name__}, expected a list of names")
        return tuple(map(text, value))

    try:
        return [
            SiteReport(
                names(site["nodes"]),
                text(site["op_type"]),
                text(site["graph"]),
                text(site["outcome"]),
                training=site.get("training") is True,
                region=names(site["region"]),
            )
            for site in report["sites"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"the report is no fold report of this version ({type(error).__name__}: {error}); fold again with --json"
        ) from error


def _claim(site: str, graph: str, nodes: Iterable[str], casts: Mapping[str, Iterable[str]]) -> Claim:
    around = [cast for node in nodes for cast in casts.get(node, ())]
    return Claim(site, graph, (*nodes, *around))


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
