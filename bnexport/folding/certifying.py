"""Write the certificate of a fold into the model: its sites, for whoever verifies the file later."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import onnx_ir as ir

from bnexport.folding.reporting.report import FoldReport, SiteReport
from bnexport.verification.certificate import KEY, LARGEST, Certificate, CertifiedSite

_OLD = "the source's certificate told of an earlier fold and was removed"
_NONE = "the file holds no list of its folds: "


def certify(model: ir.Model, report: FoldReport, *, wanted: bool, original: ir.Model | None = None) -> FoldReport:
    """Write the certificate into the metadata; return the report, which says so.

    One of an earlier fold is about another original: it is replaced or removed, unless nothing changed here.
    original: given where the model was changed after the fold; the certificate stays if it still proves all folds.
    """
    if wanted and not report.changed:
        return report
    notes = [*report.notes, *([_OLD] if model.metadata_props.pop(KEY, None) is not None else [])]
    uncertified = ""
    made = certificate_of(report.sites, report.inlined) if wanted else None
    text = "" if made is None else made.encode()
    if any(site.training and site.op_type == "BatchNormalization" for site in report.sites if site.changed):
        uncertified = "training became inference, which no proof makes equal" if text else ""
        text = ""
    if len(text) > LARGEST:
        uncertified, text = f"it would have more than {LARGEST:,} characters", ""
    if text:
        model.metadata_props[KEY] = text
        from bnexport.verification.proving import prove_certified

        verdict = None if original is None else prove_certified(original, model)
        if verdict is not None and not verdict.passed:
            del model.metadata_props[KEY]
            text = ""
            uncertified = (
                f"simplification changed more than the folds ({verdict.reason}), so `verify` has to find them itself"
            )
    uncertified = _NONE + uncertified if uncertified else ""
    return dataclasses.replace(report, certificate=bool(text), uncertified=uncertified, notes=tuple(notes))


def certificate_of(sites: Iterable[SiteReport], inlined: bool) -> Certificate | None:
    """Return the certificate of the folds among the sites, None where there is none."""
    changed = tuple(_certified(site) for site in sites if site.changed)
    return Certificate(changed, inlined) if changed else None


def _certified(site: SiteReport) -> CertifiedSite:
    region = site.claim.nodes
    # A site that an earlier fold made is no node of the source: its region stands for it.
    own = tuple(node for node in site.nodes if node in region) or region
    return CertifiedSite(own, tuple(node for node in region if node not in own), site.graph, site.rules)
