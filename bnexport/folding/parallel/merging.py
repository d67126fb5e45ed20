"""Merge what can be merged of each sum: the terms of one base, in one or several operators, where that costs no more.

Terms are taken from the one with the most multiplications down; each joins the first operator whose cost does not grow
by it. What joins none stays and is added behind. A sum below a term that stays is merged on its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.folding.parallel.evaluate import Evaluated, Evaluator, Frame, check_cost, find_channels, find_frame
from bnexport.folding.parallel.sums import CARRIERS, Sum, Sums, Term
from bnexport.folding.parallel.write import Operator, plan_operator, write
from bnexport.graph.nodes import is_standard
from bnexport.graph.refusal import Refused


@dataclasses.dataclass(frozen=True)
class Merged:
    """A sum that changed, or why it did not.

    nodes: of the source, top to bottom; those of a sum that stays are its additions. written: what is in their place.
    branches: terms that are gone. kernel: (outputs, sizes) of the largest new operator.
    """

    nodes: tuple[ir.Node, ...]
    written: tuple[ir.Node, ...] = ()
    branches: int = 0
    outputs: int | None = None
    sizes: tuple[int, ...] = ()
    reasons: tuple[Refused, ...] = ()


@dataclasses.dataclass
class _Cluster:
    """Signed terms of one base that become one operator."""

    terms: list[tuple[float, Term]]
    evaluated: Evaluated
    frame: Frame

    @property
    def leaves(self) -> int:
        return sum(term.leaves for _, term in self.terms)

    @property
    def carriers(self) -> list[ir.Node]:
        return [node for _, term in self.terms for node in term.nodes() if is_standard(node, *CARRIERS)]


class Merging:
    """Merges the sums of one graph. may_merge: whether these nodes of the source may be merged."""

    def __init__(self, sums: Sums, context: Context, may_merge: Callable[[list[ir.Node]], bool]) -> None:
        self._sums = sums
        self._context = context
        self._may_merge = may_merge
        # Values of sums that are gone, and what is in their place.
        self._now: dict[ir.Value, ir.Value] = {}

    def run(self) -> Iterator[Merged]:
        """Merge every sum, top to bottom; says nothing of one that has no two branches of one value."""
        for root in self._sums.roots:
            yield from self._merge(root)

    def _merge(self, total: Sum) -> Iterator[Merged]:
        groups: dict[ir.Value, list[tuple[float, Term]]] = {}
        for sign, term in total.terms:
            groups.setdefault(term.base, []).append((sign, term))
        reasons: list[Refused] = []
        clusters: list[_Cluster] = []
        for base, terms in groups.items():
            if sum(term.leaves for _, term in terms) > 1:
                clusters += self._clusters(base, terms, reasons)
        operators, constants = self._plan(total, clusters, reasons)
        gone = {term for operator in operators for term in operator.terms}
        for _, term in total.terms:
            if term not in gone and term.inner is not None:
                for inner in _outermost(term):
                    yield from self._merge(inner)
        if operators:
            yield self._write(total, operators, constants, gone)
            return
        reasons += [
            reason
            for _, term in total.terms
            if term.node is None and term.base in self._sums.unfit
            for base, reason in [self._sums.unfit[term.base]]
            if base in groups
        ]
        if reasons and total.nodes:
            yield Merged(tuple(total.nodes), reasons=tuple(reasons))

    def _clusters(self, base: ir.Value, terms: list[tuple[float, Term]], reasons: list[Refused]) -> list[_Cluster]:
        """Find the clusters that would save an operator; `reasons` grows by why others do not."""
        alone = [term for _, term in terms]
        try:
            frame = find_frame(alone, self._context)
            if frame is None:
                return []
            evaluator = Evaluator(self._context, frame, find_channels(base, alone, frame, self._context))
        except Refused as reason:
            reasons.append(reason)
            return []
        found: list[_Cluster] = []
        for sign, term in terms:
            try:
                evaluated = evaluator.term(sign, term)
                if term.leaves > 1:
                    kernel = evaluated.kernel
                    check_cost(evaluated.cost, kernel.weight.size, kernel.weight.size)
            except Refused as reason:
                reasons.append(reason)
            else:
                found.append(_Cluster([(sign, term)], evaluated, frame))
        found.sort(key=lambda cluster: -cluster.evaluated.kernel.weight.size)
        clusters: list[_Cluster] = []
        for cluster in found:
            if not self._joins(cluster, clusters, reasons):
                clusters.append(cluster)
        return [cluster for cluster in clusters if cluster.leaves > 1 and cluster.carriers]

    def _joins(self, cluster: _Cluster, clusters: list[_Cluster], reasons: list[Refused]) -> bool:
        for larger in clusters:
            try:
                larger.evaluated = larger.evaluated.joined(cluster.evaluated)
            except Refused as reason:
                reasons.append(reason)
            else:
                larger.terms += cluster.terms
                return True
        return False

    def _plan(
        self, total: Sum, clusters: list[_Cluster], reasons: list[Refused]
    ) -> tuple[list[Operator], list[tuple[float, ir.Value]]]:
        """Plan the operators that can be written; return them, and the constants of the sum that none of them absorbs."""
        operators: list[Operator] = []
        constants = total.constants
        for cluster in clusters:
            kernel, left = cluster.evaluated.kernel, constants
            evaluator = Evaluator(self._context, cluster.frame, kernel.inputs)
            if not operators:
                left = []
                for sign, value in constants:
                    try:
                        vector, _ = evaluator.constant(value, kernel.outputs)
                    except Refused:
                        left.append((sign, value))
                    else:
                        kernel = kernel.mapped(ChannelAffine.shifting(sign * vector))
            try:
                if not self._may_merge([*(node for _, term in cluster.terms for node in term.nodes()), *total.nodes]):
                    continue
                terms = tuple(term for _, term in cluster.terms)
                operators.append(plan_operator(terms, cluster.carriers, kernel, cluster.frame, self._context))
            except Refused as reason:
                reasons.append(reason)
            else:
                constants = left
        return operators, constants

    def _write(
        self, total: Sum, operators: list[Operator], constants: list[tuple[float, ir.Value]], gone: set[Term]
    ) -> Merged:
        bases = [self._current(operator.terms[0].base) for operator in operators]
        others = [(sign, self._current(term.value)) for sign, term in total.terms if term not in gone]
        nodes = [node for _, term in total.terms if term in gone for node in term.nodes()] + total.nodes
        nodes = list(dict.fromkeys(nodes))
        written = write(total.value, operators, bases, [*others, *constants], nodes, self._context)
        self._now[total.value] = written[-1].outputs[0]
        kernel = operators[0].kernel
        nodes = [node for node in nodes if self._context.surgery.is_dead(node)]
        return Merged(
            tuple(nodes), tuple(written), sum(term.leaves for term in gone), kernel.outputs, kernel.window.sizes
        )

    def _current(self, value: ir.Value) -> ir.Value:
        return self._now.get(value, value)


def _outermost(term: Term) -> Iterator[Sum]:
    """Yield the first sums of several terms below a term that stays."""
    inner = term.inner
    while inner is not None:
        if len(inner.terms) > 1:
            yield inner
            return
        inner = inner.terms[0][1].inner
