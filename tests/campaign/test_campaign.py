"""The driver of the campaigns, with cases of a line: rows, resuming, ends of processes, limits, ways."""

import dataclasses
import json
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.campaign import __main__ as driver
from tests.campaign.table import Campaign, Row, judged, told

SECONDS = 1.0


def warm() -> None:
    """Nothing, as in most campaigns."""


def run(name: str, place: Path, ways: list[str]) -> None:
    place.write_text(json.dumps({"name": name, "status": "passed", "ways": {way: os.getpid() for way in ways if way}}))
    if name == "raises":
        raise ValueError("on purpose")
    if name == "ends":
        os._exit(3)
    while name == "hangs":
        time.sleep(0.1)


Start = Callable[..., tuple[int, dict[str, Row], str]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Start:
    campaign = Campaign(
        cases=lambda: ["good", "raises", "ends", "hangs", "last"],
        trial=__name__,
        results=tmp_path / "rows.json",
        key="rows",
        head=lambda: {"made by": "a test"},
        verdict=judged,
        line=told,
        page=lambda: (tmp_path / "page").write_text(",".join(campaign.load())),
    )

    def start(*arguments: str, **changes: object) -> tuple[int, dict[str, Row], str]:
        """The exit code, the rows and what is printed."""
        monkeypatch.setitem(
            sys.modules, "of_a_test", types.SimpleNamespace(CAMPAIGN=dataclasses.replace(campaign, **changes))
        )
        monkeypatch.setitem(driver.CAMPAIGNS, "zoo", "of_a_test")
        monkeypatch.setattr("sys.argv", ["campaign", "zoo", *arguments])
        return driver.main(), campaign.load(), capfd.readouterr().out

    return start


def test_each_case_has_its_row_and_does_not_run_again(start: Start, tmp_path: Path) -> None:
    code, rows, printed = start()
    assert code == 1 and "2 died" not in printed and "3 died, 2 passed" in printed
    assert {name: judged(row) for name, row in rows.items()} == {
        "ends": "died", "good": "passed", "hangs": "died", "last": "passed", "raises": "died",
    }  # fmt: skip
    assert rows["ends"]["died"].startswith("3: ") and rows["hangs"]["died"].startswith("timeout: ")
    assert "ValueError: on purpose" in rows["raises"]["died"]
    assert json.loads((tmp_path / "rows.json").read_text())["made by"] == "a test"
    assert (tmp_path / "page").read_text() == "ends,good,hangs,last,raises"
    code, rows, printed = start()
    assert code == 0 and printed.startswith("0 of 5 to run")


def test_which_cases_run(start: Start) -> None:
    def those(*arguments: str, **changes: object) -> list[str]:
        _, _, printed = start(*arguments, **changes)
        return [line.split()[1].rstrip(":") for line in printed.splitlines()[1:-1]]

    assert those("--only", "^(good|ends)") == ["good", "ends"]
    assert those("--only", "^(good|ends)", "--again", "died") == ["ends"]
    assert those("--only", "o", "--again", "all", cost=lambda name, rows: name not in rows) == ["good"]
    assert those("good", "last") == ["good", "last"]
    assert those("--minutes", "0") == those("--report") == []
    with pytest.raises(SystemExit, match="got other, expected some of good"):
        start("other")
    assert those("other", takes_others=True) == ["other"]


def test_ways_join_their_row(start: Start) -> None:
    ways = {"ways": ("one", "two"), "more_ways": ("three",)}
    _, first, _ = start("--only", "good", "--ways", "one", **ways)
    assert list(first["good"]["ways"]) == ["one"]
    _, second, _ = start("--only", "good", **ways)
    assert (
        list(second["good"]["ways"]) == ["one", "two"] and second["good"]["ways"]["one"] == first["good"]["ways"]["one"]
    )
    _, third, _ = start("--only", "good", "--ways", "three", **ways)
    assert list(third["good"]["ways"]) == ["one", "two", "three"]
    _, fourth, _ = start("good", **ways)
    assert list(fourth["good"]["ways"]) == ["one", "two"], "a case that is named begins anew"
    with pytest.raises(SystemExit, match="got four"):
        start("--ways", "four", **ways)
