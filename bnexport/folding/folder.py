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
from bnexport.folding.context import Context, Options
from bnexport.folding.converting import sync_bn, training_mode
from bnexport.folding.converting.old_values import return_old_counters
from bnexport.folding.editing.parameters import write_parameters
from bnexport.folding.editing.rewrite import merge
from bnexport.folding.placing.placement import place
from bnexport.folding.placing.search import Search
from bnexport.folding.reading import decomposed
from bnexport.folding.reading.contradictions import refuse_contradictions
from bnexport.folding.reading.elementwise import OP_TYPES
from bnexport.folding.reading.site import Site, batch_norm_site, elementwise_site
from bnexport.folding.reporting.report import Counts, Refusal, SiteReport
from bnexport.folding.rules import by_operator
from bnexport.graph.inlining import inline_calls
from bnexport.graph.names import Names
from bnexport.graph.nodes import is_standard, label
from bnexport.graph.refusal import Refused
from bnexport.graph.shapes import Shapes
from bnexport.graph.surgery import Surgery
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

    def __init__(self, model: ir.Model, options: Options, *, inline: bool = True) -> None:
        _refuse_redefined_operators(model)
        if inline:
            refuse_contradictions(model)
            if options.only is None and _inlining_helps(model, options):
                inline_calls(model)
        self.model = model
        self.options = options
        self.sites: list[SiteReport] = []
        self._folded = 0
        self._round: list[tuple[int, SiteReport, Site | None]] = []
        self._conversions: dict[ir.Node, sync_bn.Conversion] = {}
        self._rules = by_operator(options.rules)
        self._labels: dict[ir.Node, str] = {}
        self._surgery = Surgery()
        names, shapes = Names(model), Shapes(model, self._surgery)
        self._families = [self._family("main graph", model.graph, names, shapes, in_function=False)]
        for function in model.functions.values():
            if not sync_bn.is_portable_body(function):
                self._families.append(
                    self._family(f"function {function.name}", function.graph, names, shapes, in_function=True)
                )

    def _family(self, name: str, graph: ir.Graph, names: Names, shapes: Shapes, *, in_function: bool) -> Family:
        # The standard domain has two names.
        opset = graph.opset_imports.get("", graph.opset_imports.get("ai.onnx", 0))
        context = Context(self.model, opset, names, shapes, self._surgery, self.options, in_function=in_function)
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
        self._surgery.sweep()
        sync_bn.drop_unused_bodies(self.model)

    @property
    def training_converted(self) -> bool:
        return any(conversion.training for conversion in self._conversions.values())

    @property
    def converted(self) -> bool:
        return bool(self._conversions)

    # A signalling NaN; whoever reads the values refuses them.
    @np.errstate(invalid="ignore")
    def fold(self) -> None:
        """Every site of every graph, top to bottom; again while a fold makes room for another."""
        order = {node: index for index, node in enumerate(walk.nodes(self.model))}
        settled = self.sites
        folded: list[tuple[int, SiteReport]] = []
        for family in self._families:
            for _ in range(_ROUNDS):
                self._round = []
                self._pass(family, order)
                done = [(position, report) for position, report, _ in self._round if report.outcome == "folded"]
                folded += done
                if not done or len(done) == len(self._round):
                    break
            for position, report, site in self._round:
                if report.outcome == "folded":
                    continue
                folded.append((position, self._merge(site, report, family.context)))
            write_parameters(family.context)
        self._surgery.sweep()
        self.sites = settled + [site for _, site in sorted(folded, key=lambda entry: entry[0])]

    def _pass(self, family: Family, order: dict[ir.Node, int]) -> None:
        for graph in family.graphs:
            seen: set[ir.Node] = set()
            nodes = [node for node in graph if is_standard(node, "BatchNormalization", *OP_TYPES)]
            for node in nodes:
                if node.op_type == "BatchNormalization" and node not in seen and not self._surgery.is_dead(node):
                    seen.update(self._batch_norm(node, family, order.get(node, len(order))))
            for node in nodes:
                if node.op_type != "BatchNormalization" and node not in seen and not self._surgery.is_dead(node):
                    seen.update(self._elementwise(node, family, order.get(node, len(order))))
            for node in decomposed.training_sites(nodes, family.context):
                self._keep(node, family, order.get(node, len(order)), decomposed.REASON)

    def _batch_norm(self, node: ir.Node, family: Family, position: int) -> tuple[ir.Node, ...]:
        name = self._label(node)
        try:
            if name in self.options.skip or (self.options.only is not None and name not in self.options.only):
                raise Refused("skipped", "it was left alone on request")
            if not 1 <= family.context.opset <= NEWEST_OPSET:
                raise Refused("opset", f"opset {family.context.opset} is not known here, the newest is {NEWEST_OPSET}")
            site = batch_norm_site(node, family.context)
        except Refused as reason:
            self._keep(node, family, position, reason)
            return (node,)
        self._round.append((position, self._place(site, family), site))
        return site.nodes

    def _elementwise(self, node: ir.Node, family: Family, position: int) -> tuple[ir.Node, ...]:
        if family.context.opset > NEWEST_OPSET or self.options.only is not None:
            return ()
        site = elementwise_site(node, family.context)
        if site is None or any(self._label(step) in self.options.skip for step in site.nodes):
            return ()
        self._round.append((position, self._place(site, family), site))
        return site.nodes

    def _keep(self, node: ir.Node, family: Family, position: int, reason: Refused) -> None:
        """Reports a batch norm that cannot be read as a map."""
        conversion = self._conversions.get(node)
        name = self._label(node)
        report = SiteReport(
            (name,),
            conversion.op_type if conversion else node.op_type,
            family.name,
            "converted" if conversion else "kept",
            refusals=(Refusal("batch_norm", name, reason.code, reason.text),),
            training=conversion is not None and conversion.training,
        )
        self._round.append((position, report, None))

    def _label(self, node: ir.Node) -> str:
        """The name that the source gives the node."""
        if node not in self._labels:
            conversion = self._conversions.get(node)
            self._labels[node] = label(node) if conversion is None else conversion.name
        return self._labels[node]

    def _place(self, site: Site, family: Family) -> SiteReport:
        """Folds the site, or says why that cannot be done."""
        names = tuple(self._label(node) for node in site.nodes)
        conversions = [self._conversions[node] for node in site.nodes if node in self._conversions]
        magnitudes = np.abs(site.affine.scale)
        outcome = "converted" if conversions else "kept"
        rules: tuple[str, ...] = ()
        targets: tuple[str, ...] = ()
        refusals: tuple[Refusal, ...] = ()
        if self.options.limit is not None and self._folded >= self.options.limit:
            refusals = (Refusal("limit", names[-1], "skipped", "the limit on folds was reached"),)
        else:
            placed = place(site, family.context, self._rules)
            if isinstance(placed, Search):
                self._folded += 1
                outcome, rules = "folded", tuple(placed.used_rules)
                targets = tuple(self._label(node) for node in placed.plan.targets)
            else:
                refusals = tuple(Refusal(way, names[-1], reason.code, reason.text) for way, reason in placed)
        # A map that starts at a batch norm is named after it, wherever it stands in its site.
        own = next((node for node in site.nodes if is_standard(node, "BatchNormalization")), site.nodes[0])
        return SiteReport(
            names,
            conversions[0].op_type if conversions else own.op_type,
            family.name,
            outcome,
            rules,
            targets,
            refusals,
            training=any(conversion.training for conversion in conversions),
            channels=site.affine.channels,
            scale_min=float(magnitudes.min()) if magnitudes.size else None,
            scale_max=float(magnitudes.max()) if magnitudes.size else None,
        )

    def _merge(self, site: Site | None, report: SiteReport, context: Context) -> SiteReport:
        """Leaves one batch norm of a site that found no place; a site of one node stays as it is."""
        if site is None or len(site.nodes) == 1 or site.axis != 1:
            return report
        try:
            kept = merge(site, context)
        except Refused as reason:
            refusal = Refusal("merge", report.nodes[-1], reason.code, reason.text)
            return dataclasses.replace(report, refusals=(*report.refusals, refusal))
        return dataclasses.replace(report, outcome="merged", targets=(self._label(kept),))


def _import_standard_operators(family: Family) -> None:
    """A graph of nothing but foreign nodes imports no standard opset; the nodes that we write need one."""
    if family.context.opset:
        return
    nodes = [node for graph in family.graphs for node in graph]
    if not any(sync_bn.is_sync_batch_norm(node) for node in nodes):
        return
    if not any(node.domain == "" and not sync_bn.is_sync_batch_norm(node) for node in nodes):
        family.graphs[0].opset_imports[""] = family.context.opset = sync_bn.FALLBACK_OPSET


def _inlining_helps(model: ir.Model, options: Options) -> bool:
    """Whether calls stand between a batch norm and its place; found out on a copy, which shares all tensors."""
    if not model.functions:
        return False
    trial = model.clone()
    new = inline_calls(trial)
    if not new:
        return False
    refuse_contradictions(trial)
    engine = Engine(trial, options, inline=False)
    engine.convert()
    engine.fold()
    return any(site.outcome in ("folded", "merged") and not new.isdisjoint(site.nodes) for site in engine.sites)


def _refuse_redefined_operators(model: ir.Model) -> None:
    for domain, name, _overload in model.functions:
        if domain == "" and name != sync_bn.OP_TYPE:
            raise UnsupportedModelError(f"the model redefines the standard operator {name!r} as a function of its own")


def count(model: ir.Model) -> Counts:
    """Counts of `model`; the inside of a portable body is not counted."""
    nodes = batch_norm = sync = 0
    bodies = (function for function in model.functions.values() if sync_bn.is_portable_body(function))
    skipped = {id(graph) for body in bodies for graph in (body.graph, *body.subgraphs())}
    for graph in walk.graphs(model):
        if id(graph) in skipped:
            continue
        for node in graph:
            nodes += 1
            batch_norm += is_standard(node, "BatchNormalization")
            sync += sync_bn.is_sync_batch_norm(node)
    return Counts(nodes, batch_norm, sync, tensor_total(model))
