"""Latencies: order of the runs, ratios."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest

from bnexport.cli import latency
from bnexport.errors import UsageError


def test_models_take_turns_and_the_slower_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    clock = [0.0]

    def model(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            calls.append(name)
            clock[0] += seconds

        return run

    monkeypatch.setattr(latency, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    seen: list[int] = []
    models = {"fast": model("fast", 0.001), "slow": model("slow", 0.002)}
    fast, slow = latency.measure(models, runs=25, warm_up=3, progress=seen.append)
    assert calls[:6] == ["fast"] * 3 + ["slow"] * 3
    assert calls[6:] == ["fast"] * 10 + ["slow"] * 10 + ["slow"] * 10 + ["fast"] * 10 + ["fast"] * 5 + ["slow"] * 5
    assert seen == list(range(1, 51))
    assert fast.milliseconds == pytest.approx([1.0] * 25) and slow.milliseconds == pytest.approx([2.0] * 25)


def test_a_ratio_is_decided_where_all_parts_agree() -> None:
    base = latency.Latency("base", (2.0,) * 60)
    faster = latency.ratio_of(latency.Latency("faster", (1.0,) * 30 + (1.8,) * 30), base)
    assert faster.decided and str(faster) == "0.70, 0.50 to 0.90"
    noisy = latency.ratio_of(latency.Latency("noisy", (1.0,) * 50 + (2.2,) * 10), base)
    assert not noisy.decided and str(noisy) == "too noisy to compare: 0.50, 0.50 to 1.10"
    few = latency.ratio_of(latency.Latency("few", (1.0,) * 5), latency.Latency("base", (2.0,) * 5))
    assert not few.decided and str(few) == "too noisy to compare: 0.50"


@pytest.mark.parametrize(("runs", "warm_up"), [(0, 1), (1, -1)])
def test_bad_counts(runs: int, warm_up: int) -> None:
    with pytest.raises(UsageError, match="runs >= 1"):
        latency.measure({}, runs=runs, warm_up=warm_up)
