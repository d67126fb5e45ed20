"""Folding of batch norms into neighbouring weights: exact algebra, refusals with reasons, verified results.

The names are imported when they are first used: the verifying process needs few of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bnexport.folding.api import FoldResult, InlineResult, fold, inline
    from bnexport.folding.folder import BatchNormFolder
    from bnexport.folding.report import FoldReport, Refusal, SiteReport, render
    from bnexport.graph.inspection import InspectReport, inspect
    from bnexport.verification.verdict import OutputComparison, Verification

_HOMES = {
    "BatchNormFolder": "folding.folder",
    "FoldReport": "folding.report",
    "FoldResult": "folding.api",
    "InlineResult": "folding.api",
    "InspectReport": "graph.inspection",
    "OutputComparison": "verification.verdict",
    "Refusal": "folding.report",
    "SiteReport": "folding.report",
    "Verification": "verification.verdict",
    "fold": "folding.api",
    "inline": "folding.api",
    "inspect": "graph.inspection",
    "render": "folding.report",
}

__all__ = [
    "BatchNormFolder",
    "FoldReport",
    "FoldResult",
    "InlineResult",
    "InspectReport",
    "OutputComparison",
    "Refusal",
    "SiteReport",
    "Verification",
    "fold",
    "inline",
    "inspect",
    "render",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bnexport.folding' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"bnexport.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
