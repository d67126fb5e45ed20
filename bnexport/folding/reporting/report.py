"""What was done and what was not, as data; `render` makes tables of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from bnexport import schema
from bnexport.folding.reporting.counts import Counts
from bnexport.verification.verdict import Verification

if TYPE_CHECKING:
    from rich.table import Table

# Rows of a table that anybody reads; more take a millisecond each to lay out.
_SHOWN = 500


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

    outcome: "folded" (into `targets`, by `rules`), "merged" (one node is left), "converted" (a plain
    BatchNormalization is left) or "kept". nodes: labels of the nodes of the site, top to bottom.
    scale_min, scale_max: the range of |gamma| / sqrt(var + eps) over the channels. summary: of merged branches, which
    are a site as well: its nodes are all that are gone, its targets what was written for them.
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

    @property
    def reason(self) -> str:
        """Why the site was not folded, in one line; empty where nothing was refused."""
        return "; ".join(dict.fromkeys(refusal.text for refusal in self.refusals))


@dataclasses.dataclass(frozen=True)
class FoldReport:
    """meaning_changed: a training node was turned into inference. verification: None when it was not run.

    notes: what else a reader should know about the file that was written.
    """

    sites: tuple[SiteReport, ...]
    before: Counts
    after: Counts
    meaning_changed: bool
    verification: Verification | None = None
    source: str | None = None
    target: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def folded(self) -> tuple[SiteReport, ...]:
        """The batch norms that are gone."""
        return tuple(site for site in self.sites if site.outcome == "folded")

    @property
    def kept(self) -> tuple[SiteReport, ...]:
        """The others: kept, merged into another node, or only converted to another form."""
        return tuple(site for site in self.sites if site.outcome != "folded")

    @property
    def changed(self) -> bool:
        """Whether the model differs from its source at all."""
        return any(site.outcome != "kept" for site in self.sites)

    def explain(self, node: str) -> SiteReport | None:
        """The site that holds the node of this name."""
        return next((site for site in self.sites if node in site.nodes), None)

    def to_dict(self) -> dict[str, Any]:
        """What the command line prints with --json."""
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


def render(report: FoldReport) -> list[Table]:
    """Rich tables of a report: the sites, then the counts. Of very many sites, the first that were not folded."""
    from rich.table import Table

    shown = report.sites if len(report.sites) <= _SHOWN else (report.kept or report.sites)[:_SHOWN]
    sites = Table(title="Batch norms")
    for column in ("node", "channels", "outcome", "into", "reason"):
        sites.add_column(column, overflow="fold")
    for site in shown:
        sites.add_row(
            " + ".join(site.nodes),
            "" if site.channels is None else str(site.channels),
            site.outcome,
            ", ".join(site.targets),
            site.summary or site.reason,
        )
    if len(shown) < len(report.sites):
        sites.caption = (
            f"{len(report.folded):,} of {len(report.sites):,} folded; these are the first {len(shown)}"
            f"{' of the others' if report.kept else ''}, --json and --html have all"
        )
    counts = Table(title="Before and after")
    for column in ("", "before", "after"):
        counts.add_column(column, justify="right" if column else "left")
    for name in ("nodes", "batch_norm", "sync_batch_norm", "parameter_bytes"):
        counts.add_row(name.replace("_", " "), f"{getattr(report.before, name):,}", f"{getattr(report.after, name):,}")
    return [sites, counts]
