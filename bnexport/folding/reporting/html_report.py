"""A fold report as one HTML page: no script, nothing loaded from elsewhere, light and dark.

The page is made from `FoldReport.to_dict()`, that is from the JSON that the command line writes. Names of
nodes come from model files, so every text is escaped, characters that would reorder or hide text are
replaced, and the page's own policy forbids whatever would still get through.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Data = Mapping[str, Any]

_OUTCOMES = ("folded", "merged", "converted", "kept")
_WIDTH, _HEIGHT = 168, 16  # of one chart, in pixels
_LONGEST = 600
_LARGEST_EXPONENT = 308  # of a float64

_STYLE = """
:root { color-scheme: light dark; --page: #f9f9f7; --surface: #fcfcfb; --ink: #0b0b0b; --soft: #52514e;
  --faint: #898781; --line: #e1e0d9; --mark: #2a78d6; --good: #006300; --bad: #d03b3b; --warn: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --page: #0d0d0d; --surface: #1a1a19; --ink: #ffffff;
  --soft: #c3c2b7; --faint: #898781; --line: #2c2c2a; --mark: #3987e5; --good: #0ca30c; --bad: #e66767;
  --warn: #fab219; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 32px 24px 64px; max-width: 1120px; background: var(--page); color: var(--ink);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 36px 0 8px; }
p { margin: 4px 0; color: var(--soft); } .file { overflow-wrap: anywhere; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0 0; }
.tile { flex: 1 1 auto; background: var(--surface); border: 1px solid var(--line); border-radius: 8px;
  padding: 12px 16px; }
.tile b { display: block; font-size: 20px; font-weight: 600; white-space: nowrap; } .tile > span { color: var(--soft); }
.scroll { overflow-x: auto; background: var(--surface); border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 7px 12px; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; } th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
td { overflow-wrap: break-word; min-width: 72px; } td.name, td.reason { overflow-wrap: anywhere; }
td.name { min-width: min(240px, 44vw); font-weight: 500; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
td.chart, th.chart { width: 192px; min-width: 192px; } td.reason { min-width: 240px; }
small { color: var(--faint); font-size: 12px; } code { font: 12px/1.4 ui-monospace, monospace; }
svg { display: block; margin-top: 3px; } svg text { fill: var(--faint); font-size: 10px; }
svg .grid { stroke: var(--line); } svg .mark { fill: var(--mark); } svg .limit { stroke: var(--ink); stroke-width: 2; }
.badge { white-space: nowrap; } .badge::before { content: "\\25CF\\00A0"; } .folded, .passed { color: var(--good); }
.kept, .verify { color: var(--warn); } .failed { color: var(--bad); } .merged, .converted { color: var(--mark); }
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render_html(report: Data) -> str:
    """The page for a report as `FoldReport.to_dict()` gives it."""
    sites = list(report.get("sites") or ())
    left = [site for site in sites if site.get("outcome") != "folded"]
    done = [site for site in sites if site.get("outcome") == "folded"]
    scales = _Axis.spanning(
        value for site in sites for value in (_number(site.get("scale_min")), _number(site.get("scale_max")))
    )
    title = "bnexport: folded batch norms"
    return "".join(
        [
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_text(_POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>",
            _files(report),
            _tiles(report, sites, done),
            _verification(report.get("verification")),
            _sites("Left in the model", left, scales, "why"),
            _sites("Folded", done, scales, "into"),
            "</body></html>\n",
        ]
    )


def _files(report: Data) -> str:
    source, target = report.get("source"), report.get("target")
    lines = []
    if source or target:
        lines.append(f'<p class="file"><code>{_text(source or "a model in memory")}</code>')
        lines.append(f" &rarr; <code>{_text(target)}</code></p>" if target else "</p>")
    if report.get("meaning_changed"):
        lines.append(
            "<p>The graph trained. It is an inference graph now, with the running statistics that it stored.</p>"
        )
    return "".join(lines)


def _tiles(report: Data, sites: Sequence[Data], done: Sequence[Data]) -> str:
    before, after = report.get("before") or {}, report.get("after") or {}

    def count(counts: Data, *names: str) -> float:
        return sum(_number(counts.get(name)) or 0 for name in names)

    norms = [count(counts, "batch_norm", "sync_batch_norm") for counts in (before, after)]
    status = (report.get("verification") or {}).get("status", "not run")
    tiles = [
        (f"{len(done)} of {len(sites)}", "sites folded"),
        (f"{norms[0]:,.0f} &rarr; {norms[1]:,.0f}", "batch norm nodes"),
        (f"{count(before, 'nodes'):,.0f} &rarr; {count(after, 'nodes'):,.0f}", "nodes"),
        (f"{_bytes(count(before, 'parameter_bytes'))} &rarr; {_bytes(count(after, 'parameter_bytes'))}", "parameters"),
        (f'<span class="badge {_class(status)}">{_text(status)}</span>', "verification"),
    ]
    cells = "".join(f'<div class="tile"><b>{value}</b><span>{label}</span></div>' for value, label in tiles)
    return f'<div class="tiles">{cells}</div>'


def _verification(result: Data | None) -> str:
    if result is None:
        return "<h2>Verification</h2><p>It was not run.</p>"
    outputs = list(result.get("outputs") or ())
    reference = "the original" if result.get("reference") == "original" else "the converted, unfolded graph"
    samples = _number(result.get("samples")) or 0
    how = [f"Compared with {reference} on {samples:,.0f} inputs"]
    if result.get("engine"):
        how.append(f"in {_text(result['engine'])}")
    page = f"<h2>Verification</h2><p>{' '.join(how)}.</p>" if outputs else "<h2>Verification</h2>"
    if result.get("reason"):
        page += f"<p>{_text(result['reason'])}</p>"
    if not outputs:
        return page
    axis = _Axis.spanning(
        value for output in outputs for value in (_number(output.get("max_abs_diff")), _number(output.get("atol")))
    )
    rows = []
    for output in outputs:
        error, bound = _number(output.get("max_abs_diff")), _number(output.get("atol"))
        relative = _number(output.get("rtol"))
        allowed = _short(bound) + (f" + {_short(relative)} |y|" if relative else "")
        outcome = "passed" if output.get("passed") else "failed" if output.get("decided", True) else "undecided"
        badge = f'<span class="badge {_class(outcome)}">{outcome}</span>'
        rows.append(
            f'<tr><td class="name">{_text(output.get("name"))}</td><td>{_text(output.get("dtype"))}</td>'
            f'<td class="number">{_short(error)}</td><td class="number">{allowed}</td>'
            f'<td class="chart">{axis.error(error, bound)}</td><td>{badge} {_text(output.get("reason") or "")}</td></tr>'
        )
    head = (
        '<th>output</th><th>type</th><th class="number">largest difference</th><th class="number">allowed</th>'
        f'<th class="chart">difference (bar), allowed (line){axis.labels()}</th><th></th>'
    )
    return page + _table(head, rows)


def _sites(title: str, sites: Sequence[Data], axis: _Axis, last: str) -> str:
    if not sites:
        return ""
    rows = []
    for site in sites:
        outcome = str(site.get("outcome"))
        nodes = " + ".join(_text(node) for node in site.get("nodes") or ())
        graph = f", {_text(site['graph'])}" if site.get("graph") not in (None, "", "main graph") else ""
        targets = ", ".join(_text(target) for target in site.get("targets") or ())
        rules = ", ".join(_text(rule) for rule in site.get("rules") or ())
        reasons = dict.fromkeys(_text(refusal.get("text")) for refusal in site.get("refusals") or ())
        explained = [targets, f"<small>by {rules}</small>" if rules else "", "; ".join(reasons)]
        low, high = _number(site.get("scale_min")), _number(site.get("scale_max"))
        channels = _number(site.get("channels"))
        rows.append(
            f'<tr><td class="name">{nodes}<br><small>{_text(site.get("op_type"))}{graph}</small></td>'
            f'<td class="number">{"" if channels is None else f"{channels:,.0f}"}</td>'
            f'<td><span class="badge {_class(outcome)}">{_text(outcome)}</span></td>'
            f'<td class="chart">{axis.range(low, high)}</td>'
            f'<td class="reason">{"<br>".join(part for part in explained if part)}</td></tr>'
        )
    head = (
        '<th>batch norm</th><th class="number">channels</th><th>outcome</th>'
        f'<th class="chart">range of |scale| / std{axis.labels()}</th><th>{last}</th>'
    )
    return f"<h2>{title}</h2>" + _table(head, rows)


def _table(head: str, rows: Iterable[str]) -> str:
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


class _Axis:
    """A logarithmic axis from 10^low to 10^high that all charts of a table share."""

    def __init__(self, low: int, high: int) -> None:
        self._low, self._high = low, high

    @classmethod
    def spanning(cls, values: Iterable[float | None]) -> _Axis:
        logs = [math.log10(value) for value in values if value is not None and value > 0 and math.isfinite(value)]
        if not logs:
            return cls(-1, 1)
        low = min(math.floor(min(logs)), _LARGEST_EXPONENT - 1)
        return cls(low, min(max(math.ceil(max(logs)), low + 1), _LARGEST_EXPONENT))

    def range(self, low: float | None, high: float | None) -> str:
        """A bar from `low` to `high`."""
        if low is None or high is None:
            return ""
        left, right = self._place(low), self._place(high)
        bar = f'<rect class="mark" x="{left:.1f}" y="5" width="{max(right - left, 3):.1f}" height="6" rx="3"/>'
        return self._chart(bar, f"{_short(low)} to {_short(high)}")

    def error(self, error: float | None, bound: float | None) -> str:
        """A bar up to `error` and a line at `bound`."""
        if error is None:
            return ""
        length = max(self._place(error), 3.0 if error > 0 else 0.0)
        bar = f'<rect class="mark" x="0" y="5" width="{length:.1f}" height="6" rx="3"/>'
        if bound:
            place = self._place(bound)
            bar += f'<line class="limit" x1="{place:.1f}" x2="{place:.1f}" y1="2" y2="14"/>'
        return self._chart(bar, f"{_short(error)}, allowed {_short(bound)}")

    def labels(self) -> str:
        texts = []
        for exponent, anchor in ((self._low, "start"), (self._high, "end")):
            place = self._place(10.0**exponent)
            texts.append(f'<text x="{place:.1f}" y="11" text-anchor="{anchor}">{_power(exponent)}</text>')
        return f'<svg width="{_WIDTH}" height="{_HEIGHT}" aria-hidden="true">{"".join(texts)}</svg>'

    def _chart(self, content: str, description: str) -> str:
        # More than a dozen lines would be a grey area.
        step = max(1, math.ceil((self._high - self._low) / 12))
        grid = "".join(
            f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="0" y2="{_HEIGHT}"/>'
            for place in (self._place(10.0**exponent) for exponent in range(self._low, self._high + 1, step))
        )
        label = _text(description)
        return (
            f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{label}">'
            f"<title>{label}</title>{grid}{content}</svg>"
        )

    def _place(self, value: float) -> float:
        """In pixels; 0 and what is smaller than the axis lie at its start."""
        if value <= 0:
            return 0.5
        exponent = math.log10(value) if math.isfinite(value) else self._high
        share = (exponent - self._low) / (self._high - self._low)
        return 0.5 + (_WIDTH - 1) * min(max(share, 0.0), 1.0)


def _text(value: object) -> str:
    text = "" if value is None else str(value)
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return html.escape("".join(character if character.isprintable() else "\ufffd" for character in shown), quote=True)


def _class(name: object) -> str:
    """A class of the style sheet; nothing else reaches a class attribute."""
    known = (*_OUTCOMES, "passed", "failed")
    return str(name) if name in known else "verify"


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _power(exponent: int) -> str:
    return f"{10.0**exponent:g}" if -3 <= exponent <= 4 else f"1e{exponent}"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
