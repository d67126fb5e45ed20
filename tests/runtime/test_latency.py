"""Latencies: order of the runs, percentiles, charts."""

from __future__ import annotations

import time

import pytest

from bnexport.errors import UsageError
from bnexport.runtime import latency


def test_models_take_turns_and_the_slower_one_is_seen() -> None:
    calls: list[str] = []
    models = {
        "fast": lambda: calls.append("fast"),
        "slow": lambda: (calls.append("slow"), time.sleep(0.002)),
    }
    seen: list[int] = []
    fast, slow = latency.measure(models, runs=25, warm_up=3, progress=seen.append)
    assert (len(fast.milliseconds), len(slow.milliseconds)) == (25, 25)
    assert calls[:6] == ["fast"] * 3 + ["slow"] * 3
    assert calls[6:] == ["fast"] * 10 + ["slow"] * 10 + ["slow"] * 10 + ["fast"] * 10 + ["fast"] * 5 + ["slow"] * 5
    assert seen == list(range(1, 51))
    assert slow.percentile(50) >= 2.0 > fast.percentile(50)
    assert slow.to_dict()["p50_ms"] <= slow.to_dict()["p90_ms"] <= slow.to_dict()["p99_ms"]


@pytest.mark.parametrize(("runs", "warm_up"), [(0, 1), (1, -1)])
def test_bad_counts(runs: int, warm_up: int) -> None:
    with pytest.raises(UsageError, match="runs >= 1"):
        latency.measure({}, runs=runs, warm_up=warm_up)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_chart(tmp_path, ending) -> None:
    pytest.importorskip("matplotlib")
    values = [latency.Latency("before", (1.0, 1.2, 1.1, 9.0)), latency.Latency("after", (0.5, 0.6, 0.55, 0.7))]
    target = tmp_path / f"chart.{ending}"
    latency.chart(values, target)
    head = target.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in head
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_a_chart_of_another_kind(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match=r"ends in \.png"):
        latency.chart([latency.Latency("a", (1.0,))], tmp_path / "chart.docx")
