"""Latencies: order of the runs, ratios."""

from __future__ import annotations

import types
from collections.abc import Callable

import numpy as np
import pytest

from bnexport.cli import latency


def test_models_take_turns_and_the_slower_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    clock = [0.0]

    def model(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            calls.append(name)
            clock[0] += seconds

        return run

    monkeypatch.setattr(latency, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    times = latency.measure([model("fast", 0.001), model("slow", 0.002)])
    turns = (["fast"] * 10 + ["slow"] * 20 + ["fast"] * 10) * 3
    assert calls == ["fast"] * 10 + ["slow"] * 10 + turns
    assert times == pytest.approx(np.broadcast_to(np.array([0.001, 0.002])[:, None, None], (2, 6, 10)))
    assert str(latency.ratio_of(times)) == "2.00, 2.00 to 2.00"


def test_a_ratio_is_decided_where_all_turns_agree() -> None:
    def ratio(*seconds: float) -> latency.Ratio:
        turns = np.repeat(np.array(seconds)[:, None], 10, axis=1)
        return latency.ratio_of(np.stack([np.full((6, 10), 2.0), turns]))

    faster = ratio(1.0, 1.0, 1.0, 1.8, 1.8, 1.8)
    assert faster.decided and str(faster) == "0.70, 0.50 to 0.90"
    noisy = ratio(1.0, 1.0, 1.0, 1.0, 1.0, 2.2)
    assert not noisy.decided and str(noisy) == "too noisy to compare: 0.50, 0.50 to 1.10"
