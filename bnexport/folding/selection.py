"""Validation of the names of batch norms that a caller selects: a typo would fold nothing, or everything, silently."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

import onnx_ir as ir

from bnexport.errors import UsageError
from bnexport.folding.reading.elementwise import OP_TYPES
from bnexport.folding.reporting.report import within
from bnexport.folding.rules.parallel import NAME as PARALLEL
from bnexport.graph.inlining import inline_calls
from bnexport.graph.nodes import is_standard, label, module_path
from bnexport.graph.sync_bn_nodes import is_sync_batch_norm
from bnexport.model_io import walk

# Names that a message lists.
_SHOWN = 8


def check_selection(
    model: ir.Model,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    explain: Iterable[str] = (),
    where: str = "the model",
    prefix: str = "",
) -> None:
    """Raise UsageError for a label that no node of `model` has.

    `only` selects batch norms; `skip` also the arithmetic that an exporter may have made of one; either may name the
    rule `parallel`. `explain` takes any node, module or scope that holds a
    node. Calls that folding inlines give their nodes new labels, which count, but for `only`: it inlines nothing.
    """
    only, skip = (tuple(name for name in names if name != PARALLEL) for names in (only, skip))
    explain = tuple(explain)
    if not (only or skip or explain):
        return
    nodes = list(walk.nodes(model))
    norms = list(dict.fromkeys(module_path(node) or label(node) for node in nodes if _is_norm(node)))
    either = {*norms, *(label(node) for node in nodes if _is_norm(node))}
    check_names(f"{prefix}only", only, either, norms, where)
    if model.functions and (skip or explain):
        inlined = model.clone()
        inline_calls(inlined)
        nodes += walk.nodes(inlined)
    parts = {label(node) for node in nodes if _is_norm(node) or is_standard(node, *OP_TYPES)}
    check_names(f"{prefix}skip", skip, parts | either, norms, where)
    labels = {label(node) for node in nodes} | either
    inside = {name for name in explain if any(within(each, name) for each in labels)}
    check_names(f"{prefix}explain", explain, labels | inside, norms, where)


def as_labels(names: Collection[str], nodes: Iterable[ir.Node]) -> frozenset[str]:
    """Return the names, with the labels of their nodes for those that are paths of batch norm modules."""
    return frozenset(names).union(label(node) for node in nodes if _is_norm(node) and module_path(node) in names)


def as_names(option: str, names: Iterable[str]) -> frozenset[str]:
    """Return the names as a set. Raise UsageError for a single string, whose letters are no names."""
    if isinstance(names, str):
        raise UsageError(f"{option}: got the string {names!r}, expected a list of names")
    return frozenset(names)


def check_names(option: str, names: Iterable[str], known: Collection[str], norms: Collection[str], where: str) -> None:
    """Raise UsageError for the first of `names` that is not `known`; `norms` are the batch norms to choose from."""
    wrong = sorted(set(names).difference(known))
    if not wrong:
        return
    guess = difflib.get_close_matches(wrong[0], known, 1)
    listed = ", ".join(list(norms)[:_SHOWN]) or "none"
    more = f" and {len(norms) - _SHOWN} more" if len(norms) > _SHOWN else ""
    question = f"; did you mean {guess[0]!r}?" if guess else ""
    raise UsageError(f"{option}: got {wrong[0]!r}, expected a batch norm of {where}: {listed}{more}{question}")


def _is_norm(node: ir.Node) -> bool:
    return is_standard(node, "BatchNormalization") or is_sync_batch_norm(node)
