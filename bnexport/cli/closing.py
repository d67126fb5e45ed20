"""The last lines of a fold or an export: batch norms that were asked for, and with --bench the result in one line."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from bnexport.choices import suggestion
from bnexport.cli.console import progress, say

Explain = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Say what happened to one batch norm, or to those of a module, and why."),
]
Bench = Annotated[bool, typer.Option("--bench", help="Compare the latency with that of the unfolded model.")]

# Batch norms that the last line names; more are counted.
_NAMED = 3
_RUNS, _WARM_UP = 60, 10


def explain(report: Any, name: str | None) -> None:
    """Print a line for each batch norm that `name` means."""
    if name is None:
        return
    sites = report.find(name)
    if not sites:
        near = suggestion(name, [each for site in report.sites for each in (*site.modules, *site.nodes)])
        say(f"{name}: no part of a batch norm, so there was nothing to do{near}")
    for site in sites:
        into = f" into {', '.join(site.targets)}" if site.targets else ""
        say(f"{site.name}: {site.outcome_in_words}{into}{f': {site.reason}' if site.reason else ''}")


def note_growth(report: Any) -> None:
    """Print a note where the parameters take more bytes than before."""
    before, after = report.before.parameter_bytes, report.after.parameter_bytes
    if after > before:
        say(
            f"note: the parameters grew from {before:,} to {after:,} bytes: weights that several batch norms share are "
            "folded once for each"
        )


def result_line(report: Any, verification: Any, ratio: Any) -> str:
    """Return the folds proved and compared, the batch norms that stay, and the latency against the unfolded model's."""
    kept = [site for site in report.kept if not site.lone]
    named = ", ".join(f"{site.name} ({site.reason or site.outcome_in_words})" for site in kept[:_NAMED])
    more = f" and {len(kept) - _NAMED} more" if len(kept) > _NAMED else ""
    left = f"{len(kept)} batch norm{'s' * (len(kept) != 1)} left{': ' * bool(kept)}{named}{more}"
    folds = "not verified" if verification is None else verification.proved
    if ratio is None:
        return f"result: nothing folded; {left}; no latency to compare: it is the same model"
    latency = f"{ratio.value:.2f} times the latency of the unfolded model ({ratio.least:.2f} to {ratio.most:.2f})"
    return f"result: {folds}; {left}; {latency if ratio.decided else f'latency {ratio}'}"


def compared_latency(unfolded: Path, folded: Path, feeds: Mapping[str, Any]) -> Any:
    """Return the latency of `folded` in ONNX Runtime over that of `unfolded`; they take turns."""
    from bnexport.runtime import execution, latency

    calls = {}
    for name, path in (("unfolded", unfolded), ("folded", folded)):
        loaded = execution.load(path)
        calls[name] = functools.partial(loaded.run, {key: feeds[key] for key in loaded.needed})
    with progress("timing", 2 * _RUNS) as advance:
        before, after = latency.measure(calls, runs=_RUNS, warm_up=_WARM_UP, progress=advance)
    return latency.ratio(after, before)


def latency_json(ratio: Any) -> dict[str, Any]:
    """Return the entries of --json about a comparison of latencies, None where nothing was folded."""
    if ratio is None:
        return {"latency_ratio": None, "latency_ratio_range": None}
    return {"latency_ratio": ratio.value, "latency_ratio_range": [ratio.least, ratio.most]}
