"""Latency of a folded model against the unfolded one: they take turns, so that other load on the machine affects both."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Ratio", "compare", "measure", "ratio_of"]

_WARM_UP = 10
_RUNS = 10  # of one model before the other has its turn
# Turns of each. The true ratio is below that of all six, or above all, once in 2**5 measurements.
_TURNS = 6


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Median latency of one model over that of another. least, most: among the turns."""

    value: float
    least: float
    most: float

    @property
    def decided(self) -> bool:
        """Whether all turns agree which model is faster."""
        return not self.least <= 1 <= self.most

    def __str__(self) -> str:
        text = f"{self.value:.2f}, {self.least:.2f} to {self.most:.2f}"
        return text if self.decided else f"too noisy to compare: {text}"


def compare(unfolded: Path, folded: Path, feeds: Mapping[str, Any]) -> Ratio:
    """Return the latency of `folded` in ONNX Runtime over that of `unfolded`."""
    from bnexport.runtime import engine

    loaded = [engine.load(path) for path in (unfolded, folded)]
    return ratio_of(measure([functools.partial(each.run, {key: feeds[key] for key in each.needed}) for each in loaded]))


def ratio_of(times: Any) -> Ratio:
    """Compare the second of two models to the first. times: as `measure` returns them."""
    base, latency = np.median(times, axis=(1, 2))
    turns = np.median(times, axis=2)
    ratios = turns[1] / turns[0]
    return Ratio(float(latency / base), float(ratios.min()), float(ratios.max()))


def measure(models: Sequence[Callable[[], Any]]) -> Any:
    """Return the seconds that each model took, in an array of (models, turns, runs)."""
    for run in models:
        for _ in range(_WARM_UP):
            run()
    times = np.empty((len(models), _TURNS, _RUNS))
    order = list(range(len(models)))
    for turn in range(_TURNS):
        for index in order:
            for count in range(_RUNS):
                start = time.perf_counter()
                models[index]()
                times[index, turn, count] = time.perf_counter() - start
        order.reverse()  # so that no model always runs after the other one
    return times
