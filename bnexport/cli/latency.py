"""Latency comparison of models: interleaved in blocks, so that other load on the machine affects all alike."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bnexport.errors import UsageError

__all__ = ["Latency", "Ratio", "measure", "ratio_of"]

_BLOCK = 10  # runs of one model before the next has its turn
# Parts of a measurement. The true ratio is below all of six, or above all, once in 2**5 measurements.
_PARTS = 6


@dataclasses.dataclass(frozen=True)
class Latency:
    """Latencies of one model in milliseconds, in the order of the runs."""

    name: str
    milliseconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.milliseconds))


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
    value = latency.median / base.median
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
