"""Runs the conversion and the rules over every graph of a model.

requires: a model of the caller's own, checked by model_io.
ensures: graph inputs and outputs keep their names, order and types; nodes that are no part of a site
stay; every site is in the report with its rule or its reasons.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir

from bnexport.errors import UnsupportedModelError
from bnexport.folding import decomposed, sync_bn, training_mode
from bnexport.folding.context import Context, Options
from bnexport.folding.edits import Addend
from bnexport.folding.names import Names
from bnexport.folding.nodes import is_standard, label
from bnexport.folding.old_values import return_old_counters
from bnexport.folding.parameters import insert_add, write_parameters
from bnexport.folding.refusal import Refused
from bnexport.folding.report import Counts, Refusal, SiteReport
from bnexport.folding.rewrite import bypass, merge, parameter_type
from bnexport.folding.rules import by_operator
from bnexport.folding.search import Search
from bnexport.folding.shapes import Shapes
from bnexport.folding.site import Site, batch_norm_site, elementwise_site
from bnexport.model_io import walk
from bnexport.model_io.write import tensor_total

NEWEST_OPSET = onnx.defs.onnx_opset_version()
# A fold may make room for another (two batch norms around one operator); more rounds than this gain nothing.
_ROUNDS = 4


@dataclasses.dataclass(frozen=True)
class Family:
    """A graph with its bodies, under one opset: the main graph, or a function."""

    name: str
    graphs: tuple[ir.Graph, ...]
    context: Context


class Engine:
    """Folds one model in place. `convert` first, then `fold`; `sites` grows as they run."""

    def __init__(self, model: ir.Model, options: Options) -> None:
        self.model = model
        self.options = options
        self.sites: list[SiteReport] = []
        self._folded = 0
        self._round: list[tuple[int, SiteReport, Site | None]] = []
        self._conversions: dict[ir.Node, sync_bn.Conversion] = {}
        _refuse_redefined_operators(model)
        names, shapes = Names(model), Shapes(model)
        self._families = [self._family("main graph", model.graph, names, shapes, in_function=False)]
        for function in model.functions.values():
            if not sync_bn.is_portable_body(function):
                self._families.append(
                    self._family(f"function {function.name}", function.graph, names, shapes, in_function=True)
                )

    def _family(self, name: str, graph: ir.Graph, names: Names, shapes: Shapes, *, in_function: bool) -> Family:
        opset = graph.opset_imports.get("", 0)
        context = Context(self.model, opset, names, shapes, self.options, in_function=in_function)
        return Family(name, (graph, *graph.subgraphs()), context)

    @property
    def meaning_changed(self) -> bool:
        return any(site.training and site.outcome != "kept" for site in self.sites)

    def convert(self) -> None:
        """MMCVSyncBatchNorm -> BatchNormalization."""
        for family in self._families:
            _import_standard_operators(family)
            conversions = sync_bn.convert(family.context, list(family.graphs))
            if self.options.training_to_inference:
                conversions += training_mode.convert(family.context, list(family.graphs))
            for conversion in conversions:
                if conversion.batch_norm is not None:
                    self._conversions[conversion.batch_norm] = conversion
                    continue
                assert conversion.reason is not None
                refusal = Refusal("to_inference", conversion.name, conversion.reason.code, conversion.reason.text)
                self.sites.append(
                    SiteReport((conversion.name,), conversion.op_type, family.name, "kept", refusals=(refusal,))
                )
            if any(conversion.training and conversion.batch_norm is not None for conversion in conversions):
                return_old_counters(family.graphs[0], family.context)
        sync_bn.drop_unused_bodies(self.model)

    @property
    def training_converted(self) -> bool:
        return any(conversion.training for conversion in self._conversions.values())

    @property
    def converted(self) -> bool:
        return bool(self._conversions)

    def fold(self) -> None:
        """Every site of every graph, top to bottom; again while a fold makes room for another."""
        order = {node: index for index, node in enumerate(walk.nodes(self.model))}
        settled = self.sites
        folded: list[tuple[int, SiteReport]] = []
        for family in self._families:
            for _ in range(_ROUNDS):
                self._round = []
                self._pass(family, order)
                done = [(place, report) for place, report, _ in self._round if report.outcome == "folded"]
                folded += done
                if not done:
                    break
            for place, report, site in self._round:
                if report.outcome == "folded":
                    continue
                folded.append((place, self._merge(site, report, family.context)))
            write_parameters(family.context)
        self.sites = settled + [site for _, site in sorted(folded, key=lambda entry: entry[0])]

    def _pass(self, family: Family, order: dict[ir.Node, int]) -> None:
        for graph in family.graphs:
            seen: set[ir.Node] = set()
            for node in tuple(graph):
                if node.graph is graph and is_standard(node, "BatchNormalization") and node not in seen:
                    seen.update(self._batch_norm(node, family, order.get(node, len(order))))
            for node in tuple(graph):
                if node.graph is graph and node not in seen:
                    seen.update(self._elementwise(node, family, order.get(node, len(order))))
            for node in decomposed.training_sites(graph, family.context):
                reason = decomposed.REASON
                refusal = Refusal("batch_norm", label(node), reason.code, reason.text)
                site = dataclasses.replace(self._report(node, family), refusals=(refusal,))
                self._round.append((order.get(node, len(order)), site, None))

    def _batch_norm(self, node: ir.Node, family: Family, place: int) -> tuple[ir.Node, ...]:
        name = self._label(node)
        report = self._report(node, family)
        try:
            self._refuse_by_request(name)
            if not 1 <= family.context.opset <= NEWEST_OPSET:
                raise Refused("opset", f"opset {family.context.opset} is not known here, the newest is {NEWEST_OPSET}")
            site = batch_norm_site(node, family.context)
        except Refused as reason:
            outcome = "converted" if node in self._conversions else "kept"
            refusal = Refusal("batch_norm", name, reason.code, reason.text)
            self._round.append((place, dataclasses.replace(report, outcome=outcome, refusals=(refusal,)), None))
            return (node,)
        self._round.append((place, self._place(site, report, family), site))
        return site.nodes

    def _elementwise(self, node: ir.Node, family: Family, place: int) -> tuple[ir.Node, ...]:
        if not 7 <= family.context.opset <= NEWEST_OPSET:
            return ()
        site = elementwise_site(node, family.context)
        if (
            site is None
            or any(label(step) in self.options.skip for step in site.nodes)
            or self.options.only is not None
        ):
            return ()
        self._round.append((place, self._place(site, self._report(site.nodes[0], family), family), site))
        return site.nodes

    def _report(self, node: ir.Node, family: Family) -> SiteReport:
        conversion = self._conversions.get(node)
        op_type = conversion.op_type if conversion else node.op_type
        training = conversion is not None and conversion.training
        return SiteReport((self._label(node),), op_type, family.name, "kept", training=training)

    def _label(self, node: ir.Node) -> str:
        """The name that the source gives the node."""
        conversion = self._conversions.get(node)
        return label(node) if conversion is None else conversion.name

    def _refuse_by_request(self, name: str) -> None:
        if name in self.options.skip or (self.options.only is not None and name not in self.options.only):
            raise Refused("skipped", "it was left alone on request")

    def _place(self, site: Site, report: SiteReport, family: Family) -> SiteReport:
        """Folds the site backward or forward, or says why neither can be."""
        converted = [node for node in site.nodes if node in self._conversions]
        magnitudes = np.abs(site.affine.scale)
        report = dataclasses.replace(
            report,
            nodes=tuple(self._label(node) for node in site.nodes),
            op_type=self._conversions[converted[0]].op_type if converted else report.op_type,
            training=any(self._conversions[node].training for node in converted),
            channels=site.affine.channels,
            scale_min=float(magnitudes.min(initial=np.inf)) if magnitudes.size else None,
            scale_max=float(magnitudes.max(initial=0.0)) if magnitudes.size else None,
        )
        refusals: list[Refusal] = []
        attempts = (("backward", self._backward), ("forward", self._forward), ("scale", self._scale_backward))
        full = self.options.limit is not None and self._folded >= self.options.limit
        if full:
            refusals.append(Refusal("limit", report.nodes[-1], "skipped", "the limit on folds was reached"))
        for direction, attempt in () if full else attempts:
            if direction == "scale" and all(refusal.code != "shift" for refusal in refusals):
                continue
            try:
                search = attempt(site, family.context)
            except Refused as reason:
                refusals.append(Refusal(direction, report.nodes[-1], reason.code, reason.text))
                continue
            self._folded += 1
            targets = tuple(label(node) for node in search.plan.targets)
            return dataclasses.replace(report, outcome="folded", rules=tuple(search.used_rules), targets=targets)
        outcome = "converted" if converted else "kept"
        return dataclasses.replace(report, outcome=outcome, refusals=tuple(refusals))

    def _merge(self, site: Site | None, report: SiteReport, context: Context) -> SiteReport:
        """Leaves one batch norm of a site that found no place; a site of one node stays as it is."""
        if site is None or len(site.nodes) == 1 or not site.has_batch_norm or site.axis != 1:
            return report
        try:
            kept = merge(site, context)
        except Refused as reason:
            refusal = Refusal("merge", report.nodes[-1], reason.code, reason.text)
            return dataclasses.replace(report, refusals=(*report.refusals, refusal))
        return dataclasses.replace(report, outcome="merged", targets=(self._label(kept),))

    def _backward(self, site: Site, context: Context) -> Search:
        search = Search(context, by_operator(self.options.rules))
        search.backward(site.input, site.axis, site.affine)
        search.plan.commit()
        bypass(site)
        return search

    def _scale_backward(self, site: Site, context: Context) -> Search:
        """The scale into the producer, the shift into an Add: for producers that have no bias."""
        rank = context.rank(site.input)
        if rank is None:
            raise Refused("rank", "the rank of its input is not known, so no Add can take the shift")
        search = Search(context, by_operator(self.options.rules))
        search.backward(site.input, site.axis, site.affine.only_scale())
        addend = Addend(site.affine.offset, site.axis, rank, parameter_type(site, search.plan))
        search.plan.check_add(addend)
        search.plan.commit()
        insert_add(context, bypass(site), addend)
        return search

    def _forward(self, site: Site, context: Context) -> Search:
        search = Search(context, by_operator(self.options.rules))
        search.forward(site.output, site.axis, site.affine)
        search.plan.commit()
        bypass(site)
        return search


def _import_standard_operators(family: Family) -> None:
    """A graph of nothing but foreign nodes imports no standard opset; the nodes that we write need one."""
    nodes = [node for graph in family.graphs for node in graph]
    if family.context.opset or not any(sync_bn.is_sync_batch_norm(node) for node in nodes):
        return
    if not any(node.domain == "" and not sync_bn.is_sync_batch_norm(node) for node in nodes):
        family.graphs[0].opset_imports[""] = family.context.opset = sync_bn.FALLBACK_OPSET


def _refuse_redefined_operators(model: ir.Model) -> None:
    for domain, name, _overload in model.functions:
        if domain == "" and name != sync_bn.OP_TYPE:
            raise UnsupportedModelError(f"the model redefines the standard operator {name!r} as a function of its own")


def count(model: ir.Model) -> Counts:
    """Counts of `model`; the inside of a portable body is not counted."""
    nodes = batch_norm = sync = 0
    skipped = {id(function.graph) for function in model.functions.values() if sync_bn.is_portable_body(function)}
    for graph in walk.graphs(model):
        if id(graph) in skipped:
            continue
        for node in graph:
            nodes += 1
            batch_norm += is_standard(node, "BatchNormalization")
            sync += sync_bn.is_sync_batch_norm(node)
    return Counts(nodes, batch_norm, sync, tensor_total(model))
