"""Removes batch norms from ONNX models: exact algebra, refusals with reasons, verified results."""

from __future__ import annotations

from bnexport.folding.api import FoldResult, fold
from bnexport.folding.comparison import OutputComparison
from bnexport.folding.inspection import InspectReport, inspect
from bnexport.folding.report import FoldReport, Refusal, SiteReport, render
from bnexport.folding.verification import VerifyResult, verify

__all__ = [
    "FoldReport",
    "FoldResult",
    "InspectReport",
    "OutputComparison",
    "Refusal",
    "SiteReport",
    "VerifyResult",
    "fold",
    "inspect",
    "render",
    "verify",
]
