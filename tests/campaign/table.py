"""The definition of a campaign, and what becomes of its rows."""

import collections
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import records

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Campaign:
    """The cases, how one runs, and where its row goes.

    cases: names, in the order in which they run. takes_others: also names that are not listed.
    trial: a module with `run(name, place, ways)`, which writes the row as JSON to `place` as far as it got; `SECONDS`, the
        limit of one; `warm()`, which prepares the process that forks for each.
    results: a JSON file; `key`: its entry with the rows, "" where it has nothing else. head: its other entries.
    ways: parts of a case that can run one at a time; the row has an entry for each in "ways". more_ways: those to ask for.
    environment: of tests.frameworks.environment, "" for this one.
    verdict: of a row, in one word. bad: the verdicts for which a run fails. line: of a row, for a terminal.
    page: writes the documents from the rows. cost: of a name and all rows; cases of small cost come first. order: of names
        in the file.
    """

    cases: Callable[[], Sequence[str]]
    trial: str
    results: Path
    verdict: Callable[[Row], str]
    line: Callable[[Row], str]
    page: Callable[[], None] = lambda: None
    key: str = ""
    head: Callable[[], Row] = dict
    ways: tuple[str, ...] = ()
    more_ways: tuple[str, ...] = ()
    environment: str = ""
    bad: tuple[str, ...] = ("failed", "wrong", "died")
    takes_others: bool = False
    cost: Callable[[str, dict[str, Row]], Any] = lambda name, rows: 0
    order: Callable[[str], Any] = str

    def load(self) -> dict[str, Row]:
        if not self.results.exists():
            return {}
        report: Row = json.loads(self.results.read_text())
        return dict(report[self.key]) if self.key else report

    def save(self, rows: dict[str, Row]) -> None:
        ordered = {name: rows[name] for name in sorted(rows, key=self.order)}
        self.results.parent.mkdir(parents=True, exist_ok=True)
        records.write(self.results, {**self.head(), self.key: ordered} if self.key else ordered)

    def open_ways(self, row: Row | None, ways: Iterable[str]) -> list[str]:
        """The ways of a case that can still be tried; [""] for a case without ways that has no row."""
        if row is None:
            return list(ways) or [""]
        if row.get("died") or row.get("does_not_train"):
            return []
        return [way for way in ways if way not in row.get("ways", {})]


def judged(row: Row) -> str:
    """The verdict of a row that has one word in "status"."""
    return "died" if row.get("died") else str(row["status"])


def told(row: Row) -> str:
    """The line of such a row."""
    return f"{judged(row):9} {row['name']}: {row.get('said') or row.get('died', '')}"


def summary(verdicts: Iterable[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in sorted(collections.Counter(verdicts).items()))
