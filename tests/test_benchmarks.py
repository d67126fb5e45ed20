"""What benchmarks measure by."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from benchmarks import machine


class Clock:
    """Time in which other threads run for a part of each pause."""

    def __init__(self, shares: Iterator[float]) -> None:
        self.shares, self.pauses, self.worked = shares, 0, 0.0

    def sleep(self, seconds: float) -> None:
        self.pauses += 1
        self.worked += next(self.shares) * seconds

    def process_time(self) -> float:
        return self.worked


def test_rest_waits_until_no_thread_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(iter([2.0, 1.0, 0.3, 0.01]))
    monkeypatch.setattr(machine, "time", clock)
    machine.rest()
    assert clock.pauses == 4


def test_rest_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "time", Clock(itertools.repeat(1.0)))
    with pytest.raises(TimeoutError, match="after 5 s"):
        machine.rest()
