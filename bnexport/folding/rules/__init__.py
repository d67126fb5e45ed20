"""Folding rules, one file for each family of operators: the matched graphs, the algebra, its conditions, and the edits.

Each docstring starts with the graphs: what the rule finds on the left, what is left of it on the right. A map is
y = k (x - c) + t for each channel, or k x + h with h = t - k c, the image of 0. Every `Rule` of a file here is one of `ALL`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from bnexport.errors import UsageError
from bnexport.folding.placing import Rule


def _all() -> tuple[Rule, ...]:
    modules = [importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
    return tuple(each for module in modules for each in vars(module).values() if isinstance(each, Rule))


ALL: tuple[Rule, ...] = _all()


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
