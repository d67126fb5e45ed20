"""The report of a fold: sites, refusals, counts, and the certificate that it writes into the model."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from bnexport import pages, schema
from bnexport.folding.rules import ALL
from bnexport.graph.nodes import is_portable_body, is_standard, is_sync_batch_norm, kind
from bnexport.model_io import walk
from bnexport.model_io.write import tensor_total
from bnexport.verification.certificate import KEY, LARGEST, Certificate, CertifiedSite
from bnexport.verification.verdict import CHANGED, Claim, SiteProof, Verification

if TYPE_CHECKING:
    from rich.table import Table


# Count the nodes and parameters of a model.


@dataclasses.dataclass(frozen=True)
class Counts:
    """Nodes of a model, bodies and functions included; a portable body counts as its node. operators: nodes by kind."""

    nodes: int
    batch_norm: int
    sync_batch_norm: int
    parameter_bytes: int
    operators: dict[str, int] = dataclasses.field(default_factory=dict)


def count(model: ir.Model) -> Counts:
    """Counts of `model`; the inside of a portable body is not counted."""
    batch_norm = sync = 0
    operators: collections.Counter[str] = collections.Counter()
    bodies = (function for function in model.functions.values() if is_portable_body(function))
    skipped = {id(graph) for body in bodies for graph in (body.graph, *body.subgraphs())}
    for graph in walk.graphs(model):
        if id(graph) in skipped:
            continue
        for node in graph:
            operators[kind(node)] += 1
            batch_norm += is_standard(node, "BatchNormalization")
            sync += is_sync_batch_norm(node)
    return Counts(operators.total(), batch_norm, sync, tensor_total(model), dict(operators.most_common()))


# Reports of folds, as data; `render` makes tables of them.

# Rows of a printed table; each more takes a millisecond to lay out.
_SHOWN = 500

# Outcomes that a table explains.
_OUTCOMES = {"converted": "kept, as BatchNormalization"}


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a rule did not fold a node. code: for tools; text: for people."""

    rule: str
    node: str
    code: str
    text: str


@dataclasses.dataclass(frozen=True)
class SiteReport:
    """One batch norm, or what an exporter made of one.

    outcome: "folded" (into `targets`, by `rules`), "merged" (one node is left), "restated" (as `targets`, in the form that
    `leftover` asks for), "converted" (a plain BatchNormalization is left) or "kept". nodes: labels of the nodes of the
    site, top to bottom. scale_min, scale_max: the range of |gamma| / sqrt(var + eps) over the channels. summary: of merged
    branches, which are a site as well: its nodes are all that are gone, its targets what was written for them. region: names
    of the source's nodes whose values may differ in the result: those of the site, its targets, and what lies between.
    modules: paths of the torch modules that the batch norms come from, where the exporter wrote them. lone: arithmetic that
    is no batch norm, and is in the report only where it is gone.
    """

    nodes: tuple[str, ...]
    op_type: str
    graph: str
    outcome: str
    rules: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    training: bool = False
    channels: int | None = None
    scale_min: float | None = None
    scale_max: float | None = None
    summary: str = ""
    region: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    lone: bool = False

    @property
    def name(self) -> str:
        """The torch modules that the site comes from, else its nodes."""
        return " + ".join(self.modules or self.nodes)

    @property
    def changed(self) -> bool:
        """Whether the nodes of the site are gone, or fewer."""
        return self.outcome in CHANGED

    @property
    def outcome_in_words(self) -> str:
        """The outcome as tables show it."""
        return _OUTCOMES.get(self.outcome, self.outcome)

    @property
    def claim(self) -> Claim:
        """The claim for the local proof."""
        return Claim(" + ".join(self.nodes), self.graph, self.region or self.nodes)

    @property
    def reason(self) -> str:
        """Why the site was not folded, in one line; empty where nothing was refused."""
        return "; ".join(dict.fromkeys(refusal.text for refusal in self.refusals))


@dataclasses.dataclass(frozen=True)
class FoldReport:
    """meaning_changed: a training node was turned into inference. verification: None when it was not run.

    notes: what else a reader should know about the file that was written. inlined: calls were replaced by their
    functions' bodies before anything was folded. certificate: the sites are in the model's metadata, too.
    uncertified: why they are not, where they were wanted. standardised: operators of MMCV and MMDeploy that are standard
    ones now.
    """

    sites: tuple[SiteReport, ...]
    before: Counts
    after: Counts
    meaning_changed: bool
    verification: Verification | None = None
    source: str | None = None
    target: str | None = None
    notes: tuple[str, ...] = ()
    inlined: bool = False
    certificate: bool = False
    uncertified: str = ""
    standardised: int = 0

    def __repr__(self) -> str:
        verdict = "not verified" if self.verification is None else self.verification.status
        return f"FoldReport({self.summary()}, {verdict})"

    def lines(self) -> list[str]:
        """Return what a page says above its tables."""
        files = " to ".join(str(each) for each in (self.source, self.target) if each)
        verdict = [] if self.verification is None else [self.verification.line()]
        return [f"{files}: {self.summary()}" if files else self.summary(), *self.notes, *verdict]

    def _repr_html_(self) -> str:
        return pages.fragment(self.lines(), render(self, everything=True))

    @property
    def folded(self) -> tuple[SiteReport, ...]:
        """The batch norms that are gone."""
        return tuple(site for site in self.sites if site.outcome == "folded")

    @property
    def kept(self) -> tuple[SiteReport, ...]:
        """The others: kept, merged into another node, or only converted to another form."""
        return tuple(site for site in self.sites if site.outcome != "folded")

    def summary(self) -> str:
        """Sum up the batch norms in one line: how many are gone, and into what kind of operator."""
        lone = sum(site.lone for site in self.sites)
        rest = f"{lone} other scale{'s or shifts' if lone > 1 else ' or shift'} folded" if lone else ""
        if lone == len(self.sites):
            return "; ".join(filter(None, ("no batch norms", rest)))
        sites = [site for site in self.folded if not site.lone]
        words = {rule.name: rule.into for rule in ALL}
        rules = collections.Counter(words.get(rule) or rule for site in sites for rule in site.rules[-1:])
        before, after = (each.batch_norm + each.sync_batch_norm for each in (self.before, self.after))
        restated = sum(site.outcome == "restated" for site in self.sites)
        gone, total = before - after - restated, before
        if total < len(self.sites) - lone:  # batch norms that an exporter wrote as arithmetic are no nodes
            gone, total = len(sites), len(self.sites) - lone
        text = f"{gone} of {total} batch norm{'s' * (total != 1)} folded"
        named = rules.most_common(4)
        if len(rules) > 1 and sum(rules.values()) == gone:  # a site of several batch norms is one fold
            more = f" and {len(rules) - 4} more kinds" if len(rules) > 4 else ""
            text += f": {', '.join(f'{count} into {name}' for name, count in named)}{more}"
        elif rules:
            text += f" into {' and '.join(filter(None, (', '.join(name for name, _ in named[:-1]), named[-1][0])))}"
        left = f"{restated} kept in another form" if restated else ""
        return "; ".join(filter(None, (text, left, rest)))

    @property
    def changed(self) -> bool:
        """Whether the model differs from its source at all."""
        return self.standardised > 0 or any(site.outcome != "kept" for site in self.sites)

    @property
    def claims(self) -> list[Claim]:
        """The changes that the local proof is about."""
        return [site.claim for site in self.sites if site.changed]

    @property
    def proofs(self) -> dict[SiteReport, SiteProof]:
        """The local proof of each site that changed, where one was made."""
        made = () if self.verification is None else self.verification.sites
        return dict(zip((site for site in self.sites if site.changed), made, strict=False))

    def explain(self, node: str) -> SiteReport | None:
        """Return the site that holds the node, or batch norm module, of this name, or None."""
        return next((site for site in self.sites if node in (*site.nodes, *site.modules)), None)

    def find(self, name: str) -> tuple[SiteReport, ...]:
        """Return the sites that a user may mean by `name`.

        The one of this node or batch norm module; else those inside the module or scope `name`, as in `backbone.layer1`;
        else those that were folded into the operator, or module, `name`. Path separators may be "." or "/".
        """
        exact = self.explain(name)
        if exact is not None:
            return (exact,)
        for labels in (lambda site: (*site.nodes, *site.modules), lambda site: site.targets):
            found = tuple(site for site in self.sites if any(within(label, name) for label in labels(site)))
            if found:
                return found
        return ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as the command line prints it with --json."""
        # dataclasses.asdict copies every leaf: ten times the time of this, for 10,000 sites.
        sites = tuple(
            {**vars(site), "refusals": tuple(dict(vars(each)) for each in site.refusals)} for site in self.sites
        )
        return {
            "schema_version": schema.REPORT_VERSION,
            **vars(self),
            "sites": sites,
            "before": dict(vars(self.before)),
            "after": dict(vars(self.after)),
            "verification": None if self.verification is None else self.verification.to_dict(),
        }


def within(label: str, name: str) -> bool:
    """Whether the node or module `label` is `name`, or lies in the scope `name`."""
    path, scope = (text.replace("/", ".").strip(".") for text in (label, name))
    return f"{path}.".startswith(f"{scope}.")


def render(report: FoldReport, *, everything: bool = False, most: int | None = _SHOWN) -> list[Table]:
    """Rich tables of a report: the batch norms that were not folded, or all of them, then the counts, with the kinds of
    operators whose numbers changed, or all of them.

    most: rows of a table; None for all.
    """
    tables = []
    if report.kept or (everything and report.sites):
        tables.append(_sites(report, everything, most))
    both, names = (report.before, report.after), ("nodes", "batch_norm", "sync_batch_norm", "parameter_bytes")
    rows = [(name.replace("_", " "), *(getattr(each, name) for each in both)) for name in names]
    kinds = ((name, *(each.operators.get(name, 0) for each in both)) for name in both[0].operators | both[1].operators)
    rows += [row for row in kinds if everything or row[1] != row[2]]
    shown = ((name, f"{old:,}", f"{new:,}") for name, old, new in rows)
    return [*tables, pages.table("Before and after", ("", "before", "after"), shown, right=("before", "after"))]


def _sites(report: FoldReport, everything: bool, most: int | None) -> Table:
    """Make the table of sites, without empty columns and without rows beyond `most`."""
    from rich.table import Table

    chosen = report.sites if everything else report.kept
    left, chosen = len(chosen), chosen[:most]
    table = Table(title="Batch norms" if everything else "Not folded", title_justify="left")
    proofs = report.proofs
    cells = {
        "node": [site.name for site in chosen],
        "channels": ["" if site.channels is None else str(site.channels) for site in chosen],
        "outcome": [site.outcome_in_words for site in chosen],
        "proof": [_mark(proofs.get(site)) for site in chosen],
        "into": [", ".join(site.targets) for site in chosen],
        "reason": [site.summary or site.reason for site in chosen],
    }
    shown = {name: column for name, column in cells.items() if any(column)}
    for name in shown:
        table.add_column(name, overflow="fold")
    for row in zip(*shown.values()):
        table.add_row(*row)
    if left > len(chosen):
        table.caption = (
            f"{len(report.folded):,} of {len(report.sites):,} folded; these are the first {most}"
            f"{'' if everything else ' of the others'}, --json and --html have all"
        )
    return table


def _mark(proof: SiteProof | None) -> str:
    """Return the local proof of a site in a word, with its bound."""
    if proof is None:
        return ""
    return proof.method.replace("_", " ") + (f", within {proof.bound:.2g}" if proof.bound else "")


# Write the certificate of a fold into the model: its sites, for whoever verifies the file later.

_OLD = "the source's certificate told of an earlier fold and was removed"
_NONE = "the file holds no list of its folds: "


def certify(model: ir.Model, report: FoldReport, *, wanted: bool, original: ir.Model | None = None) -> FoldReport:
    """Write the certificate into the metadata; return the report, which says so.

    One of an earlier fold is about another original: it is replaced or removed, unless nothing changed here.
    original: given where the model was changed after the fold; the certificate stays if it still proves all folds.
    """
    if wanted and not report.changed:
        return report
    notes = [*report.notes, *([_OLD] if model.metadata_props.pop(KEY, None) is not None else [])]
    uncertified = ""
    made = certificate_of(report.sites, report.inlined) if wanted else None
    text = "" if made is None else made.encode()
    if any(site.training and site.op_type == "BatchNormalization" for site in report.sites if site.changed):
        uncertified = "training became inference, which no proof makes equal" if text else ""
        text = ""
    if len(text) > LARGEST:
        uncertified, text = f"it would have more than {LARGEST:,} characters", ""
    if text:
        model.metadata_props[KEY] = text
        verdict = None if original is None else _proved(original, model)
        if verdict is not None and not verdict.passed:
            del model.metadata_props[KEY]
            text = ""
            uncertified = (
                f"simplification changed more than the folds ({verdict.reason}), so `verify` has to find them itself"
            )
    uncertified = _NONE + uncertified if uncertified else ""
    return dataclasses.replace(report, certificate=bool(text), uncertified=uncertified, notes=tuple(notes))


def _proved(original: ir.Model, model: ir.Model) -> Verification | None:
    # A fold without verification does not load what verifies.
    from bnexport.verification.api import Pair, prove_certified

    return prove_certified(Pair(original, model))


def certificate_of(sites: Iterable[SiteReport], inlined: bool) -> Certificate | None:
    """Return the certificate of the folds among the sites, None where there is none."""
    changed = tuple(_certified(site) for site in sites if site.changed)
    return Certificate(changed, inlined) if changed else None


def _certified(site: SiteReport) -> CertifiedSite:
    region = site.claim.nodes
    # A site that an earlier fold made is no node of the source: its region stands for it.
    own = tuple(node for node in site.nodes if node in region) or region
    return CertifiedSite(own, tuple(node for node in region if node not in own), site.graph, site.rules)
