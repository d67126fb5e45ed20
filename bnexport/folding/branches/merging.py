"""Merge what can be merged of each sum: the terms of one base, in one or several operators, where that costs no more.

Terms are taken from the one with the most multiplications down; each joins the first operator whose cost does not grow
by it. What joins none stays and is added behind. A sum below a term that stays is merged on its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine, round_vector
from bnexport.folding.branches.collapse import (
    CARRIERS,
    Evaluated,
    Evaluator,
    Frame,
    Sum,
    Sums,
    Term,
    check_cost,
    find_channels,
    find_frame,
    read_sums,
)
from bnexport.folding.branches.windows import Kernel
from bnexport.folding.context import Context, Exact, Options, Plan
from bnexport.folding.placing import remove, take_over
from bnexport.folding.report import Refusal, SiteReport
from bnexport.folding.rules.parallel import NAME
from bnexport.folding.sites import SUMS
from bnexport.graph.conversion import Conversion
from bnexport.graph.nodes import Refused, get_int, input_at, is_standard, label, used
from bnexport.graph.scopes import Scope, new_constant

# Write merged branches into the graph: one operator in the place of each, and what is left of the sum behind it.
#
# The new operator takes the name and the parameters' names of the largest that it replaces. A weight is rounded once, and
# refused where its type cannot hold what the branches' weights held (`affine.check_range`).


@dataclasses.dataclass(frozen=True)
class Operator:
    """The operator to write for `terms`. carrier: the source node that it replaces.

    weight, bias: in float64 and rounded; bias is None where the operator has none. raw: how often the code of a module adds
    the base itself to what the operator makes.
    """

    terms: tuple[Term, ...]
    carrier: ir.Node
    kernel: Kernel
    weight: Exact
    bias: Exact | None
    raw: float = 0.0


def plan_operator(
    terms: tuple[Term, ...],
    carriers: Sequence[ir.Node],
    kernel: Kernel,
    frame: Frame,
    context: Context,
    raw: float = 0.0,
) -> Operator:
    """Raises Refused where the type of the weights cannot hold their sum."""
    described = {node: context.constants.describe(input_at(node, 1), "weight") for node in carriers}
    types = {each.dtype for each in described.values()}
    if len(types) > 1:
        raise Refused("type", f"the weights of its branches have types {', '.join(sorted(map(str, types)))}")
    # A bias goes into the operator itself, if one of the branches has it.
    carrier = max(carriers, key=lambda node: (node.op_type != "MatMul", int(np.prod(described[node].shape))))
    (dtype,) = types
    kernel.check_type(dtype)
    values = kernel.weight.reshape(kernel.outputs, *kernel.weight.shape[2:])
    if not frame.positions and carrier.op_type != "Conv" and not get_int(carrier, "transB", 0):
        values = np.ascontiguousarray(values.T)
    weight = Exact(values, values.astype(dtype))
    bias = None
    if kernel.bias.any() or input_at(carrier, 2) is not None:
        rounded = round_vector(kernel.bias, dtype, f"{carrier.op_type} bias", kernel.bias_size)
        bias = Exact(kernel.bias, rounded)
    return Operator(terms, carrier, kernel, weight, bias, raw)


def write(
    value: ir.Value,
    operators: Sequence[Operator],
    bases: Sequence[ir.Value],
    others: Sequence[tuple[float, ir.Value]],
    gone: Sequence[ir.Node],
    context: Context,
) -> list[ir.Node]:
    """Puts the operators, and the others of the sum, in the place of `value`; the last of the new nodes makes it.

    bases: what the operators read. others: signed values that are added behind. gone: nodes that are removed.
    """
    place = value.producer()
    assert place is not None and place.graph is not None
    written: list[ir.Node] = []
    others = list(others)
    parts: list[ir.Value] = []
    for operator, base in zip(operators, bases, strict=True):
        node = _insert(operator, base, place, context)
        written.append(node)
        parts.append(node.outputs[0])
        if operator.bias is not None and node.op_type == "MatMul":
            wish = f"{label(node)}.bias"
            others.append((1.0, new_constant(context, place.graph, place, operator.bias.rounded, wish)))
    total = parts[0]
    for sign, other in (*((1.0, part) for part in parts[1:]), *others):
        op_type = "Add" if sign > 0 else "Sub"
        node = ir.Node("", op_type, [total, other], name=context.names.fresh(f"{label(place)}.{op_type}"))
        place.graph.insert_before(place, node)
        written.append(node)
        total = node.outputs[0]
        total.name, total.type = context.names.fresh(f"{value.name}.sum"), value.type
    if not value.is_graph_output():
        # As that of a graph output, the name stays with what it means.
        value.name, total.name = total.name, value.name
        take_over(value, total, context)
    else:
        take_over(value, total, context)
    _remove(gone, context)
    context.created += written
    return written


def _insert(operator: Operator, base: ir.Value, place: ir.Node, context: Context) -> ir.Node:
    """Insert the operator in front of `place`; its parameters are those of the carrier, with edits."""
    carrier, like = operator.carrier, operator.terms[0].value
    assert place.graph is not None
    inputs = [base, *carrier.inputs[1:]]
    node = ir.Node("", carrier.op_type, inputs, _attributes(operator), name=carrier.name or None)
    if not node.name:
        node.name = context.names.fresh(f"{label(place)}.{carrier.op_type}")
    node.metadata_props.update(carrier.metadata_props)
    place.graph.insert_before(place, node)
    result = node.outputs[0]
    result.name = context.names.fresh(f"{label(node)}.merged")
    result.type, result.shape = like.type, like.shape
    context.same_shape(result, like)
    plan = Plan(context)
    plan.edits[node, 1] = operator.weight
    if operator.bias is not None and node.op_type != "MatMul":
        plan.edits[node, 2] = operator.bias
    plan.commit()
    return node


def _attributes(operator: Operator) -> list[ir.Attr]:
    carrier, window = operator.carrier, operator.kernel.window
    if carrier.op_type == "MatMul":
        return []
    if carrier.op_type == "Gemm":
        return [ir.AttrInt64("transB", get_int(carrier, "transB", 0))]
    return [
        ir.AttrInt64("group", operator.kernel.groups),
        ir.AttrInt64s("kernel_shape", window.sizes),
        ir.AttrInt64s("pads", (*window.begins, *window.ends)),
        ir.AttrInt64s("strides", window.strides),
        ir.AttrInt64s("dilations", window.dilations),
    ]


def _remove(nodes: Sequence[ir.Node], context: Context) -> None:
    # A Pad that others read stays: what merged branches read of it, they have no more.
    pads = [node for node in nodes if node.op_type == "Pad"]
    others = [node for node in nodes if node.op_type != "Pad"]
    remove(others, None, context)
    for node in reversed(pads):
        if not used(node.outputs[0]):
            remove([node], None, context)


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
        self._code_stays = context.options.layers is not None
        # Values of sums that are gone, and what is in their place.
        self._now: dict[ir.Value, ir.Value] = {}

    def run(self) -> Iterator[Merged]:
        """Merge every sum, top to bottom; says nothing of one that has no two branches of one value."""
        for root in self._sums.roots:
            yield from self._merge(root)

    def _merge(self, total: Sum) -> Iterator[Merged]:
        groups: dict[ir.Value, list[tuple[float, Term]]] = {}
        for sign, term in total.terms:
            # The code of a module goes on to add the base itself.
            if term.node is not None or not self._code_stays:
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
            if not operators and not self._code_stays:
                left = []
                for sign, value in constants:
                    try:
                        vector, _ = evaluator.constant(value, kernel.outputs)
                    except Refused:
                        left.append((sign, value))
                    else:
                        kernel = kernel.mapped(ChannelAffine.shifting(sign * vector))
            try:
                raw = self._raw(cluster.terms) if self._code_stays else 0.0
                if raw:
                    kernel = _less_identity(kernel, raw, cluster.frame)
                if self._code_stays and kernel.window.begins != kernel.window.ends:
                    raise Refused(
                        "padding", "the branches pad more on one side than on the other, which no module does"
                    )
                if not self._may_merge([*(node for _, term in cluster.terms for node in term.nodes()), *total.nodes]):
                    continue
                terms = tuple(term for _, term in cluster.terms)
                operators.append(plan_operator(terms, cluster.carriers, kernel, cluster.frame, self._context, raw))
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
        for operator, base in zip(operators, bases, strict=True):
            others += [(math.copysign(1.0, operator.raw), base)] * int(abs(operator.raw))
        nodes = [node for _, term in total.terms if term in gone for node in term.nodes()] + total.nodes
        nodes = list(dict.fromkeys(nodes))
        written = write(total.value, operators, bases, [*others, *constants], nodes, self._context)
        for operator, node in zip(operators, written):
            self._context.merged[node] = frozenset(label(each) for term in operator.terms for each in term.nodes())
        self._now[total.value] = written[-1].outputs[0]
        kernel = operators[0].kernel
        nodes = [node for node in nodes if self._context.surgery.is_dead(node)]
        return Merged(
            tuple(nodes), tuple(written), sum(term.leaves for term in gone), kernel.outputs, kernel.window.sizes
        )

    def _raw(self, terms: Iterable[tuple[float, Term]]) -> float:
        """Return how often the base itself is added, by code and below modules that would go."""
        count = 0.0
        for sign, term in terms:
            if term.inner is not None:
                count += sign * self._raw(term.inner.terms)
                if any(self._context.constants.floats(value, "term").any() for _, value in term.inner.constants):
                    raise Refused("constant", "the code adds a constant below a module that would go")
            elif term.node is None:
                count += sign
        return count

    def _current(self, value: ir.Value) -> ir.Value:
        return self._now.get(value, value)


def _less_identity(kernel: Kernel, count: float, frame: Frame) -> Kernel:
    """Return N with N x + count x = kernel(x)."""
    own = Kernel.identity(kernel.inputs, frame.positions).mapped(ChannelAffine.scaling(np.full(kernel.inputs, -count)))
    return kernel.plus(own, kernel.window.joined(own.window))


def _outermost(term: Term) -> Iterator[Sum]:
    """Yield the first sums of several terms below a term that stays."""
    inner = term.inner
    while inner is not None:
        if len(inner.terms) > 1:
            yield inner
            return
        inner = inner.terms[0][1].inner


# Merge the branches of a graph and report each sum as a site, under the rule name `parallel`.


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

            for merged in Merging(sums, scope.context, self._may_merge).run():
                nodes = sorted(merged.nodes, key=lambda node: order.get(node, len(order)))
                yield order.get(nodes[-1], len(order)), self._report(merged, nodes, scope)

    def _left_alone(self, node: ir.Node) -> bool:
        layers = self._options.layers
        if layers is not None and label(node) not in layers.replaceable and not is_standard(node, *SUMS):
            return True
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
