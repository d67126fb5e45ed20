"""The tables of figures in the documents are what benchmarks/results says, and what benchmarks measure by."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator

import pytest

from benchmarks import charts, machine, page, run_all
from benchmarks.tools import tables


@pytest.mark.parametrize("name", page.BLOCKS)
def test_a_table_is_its_result(name: str) -> None:
    document, result, _ = page.BLOCKS[name]
    blocks = page.between(name).findall((page.ROOT / "docs" / document).read_text())
    assert len(blocks) == 1, f"docs/{document}: expected one block {name!r} between its markers"
    assert (page.RESULTS / result).is_file(), f"docs/{document} shows figures of {result}, which is not there"
    assert blocks[0] == page.render(name), "run `python -m benchmarks.page`"


def test_every_chart_is_shown() -> None:
    text = (page.ROOT / "docs/performance.md").read_text()
    for name in charts.CHARTS:
        assert f"]({name})" in text
        assert (page.ROOT / "docs" / name).read_bytes().startswith(b"\x89PNG")


def test_every_benchmark_can_be_started() -> None:
    for it in run_all.BENCHMARKS.values():
        assert (page.ROOT / "benchmarks" / (it.module.replace(".", "/") + ".py")).is_file()


def test_a_result_with_times_says_on_what_it_was_measured() -> None:
    """Processor, instruction set and versions; the load is named where it is known, and otherwise that it is not."""
    for path in sorted(page.RESULTS.glob("*.json")):
        report = json.loads(path.read_text())
        if re.search(r'"[\w/ ]*(?:_ms|seconds|microseconds)"', path.read_text()):
            described = report["machine"]
            assert described["processor"] and described["cores"] and described["instruction_set"], path.name
            assert described["versions"]["bnexport"] and described["versions"]["onnxruntime"], path.name


STORED = json.loads((page.RESULTS / "other_tools.json").read_text())


def test_every_cell_has_a_command_or_a_source() -> None:
    for row in STORED["rows"].values():
        assert all(it["status"] for it in row["tools"].values())
    assert all(STORED["tools"][tool] for tool in tables.SHOWN_TOOLS)
    for source in STORED["sources"].values():
        assert source["version"] and source["date"] and source["source"]


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
