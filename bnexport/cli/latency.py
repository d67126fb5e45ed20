"""Latency comparison of models: interleaved in blocks, so that other load on the machine affects all alike."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bnexport import interface
from bnexport.errors import UsageError
from bnexport.model_io.staging import whole_file

__all__ = ["Latency", "Ratio", "draw_chart", "measure", "ratio_of"]

PERCENTILES = (50, 90, 99)
_BLOCK = 10  # runs of one model before the next has its turn
# Parts of a measurement. The true ratio is below all of six, or above all, once in 2**5 measurements.
_PARTS = 6


@dataclasses.dataclass(frozen=True)
class Latency:
    """Latencies of one model in milliseconds, in the order of the runs."""

    name: str
    milliseconds: tuple[float, ...]

    def percentile(self, q: float) -> float:
        return float(np.percentile(self.milliseconds, q))

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "runs": len(self.milliseconds),
            "mean_ms": float(np.mean(self.milliseconds)),
            **{f"p{q}_ms": self.percentile(q) for q in PERCENTILES},
        }


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Median latency of one model over that of another. least, most: among the parts of the measurement; None for too few runs."""

    value: float
    least: float | None
    most: float | None

    @property
    def decided(self) -> bool:
        """Whether all parts of the measurement agree which model is faster."""
        return self.least is not None and self.most is not None and not self.least <= 1 <= self.most

    def __str__(self) -> str:
        spread = "" if self.least is None else f", {self.least:.2f} to {self.most:.2f}"
        return f"{self.value:.2f}{spread}" if self.decided else f"too noisy to compare: {self.value:.2f}{spread}"


def ratio_of(latency: Latency, base: Latency) -> Ratio:
    """Compare two models that took turns in one measurement: by all runs, and by each of six parts of them."""
    value = latency.percentile(50) / base.percentile(50)
    if len(base.milliseconds) < _PARTS:
        return Ratio(value, None, None)
    parts = (np.array_split(each.milliseconds, _PARTS) for each in (latency, base))
    ratios = [float(np.median(part) / np.median(of_base)) for part, of_base in zip(*parts)]
    return Ratio(value, min(ratios), max(ratios))


def measure(
    models: Mapping[str, Callable[[], Any]],
    *,
    runs: int = 100,
    warm_up: int = 10,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Latency]:
    """Time `runs` calls of each model after `warm_up` uncounted ones.

    Args:
        models: a function that runs the model once, by name.
        progress: called with the number of runs done so far, of all models together.

    Raises:
        UsageError: runs or warm_up is out of range.
    """
    if runs < 1 or warm_up < 0:
        raise UsageError(f"runs, warm_up: got {runs}, {warm_up}, expected runs >= 1 and warm_up >= 0")
    for run in models.values():
        for _ in range(warm_up):
            run()
    times: dict[str, list[float]] = {name: [] for name in models}
    done = 0
    order = list(models)
    while any(len(seen) < runs for seen in times.values()):
        for name in order:
            for _ in range(min(_BLOCK, runs - len(times[name]))):
                start = time.perf_counter()
                models[name]()
                times[name].append((time.perf_counter() - start) * 1e3)
                done += 1
                progress(done)
        order.reverse()  # so that no model always runs after the same other one
    return [Latency(name, tuple(seen)) for name, seen in times.items()]


def draw_chart(latencies: Sequence[Latency], path: str | os.PathLike[str]) -> None:
    """Draw the cumulative distributions of the latencies to a PNG, SVG or PDF file.

    Raises:
        MissingPackageError: matplotlib is not installed.
        UsageError: the ending of `path` is none that matplotlib writes.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise interface.missing("matplotlib", "charts need it") from error
    from matplotlib.figure import Figure

    target = Path(path)
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for latency in latencies:
        ordered = np.sort(latency.milliseconds)
        share = 100 * np.arange(1, len(ordered) + 1) / len(ordered)
        (line,) = axes.step(
            ordered, share, where="post", label=f"{latency.name}: median {latency.percentile(50):.3g} ms"
        )
        axes.plot([latency.percentile(50)], [50], "o", color=line.get_color())
    # A handful of outliers must not hide the rest; where they are many, a machine is busy, and the axis logarithmic.
    least = min(min(latency.milliseconds) for latency in latencies)
    most = max(latency.percentile(98) for latency in latencies)
    if most > 5 * least:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(0.9 * least, 1.15 * most)
    axes.set(xlabel="latency, ms", ylabel="runs, %", ylim=(0, 102))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    kind = target.suffix.lstrip(".").lower()
    if kind not in figure.canvas.get_supported_filetypes():
        raise UsageError(f"chart: got {str(target)!r}, expected a file that ends in .png, .svg or .pdf")
    with matplotlib.rc_context({"svg.hashsalt": "bnexport"}), whole_file(target) as staged:
        figure.savefig(staged, format=kind, dpi=150)
