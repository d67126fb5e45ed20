"""BatchNormFolder, the folder as a pass of onnx-ir that composes with the passes of onnx-ir and onnxscript.

requires: names of operators keep their standard meaning, and certain sizes do not contradict one another.
ensures: graph inputs and outputs keep their names, order and types; nodes that are no part of a site stay; every
site is in the report with its rule or its reasons.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Collection, Iterable, Iterator

import numpy as np
import onnx
import onnx_ir as ir

from bnexport import interface
from bnexport.errors import UnsupportedModelError, UsageError
from bnexport.folding.branches.merging import Branches
from bnexport.folding.context import Context, Leftover, Options, Plan, write_parameters
from bnexport.folding.placing import merge, place, place_whole, restate
from bnexport.folding.report import Counts, FoldReport, Refusal, SiteReport, count, within
from bnexport.folding.rules import by_operator
from bnexport.folding.rules.parallel import NAME as PARALLEL
from bnexport.folding.sites import OP_TYPES, Site, batch_norm_site, elementwise_site, lone_sites, read_batch_norm
from bnexport.graph.conversion import Conversion, convert, insert_casts
from bnexport.graph.functions import inline_calls
from bnexport.graph.nodes import OP_TYPE, Refused, is_standard, is_sync_batch_norm, label, module_path
from bnexport.graph.scopes import Scope, scopes
from bnexport.graph.surgery import Surgery
from bnexport.model_io import walk

# Validation of the names of batch norms that a caller selects: a typo would fold nothing, or everything, silently.

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


# Steps of a fold: prepare (inline calls that are in the way), convert, fold.

NEWEST_OPSET = onnx.defs.onnx_opset_version()
# A fold may make room for another (two batch norms around one operator); more rounds than this gain nothing.
_ROUNDS = 4
# Sites between two reports of progress.
_REPORTED = 64


# Where a site stands in the model, what became of it, and the site, where it could be read.
Entry = tuple[int, SiteReport, Site | None]


class Folding:
    """State of one fold in place. Call `convert`, then `fold`; `sites` grows as they run."""

    def __init__(self, model: ir.Model, options: Options) -> None:
        self.model = model
        self.options = options
        self.sites: list[SiteReport] = []
        self.inlined = False
        self.notes: tuple[str, ...] = ()
        self.merged: dict[ir.Node, frozenset[str]] = {}
        self._conversions: dict[ir.Node, Conversion] = {}
        self._rules = by_operator()
        self._labels: dict[ir.Node, str] = {}
        # For each node the names, before the first fold, of the source's nodes that it is or was made for.
        self._origins: dict[ir.Node, tuple[str, ...]] = {}
        self._surgery = Surgery()

    def convert(self) -> None:
        """Inline calls between a batch norm and its place, where that helps, and convert MMCVSyncBatchNorm.

        Raises ModelError for a contradiction.
        """
        refuse_redefined_operators(self.model)
        if self.options.only is None and _inlining_helps(self.model, self.options):
            self.inlined = bool(inline_calls(self.model))
        self._convert()

    def _convert(self) -> None:
        for conversion in convert(self.model, trained=self.options.training_to_inference):
            if conversion.batch_norm is not None:
                self._conversions[conversion.batch_norm] = conversion
                continue
            assert conversion.reason is not None
            name, reason = conversion.name, conversion.reason
            refusal = Refusal("to_inference", name, reason.code, reason.text)
            self.sites.append(SiteReport((name,), conversion.op_type, conversion.scope, "kept", refusals=(refusal,)))

    @property
    def meaning_changed(self) -> bool:
        return any(site.training and site.outcome != "kept" for site in self.sites)

    @property
    def training_converted(self) -> bool:
        return any(conversion.training for conversion in self._conversions.values())

    @property
    def converted(self) -> bool:
        return bool(self._conversions)

    # A signalling NaN; whoever reads the values refuses them.
    @np.errstate(invalid="ignore")
    def fold(self) -> None:
        """Merge parallel branches, then fold every site of every graph; repeat while a fold enables another."""
        order = {node: index for index, node in enumerate(walk.nodes(self.model))}
        # Conversions have the name of what they convert; so has every other node, whatever it is called later.
        self._labels = {node: label(node) for node in order}
        self._origins = {node: (name,) for node, name in self._labels.items()}
        self._labels.update((node, conversion.name) for node, conversion in self._conversions.items())
        self._norms = {name for node, name in self._labels.items() if is_standard(node, "BatchNormalization")}
        self._modules = {name: path for node, name in self._labels.items() if (path := module_path(node))}
        only = None if self.options.only is None else as_labels(self.options.only, order)
        self.options = dataclasses.replace(self.options, only=only, skip=as_labels(self.options.skip, order))
        entries: list[Entry] = []
        branches = Branches(self.options, self._conversions, self._label, self._region)
        total = sum(is_standard(node, "BatchNormalization") for node in order)
        interface.report("folding", 0, total)
        kind = functools.partial(Context, options=self.options)
        every = scopes(self.model, self._surgery, kind)
        for scope in every:
            if PARALLEL not in self.options.skip and 1 <= scope.context.opset <= NEWEST_OPSET:
                for position, report in branches.merge(scope, order):
                    entries.append((position, report, None))
                # Their weights have other shapes now, which rules ask for; the exact values stay for later folds.
                write_parameters(scope.context, keep=True)
            for _ in range(_ROUNDS):
                found: list[Entry] = []
                for entry in self._pass(scope, order):
                    found.append(entry)
                    if len(found) % _REPORTED == 0:
                        interface.report("folding", min(len(found), total), total)
                done = [entry for entry in found if entry[1].outcome == "folded"]
                entries += done
                if not done or len(done) == len(found):
                    break
            for position, report, site in found:
                if report.outcome != "folded":
                    left = self._merge(site, report, scope.context)
                    entries.append((position, self._restate(site, left, scope.context), site))
            for _ in range(_ROUNDS):
                lone = list(self._lone(scope, order, {node for _, _, site in found if site for node in site.nodes}))
                entries += lone
                if not lone:
                    break
            write_parameters(scope.context)
        self._surgery.sweep()
        self.notes = every[0].context.drop_stale_shapes()
        self.merged = every[0].context.merged
        self.sites += [report for _, report, _ in sorted(entries, key=lambda entry: entry[0])]
        self.sites = [dataclasses.replace(site, modules=self._paths(site)) for site in self.sites]
        if self.converted:
            insert_casts(self.model)

    def report(self, before: Counts, notes: Iterable[str] = (), source: str | None = None) -> FoldReport:
        """Return the report of the fold. before: counts of the model as it was given. notes: what was noted before."""
        sites, after = tuple(self.sites), count(self.model)
        return FoldReport(
            sites, before, after, self.meaning_changed, source=source, notes=(*notes, *self.notes), inlined=self.inlined
        )

    def _paths(self, site: SiteReport) -> tuple[str, ...]:
        """Return the torch modules that the batch norms of a site come from, or else its other nodes."""
        norms = [name for name in site.nodes if name in self._norms]
        return tuple(dict.fromkeys(self._modules[name] for name in norms or site.nodes if name in self._modules))

    def _pass(self, scope: Scope[Context], order: dict[ir.Node, int]) -> Iterator[Entry]:
        for graph in scope.graphs:
            seen: set[ir.Node] = set()
            arithmetic = OP_TYPES if self.options.layers is None else ()
            nodes = [node for node in graph if is_standard(node, "BatchNormalization", *arithmetic)]
            for node in nodes:
                if node.op_type == "BatchNormalization" and node not in seen and not self._surgery.is_dead(node):
                    try:
                        site = self._batch_norm_site(node, scope)
                    except Refused as reason:
                        yield order.get(node, len(order)), self._unread(node, scope, reason), None
                        continue
                    seen.update(site.nodes)
                    yield order.get(node, len(order)), self._place(site, scope), site
            for node in nodes:
                if node.op_type != "BatchNormalization" and node not in seen and not self._surgery.is_dead(node):
                    found = self._elementwise_site(node, scope)
                    if found is not None:
                        seen.update(found.nodes)
                        yield order.get(node, len(order)), self._place(found, scope), found

    def _lone(self, scope: Scope[Context], order: dict[ir.Node, int], taken: set[ir.Node]) -> Iterator[Entry]:
        """Fold arithmetic that is no batch norm where it leaves the model; elsewhere it is no site. taken: nodes of sites."""
        alone = self.options.only is not None or self.options.layers is not None
        if alone or not 1 <= scope.context.opset <= NEWEST_OPSET:
            return
        for graph in scope.graphs:
            for node in [node for node in graph if is_standard(node, *OP_TYPES) and node not in taken]:
                if self._surgery.is_dead(node):
                    continue
                for site in lone_sites(node, scope.context):
                    if any(step in taken or self._label(step) in self.options.skip for step in site.nodes):
                        continue
                    plan = place_whole(site, scope.context, self._rules)
                    if plan is not None:
                        yield (
                            order.get(node, len(order)),
                            dataclasses.replace(self._folded(site, plan, scope), lone=True),
                            site,
                        )
                        break

    def _batch_norm_site(self, node: ir.Node, scope: Scope[Context]) -> Site:
        name = self._label(node)
        if name in self.options.skip or (self.options.only is not None and name not in self.options.only):
            raise Refused("skipped", "it was left alone on request")
        if not 1 <= scope.context.opset <= NEWEST_OPSET:
            raise Refused("opset", f"opset {scope.context.opset} is not known here, the newest is {NEWEST_OPSET}")
        return batch_norm_site(node, scope.context)

    def _elementwise_site(self, node: ir.Node, scope: Scope[Context]) -> Site | None:
        if scope.context.opset > NEWEST_OPSET or self.options.only is not None:
            return None
        site = elementwise_site(node, scope.context)
        if site is None or any(self._label(step) in self.options.skip for step in site.nodes):
            return None
        return site

    def _unread(self, node: ir.Node, scope: Scope[Context], reason: Refused) -> SiteReport:
        """Return the report of a batch norm that cannot be read as a map."""
        conversion = self._conversions.get(node)
        name = self._label(node)
        return SiteReport(
            (name,),
            conversion.op_type if conversion else node.op_type,
            scope.name,
            "converted" if conversion else "kept",
            refusals=(Refusal("batch_norm", name, reason.code, reason.text),),
            training=conversion is not None and conversion.training,
        )

    def _label(self, node: ir.Node) -> str:
        """Return the name of the node in the source."""
        return self._labels.get(node) or label(node)

    def _place(self, site: Site, scope: Scope[Context]) -> SiteReport:
        """Fold the site, or report why that cannot be done."""
        placed = place(site, scope.context, self._rules)
        if isinstance(placed, Plan):
            return self._folded(site, placed, scope)
        report = self._report(site, scope)
        refusals = tuple(Refusal(way, report.nodes[-1], reason.code, reason.text) for way, reason in placed)
        return dataclasses.replace(report, refusals=refusals)

    def _folded(self, site: Site, plan: Plan, scope: Scope[Context]) -> SiteReport:
        """Return the report of a site that has left."""
        return dataclasses.replace(
            self._report(site, scope),
            outcome="folded",
            rules=tuple(plan.rules),
            targets=tuple(self._label(node) for node in plan.targets),
            region=self._region((*site.nodes, *plan.passed, *plan.targets), scope.context),
        )

    def _report(self, site: Site, scope: Scope[Context]) -> SiteReport:
        """Return the report of a site that stays."""
        conversions = [self._conversions[node] for node in site.nodes if node in self._conversions]
        magnitudes = np.abs(site.affine.scale)
        # A map that starts at a batch norm is named after it, wherever it stands in its site.
        own = next((node for node in site.nodes if is_standard(node, "BatchNormalization")), site.nodes[0])
        return SiteReport(
            tuple(self._label(node) for node in site.nodes),
            conversions[0].op_type if conversions else own.op_type,
            scope.name,
            "converted" if conversions else "kept",
            training=any(conversion.training for conversion in conversions),
            channels=site.affine.channels,
            scale_min=float(magnitudes.min()) if magnitudes.size else None,
            scale_max=float(magnitudes.max()) if magnitudes.size else None,
        )

    def _restate(self, site: Site | None, report: SiteReport, context: Context) -> SiteReport:
        """Write the batch norms that are left of a site in the form that was asked for."""
        if site is None or self.options.leftover == "batch-norm":
            return report
        norms = [node for node in site.nodes if is_standard(node, "BatchNormalization")]
        made: list[ir.Node] = []
        refusals = list(report.refusals)
        for node in norms:
            if self._surgery.is_dead(node):
                continue
            try:
                made += restate(Site((node,), read_batch_norm(node, context), 1, 0), self.options.leftover, context)
            except Refused as reason:
                refusals.append(Refusal("leftover", self._label(node), reason.code, reason.text))
        report = dataclasses.replace(report, refusals=tuple(refusals))
        if not made:
            return report
        region = self._region((*site.nodes, *made), context)
        return dataclasses.replace(
            report, outcome="restated", targets=tuple(self._label(node) for node in made), region=region
        )

    def _region(self, nodes: Iterable[ir.Node], context: Context) -> tuple[str, ...]:
        """Name the source's nodes that `nodes` are or replace; nodes created meanwhile count as replacing these."""
        names = tuple(dict.fromkeys(name for node in nodes for name in self._origins.get(node, ())))
        self._origins.update((node, names) for node in context.created)
        context.created.clear()
        return names

    def _merge(self, site: Site | None, report: SiteReport, context: Context) -> SiteReport:
        """Merge a site that found no place into one batch norm. A single node, or plain arithmetic, stays as it is."""
        if site is None or len(site.nodes) == 1 or site.axis != 1 or self.options.layers is not None:
            return report
        if not any(is_standard(node, "BatchNormalization") for node in site.nodes):
            return report
        try:
            kept = merge(site, context)
        except Refused as reason:
            refusal = Refusal("merge", report.nodes[-1], reason.code, reason.text)
            return dataclasses.replace(report, refusals=(*report.refusals, refusal))
        return dataclasses.replace(
            report, outcome="merged", targets=(self._label(kept),), region=self._region(site.nodes, context)
        )


def _inlining_helps(model: ir.Model, options: Options) -> bool:
    """Whether inlining enables a fold, tried on a copy that shares all tensors."""
    if not model.functions:
        return False
    trial = model.clone()
    new = inline_calls(trial)
    if not new:
        return False
    folding = Folding(trial, options)
    folding._convert()
    folding.fold()
    return any(site.outcome in ("folded", "merged") and not new.isdisjoint(site.nodes) for site in folding.sites)


def refuse_redefined_operators(model: ir.Model) -> None:
    for domain, name, _overload in model.functions:
        if domain == "" and name != OP_TYPE:
            raise UnsupportedModelError(f"the model redefines the standard operator {name!r} as a function of its own")


@dataclasses.dataclass
class FolderResult(ir.passes.PassResult):
    """Result of the pass: the model, whether it changed, and the report."""

    report: FoldReport


class BatchNormFolder(ir.passes.InPlacePass):
    """Pass that converts sync batch norm and folds batch norms into their neighbours, in place, without
    verification.

    `bnexport.fold` runs the same steps on a copy and compares the result with the original.

    Args:
        max_scale, only, skip, training_to_inference, leftover: as `bnexport.fold` takes them.

    Raises (when it is called):
        UsageError: `only` or `skip` names no batch norm.
        onnx_ir.passes.PreconditionError: the model redefines a standard operator, or its sizes contradict.

    Examples:
        >>> import onnx_ir as ir
        >>> from onnx_ir.passes.common import RemoveUnusedNodesPass
        >>> model = ir.from_onnx_text('''
        ...     <ir_version: 9, opset_import: ["" : 17]>
        ...     net (float[N, 1] x) => (float[N, 2] y)
        ...     <float[1, 2] w = {1, 2}, float[2] gamma = {3, 3}, float[2] beta = {1, 1},
        ...      float[2] mean = {0, 0}, float[2] var = {0.25, 1}>
        ...     {
        ...         h = MatMul(x, w)
        ...         y = BatchNormalization <epsilon = 0.0> (h, gamma, beta, mean, var)
        ...     }
        ... ''')
        >>> result = ir.passes.Sequential(BatchNormFolder(), RemoveUnusedNodesPass())(model)
        >>> result.modified, [node.op_type for node in result.model.graph]
        (True, ['MatMul', 'Add'])
    """

    def __init__(
        self,
        *,
        max_scale: float = 1e6,
        only: Iterable[str] | None = None,
        skip: Iterable[str] = (),
        training_to_inference: bool = False,
        leftover: Leftover = "batch-norm",
    ) -> None:
        self.options = Options.of(
            max_scale=max_scale,
            only=only,
            skip=skip,
            training_to_inference=training_to_inference,
            leftover=leftover,
        )

    def requires(self, model: ir.Model) -> None:
        refuse_redefined_operators(model)

    def call(self, model: ir.Model) -> FolderResult:
        check_selection(model, only=self.options.only or (), skip=self.options.skip)
        before = count(model)
        folding = Folding(model, self.options)
        folding.convert()
        folding.fold()
        report = folding.report(before)
        return FolderResult(model, report.changed, report)
