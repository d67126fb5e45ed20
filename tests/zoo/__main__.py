"""Runs the zoo: python -m tests.zoo [--workers N] [--minutes M] [--only TEXT] [--again VERDICT|all].

Each model runs in a process of its own; its result goes into the results at once, so that a run that was stopped goes
on where it was. Needs an environment with the libraries (`make campaign RUN=zoo` makes one).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import bnexport
from tests.zoo import catalogue, runner, verdicts

RESULTS = Path(__file__).with_name("results.json")


def _cost(entry: catalogue.Entry, results: dict[str, Any]) -> tuple[bool, bool, float]:
    """What comes first: small models, begun ones, and of these the ones whose ways so far took the least time."""
    ways = results.get(entry.name, {"ways": {}})["ways"].values()
    return catalogue.is_large(entry), not ways, sum(way.get("total_seconds", 0.0) for way in ways)


def main() -> None:
    options = runner.parser(__doc__, RESULTS, (*verdicts.WAYS, *verdicts.PLAIN, *verdicts.FILES)).parse_args()
    chosen = [entry for entry in catalogue.entries() if re.search(options.only, entry.name)]
    results = runner.load(options, [entry.name for entry in chosen], verdicts.of_model)
    fresh: dict[str, Any] = {"ways": {}}
    waiting = [
        (entry, ways)
        for entry in chosen
        if (
            ways := [name for name in options.ways.split(",") if verdicts.is_open(results.get(entry.name, fresh), name)]
        )
    ]
    waiting.sort(key=lambda each: _cost(each[0], results))
    print(f"{len(waiting)} of {len(catalogue.entries())} to run, bnexport {bnexport.__version__}", flush=True)
    trials = [(entry.name, ways) for entry, ways in waiting]
    runner.run(options, "tests.zoo.trial", results, trials, verdicts.line)


if __name__ == "__main__":
    main()
