"""Render a fold report as one HTML page: no script, nothing loaded from elsewhere, light and dark.

The page is made from `FoldReport.to_dict()`, the JSON that the command line writes, by the template beside this file.
Names of nodes come from model files: the template engine escapes every value, characters that would reorder or hide
text are replaced, and the page's own policy forbids whatever would still get through.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bnexport import extras
from bnexport.verification.verdict import CHANGED

Data = Mapping[str, Any]

_WIDTH, _HEIGHT = 168, 16  # of one chart, in pixels
_LONGEST = 600
_LARGEST_EXPONENT = 308  # of a float64
# Classes of the style sheet; nothing else reaches a class attribute.
_CLASSES = ("folded", "merged", "restated", "converted", "kept", "passed", "failed", "proved", "compared")


def render_html(report: Data) -> str:
    """Render the page of a report, given as `FoldReport.to_dict()`. Raises MissingPackageError without jinja2."""
    verification = report.get("verification")
    proofs = iter((verification or {}).get("sites") or ())
    sites = [
        _site(site, next(proofs, None) if site.get("outcome") in CHANGED else None)
        for site in report.get("sites") or ()
    ]
    outputs = [_output(output) for output in (verification or {}).get("outputs") or ()]
    counts = [report.get("before") or {}, report.get("after") or {}]

    def count(*names: str) -> list[float]:
        return [sum(_number(each.get(name)) or 0 for name in names) for each in counts]

    return _template().render(
        report=report,
        verification=verification,
        folded=[site for site in sites if site["outcome"] == "folded"],
        kept=[site for site in sites if site["outcome"] != "folded"],
        outputs=outputs,
        norms=count("batch_norm", "sync_batch_norm"),
        nodes=count("nodes"),
        sizes=count("parameter_bytes"),
        scales=_Axis.spanning(value for site in sites for value in (site["low"], site["high"])),
        errors=_Axis.spanning(value for output in outputs for value in (output["error"], output["bound"])),
        width=_WIDTH,
        height=_HEIGHT,
    )


@functools.cache
def _template() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise extras.missing("jinja2", "HTML reports need it") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bnexport.folding", "reporting"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    filters: dict[str, Any] = {
        "text": _text,
        "number": lambda value: _number(value) or 0.0,
        "short": lambda value: "" if value is None else f"{value:.3g}",
        "thousands": lambda value: f"{value:,.0f}",
        "bytes": _bytes,
        "sizes": _sizes,
        "pixels": lambda value: f"{value:.1f}",
        "power": lambda exponent: f"{10.0**exponent:g}" if -3 <= exponent <= 4 else f"1e{exponent}",
        "css_class": lambda name: str(name) if name in _CLASSES else "verify",
    }
    environment.filters |= filters
    return environment.get_template("report.html.jinja")


def _site(site: Data, proof: Data | None) -> dict[str, Any]:
    proof = proof or {}
    return {
        "proof": proof.get("method") or "",
        "proof_error": _number(proof.get("error")),
        "proof_bound": _number(proof.get("bound")),
        "proof_reason": proof.get("reason") or "",
        **{name: site.get(name) for name in ("op_type", "graph")},
        **{name: list(site.get(name) or ()) for name in ("nodes", "modules", "targets", "rules")},
        "outcome": str(site.get("outcome")),
        "reasons": [site["summary"]] * bool(site.get("summary"))
        + list(dict.fromkeys(refusal.get("text") for refusal in site.get("refusals") or ())),
        "channels": _number(site.get("channels")),
        "low": _number(site.get("scale_min")),
        "high": _number(site.get("scale_max")),
    }


def _output(output: Data) -> dict[str, Any]:
    return {
        **{name: output.get(name) for name in ("name", "dtype", "reason")},
        "outcome": "passed" if output.get("passed") else "failed" if output.get("decided", True) else "undecided",
        "error": _number(output.get("max_abs_diff")),
        "bound": _number(output.get("atol")),
        "relative": _number(output.get("rtol")),
    }


class _Axis:
    """A logarithmic axis from 10^low to 10^high that all charts of a table share."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    @classmethod
    def spanning(cls, values: Iterable[float | None]) -> _Axis:
        logs = [math.log10(value) for value in values if value is not None and value > 0 and math.isfinite(value)]
        if not logs:
            return cls(-1, 1)
        low = min(math.floor(min(logs)), _LARGEST_EXPONENT - 1)
        return cls(low, min(max(math.ceil(max(logs)), low + 1), _LARGEST_EXPONENT))

    def grid(self) -> Iterator[float]:
        """Places of the lines: at most a dozen, more would be a grey area."""
        step = max(1, math.ceil((self.high - self.low) / 12))
        return (self.place(10.0**exponent) for exponent in range(self.low, self.high + 1, step))

    def place(self, value: float) -> float:
        """Return the position in pixels; 0 and what is smaller than the axis lie at its start."""
        if value <= 0:
            return 0.5
        exponent = math.log10(value) if math.isfinite(value) else self.high
        share = (exponent - self.low) / (self.high - self.low)
        return 0.5 + (_WIDTH - 1) * min(max(share, 0.0), 1.0)


def _text(value: object) -> str:
    """Format a value, not yet escaped."""
    text = "" if value is None else str(value)
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return "".join(character if character.isprintable() else "\ufffd" for character in shown)


def _sizes(runs: Iterable[Iterable[Iterable[int]]]) -> str:
    """List the shapes of the inputs of each run, each once."""
    texts = (" + ".join("x".join(map(str, shape)) or "scalar" for shape in shapes) for shapes in runs)
    return ", ".join(dict.fromkeys(texts))


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
