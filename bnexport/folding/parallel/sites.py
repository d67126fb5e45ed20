"""Merge the branches of a graph and report each sum as a site, under the rule name `parallel`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import onnx_ir as ir

from bnexport.folding.context import Context, Options
from bnexport.folding.parallel.sums import read_sums
from bnexport.folding.reporting.report import Refusal, SiteReport
from bnexport.folding.rules.parallel import NAME
from bnexport.graph.converting.inference import Conversion
from bnexport.graph.nodes import is_standard
from bnexport.graph.scopes import Scope

if TYPE_CHECKING:
    from bnexport.folding.parallel.merging import Merged


def is_wanted(options: Options) -> bool:
    """Whether the caller leaves the rule switched on."""
    return (options.rules is None or NAME in options.rules) and NAME not in options.skip


class Branches:
    """The branches of one model.

    conversions: batch norms that were sync batch norms. name: of a node in the source. region: names of the source's
    nodes that a merge changes, for the report.
    """

    def __init__(
        self,
        options: Options,
        conversions: Mapping[ir.Node, Conversion],
        name: Callable[[ir.Node], str],
        region: Callable[[Iterable[ir.Node], Context], tuple[str, ...]],
    ) -> None:
        self._options = options
        self._conversions = conversions
        self._name = name
        self._region = region

    def merge(self, scope: Scope[Context], order: Mapping[ir.Node, int]) -> Iterator[tuple[int, SiteReport]]:
        """Merge every sum of the scope's graphs that can be; where each stands in the model, and its report."""
        for graph in scope.graphs:
            sums = read_sums(graph, scope.context, self._left_alone)
            if not sums.roots:
                continue
            # Most models have none, and a small one is folded in less time than its modules are imported.
            from bnexport.folding.parallel.merging import Merging

            for merged in Merging(sums, scope.context, self._may_merge).run():
                nodes = sorted(merged.nodes, key=lambda node: order.get(node, len(order)))
                yield order.get(nodes[-1], len(order)), self._report(merged, nodes, scope)

    def _left_alone(self, node: ir.Node) -> bool:
        only, skip = self._options.only, self._options.skip
        if skip and self._name(node) in skip:
            return True
        chosen = only is None or NAME in only
        return not chosen and is_standard(node, "BatchNormalization") and self._name(node) not in (only or ())

    def _may_merge(self, nodes: list[ir.Node]) -> bool:
        only = self._options.only
        return only is None or NAME in only or any(self._name(node) in only for node in nodes)

    def _report(self, merged: Merged, nodes: list[ir.Node], scope: Scope[Context]) -> SiteReport:
        names = tuple(self._name(node) for node in nodes)
        norms = [node for node in nodes if is_standard(node, "BatchNormalization")]
        conversions = [self._conversions[node] for node in norms if node in self._conversions]
        if not merged.written:
            refusals = {reason.text: Refusal(NAME, names[-1], reason.code, reason.text) for reason in merged.reasons}
            return SiteReport(names, nodes[-1].op_type, scope.name, "kept", refusals=tuple(refusals.values()))
        return SiteReport(
            names,
            conversions[0].op_type if conversions else norms[0].op_type if norms else nodes[-1].op_type,
            scope.name,
            "folded",
            (NAME,),
            tuple(self._name(node) for node in merged.written),
            training=any(conversion.training for conversion in conversions),
            channels=merged.outputs,
            summary=_summary(merged, len(norms)),
            region=self._region(nodes, scope.context),
        )


def _summary(merged: Merged, norms: int) -> str:
    """Such as "3 branches, 2 batch norms -> 1 Conv 3x3"."""
    kinds: dict[str, int] = {}
    for node in merged.written:
        kinds[node.op_type] = kinds.get(node.op_type, 0) + 1
    size = "x".join(map(str, merged.sizes))
    made = [f"{count} {kind}" for kind, count in kinds.items()]
    if size:
        made[0] += f" {size}"
    counted = f", {norms} batch norm{'' if norms == 1 else 's'}" if norms else ""
    return f"{merged.branches} branches{counted} -> {' + '.join(made)}"
