"""Render a re-estimation as one HTML page: no script, nothing loaded from elsewhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bnexport import extras
from bnexport.recalibration.report import RecalibrationReport

_WIDTH, _HEIGHT = 260, 16  # of one strip, in pixels
# Dots of one strip; more of them would be a line.
_DOTS = 512


def render_html(report: RecalibrationReport) -> str:
    """Render the page of a report. Raises MissingPackageError without jinja2."""
    try:
        import jinja2
    except ImportError as error:
        raise extras.missing("jinja2", "HTML reports need it") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bnexport", "recalibration"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    layers: list[dict[str, Any]] = []
    for layer in report.layers:
        chosen = np.unique(np.linspace(0, len(layer.shift) - 1, min(_DOTS, len(layer.shift))).astype(int))
        logs = np.log(np.maximum(layer.stretch, 1e-30))
        layers.append(
            {
                "name": "".join(each if each.isprintable() else "\ufffd" for each in layer.name),
                "count": layer.count,
                "largest": layer.largest,
                "shift": layer.shift[chosen].tolist(),
                "logs": logs[chosen].tolist(),
            }
        )
    shift, stretch = (_span(layer[name] for layer in layers) for name in ("shift", "logs"))
    return environment.get_template("report.html.jinja").render(
        layers=layers,
        summary=report.summary() + ".",
        warnings=report.warnings(),
        mode=report.mode,
        method=report.method,
        span=shift,
        logs=stretch,
        factor=math.exp(min(stretch, 700.0)),
        width=_WIDTH,
        height=_HEIGHT,
        place=_place,
    )


def _span(rows: Any) -> float:
    return max((abs(float(value)) for row in rows for value in row), default=0.0) or 1.0


def _place(value: float, low: float, high: float) -> str:
    share = (value - low) / (high - low)
    return f"{3 + (_WIDTH - 6) * min(max(share, 0.0), 1.0):.1f}"
