"""Folding rules, one file for each family of operators: the algebra, its conditions, and the edits."""

from __future__ import annotations

from collections.abc import Iterable

from bnexport.errors import UsageError
from bnexport.folding.placing.search import Rule
from bnexport.folding.rules import (
    concat,
    conv,
    conv_transpose,
    deform_conv,
    depth_to_space,
    elementwise,
    gather,
    gemm,
    matmul,
    normalization,
    pad,
    parallel,
    pooling,
    recurrent,
    relu,
    reshape,
    resize,
    split,
    transparent,
)

ALL: tuple[Rule, ...] = (
    conv.RULE,
    conv_transpose.RULE,
    deform_conv.RULE,
    gemm.RULE,
    matmul.RULE,
    elementwise.RULE,
    normalization.BATCH_NORM,
    normalization.RULE,
    recurrent.RULE,
    gather.RULE,
    transparent.RULE,
    reshape.RULE,
    pooling.RULE,
    concat.RULE,
    resize.RULE,
    depth_to_space.RULE,
    split.RULE,
    pad.RULE,
    relu.RULE,
    parallel.RULE,
)


def check_rules(names: Iterable[str]) -> frozenset[str]:
    """Return the names as a set. Raise UsageError for an unknown rule."""
    known = {rule.name for rule in ALL}
    chosen = frozenset(names)
    unknown = sorted(chosen - known)
    if unknown:
        raise UsageError(f"there is no rule {unknown[0]!r}; rules are {', '.join(sorted(known))}")
    return chosen


def by_operator(names: frozenset[str] | None = None) -> dict[str, Rule]:
    """Map operator types to rules, for the rules in `names` (None: all)."""
    return {op_type: rule for rule in ALL if names is None or rule.name in names for op_type in rule.op_types}
