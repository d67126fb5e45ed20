"""Folding rules, one file for each family of operators: the matched graphs, the algebra, its conditions, and the edits.

Each docstring starts with the graphs: what the rule finds on the left, what is left of it on the right. A map is
y = k (x - c) + t for each channel, or k x + h with h = t - k c, the image of 0. Every `Rule` of a file here is one of `ALL`.
"""

from __future__ import annotations

import importlib
import pkgutil

from bnexport.folding.placing import Rule


def _all() -> tuple[Rule, ...]:
    modules = [importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
    return tuple(each for module in modules for each in vars(module).values() if isinstance(each, Rule))


ALL: tuple[Rule, ...] = _all()


def by_operator() -> dict[str, Rule]:
    """Map operator types to rules."""
    return {op_type: rule for rule in ALL for op_type in rule.op_types}
