"""Runs a campaign: python -m tests.campaign NAME [CASE ...] [--only TEXT] [--again VERDICTS] [--report].

Cases that have a row do not run again, unless they are named or --again says so. Environments that a campaign needs are made
in build/. Fails where a case of this run is bad.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import bnexport
from bnexport.errors import LibraryError
from bnexport.native import library
from tests.campaign.table import ROOT, Campaign, Row, summary
from tests.frameworks import environment

# Modules with a `CAMPAIGN`, by the name that `make campaign` has for it.
CAMPAIGNS = {
    "frameworks": "tests.frameworks.campaign",
    "gpu": "benchmarks.gpu.kit",
    "matrix": "tests.custom_ops.matrix",
    "runtimes": "tests.runtimes.campaign",
    "torch": "tests.torch_versions.campaign",
    "zoo": "tests.zoo.page",
    "zoo-training": "tests.zoo.training.page",
}


class Worker:
    """A process that runs cases of one module, started when it gets the first one."""

    def __init__(self, python: str, trial: str) -> None:
        self.command = [python, "-m", "tests.campaign.worker", trial]
        self.process: subprocess.Popen[str] | None = None

    def row(self, name: str, ways: Sequence[str]) -> Row:
        """The row of one case, as far as it came."""
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=_variables(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        begin = time.time()
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder, "row.json")
            self.process.stdin.write(f"{name}\t{place}\t{','.join(ways)}\n")
            self.process.stdin.flush()
            code = self.process.stdout.readline().strip()
            if not code:
                self.process.wait()
            row: Row = json.loads(place.read_text()) if place.exists() else {"name": name}
            if code != "0":
                log = place.with_suffix(".log")
                said = log.read_text(errors="replace").strip()[-800:] if log.exists() else ""
                row["died"] = f"{code or 'worker ended'}: {said}"
        return row | {"wall_seconds": round(time.time() - begin, 1)}

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()


def _variables() -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "YOLO_OFFLINE": "true", "PYTHONWARNINGS": "ignore"}
    ours = {}
    with contextlib.suppress(LibraryError):  # which the kit for a GPU builds
        ours[library.ENVIRONMENT_VARIABLE] = str(library.get_library_path())
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **offline, **ours}


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    made.add_argument("campaign", choices=sorted(CAMPAIGNS))
    made.add_argument("names", nargs="*", metavar="CASE", help="cases to run, also those that have a row")
    made.add_argument("--only", default="", help="a regular expression; names in which it is found")
    made.add_argument("--again", default="", help="verdicts to run again, such as wrong,refused, or all")
    made.add_argument("--ways", help="ways to go, of those that the campaign has")
    made.add_argument("--minutes", type=float, default=1e6, help="start no case after so many")
    made.add_argument("--report", action="store_true", help="run nothing: verdicts, and the page from the rows")
    made.add_argument("--results", type=Path, help="another file of rows")
    return made


def choose(campaign: Campaign, options: argparse.Namespace, rows: dict[str, Row]) -> dict[str, list[str]]:
    """The ways to go of each case to run, by name; the rows of those that run again are taken out."""
    listed = list(campaign.cases())
    if not campaign.takes_others and (unknown := set(options.names) - set(listed)):
        raise SystemExit(f"got {', '.join(sorted(unknown))}, expected some of {', '.join(listed)}")
    names = [name for name in options.names or listed if re.search(options.only, name)]
    ways = options.ways.split(",") if options.ways else campaign.ways
    if unknown := set(ways) - {*campaign.ways, *campaign.more_ways}:
        raise SystemExit(f"got {', '.join(sorted(unknown))}, expected some of {', '.join(campaign.ways)}")
    again = set(options.again.split(",")) - {""}
    names.sort(key=lambda name: campaign.cost(name, rows))
    for name in names:
        if name in rows and (name in options.names or again & {"all", campaign.verdict(rows[name])}):
            del rows[name]
    chosen = {name: campaign.open_ways(rows.get(name), ways) for name in names}
    return {name: open_ways for name, open_ways in chosen.items() if open_ways}


def run(campaign: Campaign, options: argparse.Namespace, rows: dict[str, Row], chosen: dict[str, list[str]]) -> None:
    """Run cases, and keep the row of each at once, in `rows` and in the file; print its line."""
    python = environment.python(campaign.environment) if campaign.environment else sys.executable
    worker, end = Worker(str(python), campaign.trial), time.time() + 60 * options.minutes
    for name, ways in chosen.items():
        if time.time() >= end:
            break
        row = worker.row(name, ways)
        rows[name] = joined(rows.get(name, {}), row) if campaign.ways else row
        campaign.save({**campaign.load(), name: rows[name]})
        print(campaign.line(rows[name]), flush=True)
    worker.close()


def joined(before: Row, row: Row) -> Row:
    """The row of some ways, with those that were there before."""
    return {**before, **row, "ways": {**before.get("ways", {}), **row.get("ways", {})}}


def main() -> int:
    options = _parser().parse_intermixed_args()
    campaign: Campaign = importlib.import_module(CAMPAIGNS[options.campaign]).CAMPAIGN
    if options.results:
        campaign = dataclasses.replace(campaign, results=options.results, page=lambda: None)
    rows = campaign.load()
    chosen = {} if options.report else choose(campaign, options, rows)
    print(f"{len(chosen)} of {len(campaign.cases())} to run, bnexport {bnexport.__version__}", flush=True)
    if chosen:
        run(campaign, options, rows, chosen)
    rows = campaign.load()
    print(summary(map(campaign.verdict, rows.values())))
    campaign.page()
    return int(any(campaign.verdict(rows[name]) in campaign.bad for name in chosen if name in rows))


if __name__ == "__main__":
    sys.exit(main())
