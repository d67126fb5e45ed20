"""Prove a fold by what its report claims, as `fold` and an export do, without a search."""

from bnexport.folding.report import FoldReport
from bnexport.model_io import load
from bnexport.model_io.read import Source
from bnexport.verification.api import Pair, prove_fold
from bnexport.verification.verdict import Verification


def prove_claims(source: Source, candidate: Source, report: FoldReport) -> Verification:
    """Prove the folds of `report`, which made `candidate` of `source`, where they stand."""
    pair = Pair(load(source), load(candidate), inlined=report.inlined)
    return prove_fold(pair.unfolded, pair.candidate, report.claims)


def outcome(verdict: Verification | None) -> tuple[str, list[str]]:
    """Return the status of a verdict, and the marks of its folds."""
    assert verdict is not None
    return verdict.status, [proof.method for proof in verdict.sites]
