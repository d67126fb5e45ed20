"""Runs the zoo: python -m tests.zoo [--workers N] [--minutes M] [--only TEXT] [--again VERDICT|all].

Each model runs in a process of its own; its result goes into the results at once, so that a run that was stopped goes
on where it was. Needs an environment with the libraries (`make test-zoo` makes one).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bnexport
from bnexport.native import library
from tests.frameworks import environment
from tests.zoo import catalogue, verdicts

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.json")


class Worker:
    """A process that runs trials, started when it gets the first one."""

    def __init__(self, python: str) -> None:
        self.command = [python, "-m", "tests.zoo.worker"]
        self.process: subprocess.Popen[str] | None = None

    def trial(self, entry: catalogue.Entry, ways: list[str]) -> dict[str, Any]:
        """The result of one model, as far as it came."""
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=_variables(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        begin = time.time()
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder, "result.json")
            self.process.stdin.write(f"{entry.name}\t{place}\t{','.join(ways)}\n")
            self.process.stdin.flush()
            code = self.process.stdout.readline().strip()
            if not code:
                self.process.wait()
            result: dict[str, Any] = (
                json.loads(place.read_text()) if place.exists() else {"name": entry.name, "ways": {}}
            )
            if code != "0":
                log = place.with_suffix(".log")
                said = log.read_text(errors="replace").strip()[-800:] if log.exists() else ""
                result["died"] = f"{code or 'worker ended'}: {said}"
        return result | {"wall_seconds": round(time.time() - begin, 1)}

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()


def _variables() -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "YOLO_OFFLINE": "true", "PYTHONWARNINGS": "ignore"}
    ours = {library.ENVIRONMENT_VARIABLE: str(library.get_library_path())}
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **offline, **ours}


def _cost(entry: catalogue.Entry, results: dict[str, Any]) -> tuple[bool, bool, float]:
    """What comes first: small models, begun ones, and of these the ones whose ways so far took the least time."""
    ways = results.get(entry.name, {"ways": {}})["ways"].values()
    return catalogue.is_large(entry), not ways, sum(way.get("total_seconds", 0.0) for way in ways)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--only", default="", help="a regular expression; names in which it is found")
    parser.add_argument("--again", default="", help="verdicts to run again, such as wrong,refused, or all")
    parser.add_argument(
        "--ways", default=",".join((*verdicts.WAYS, *verdicts.PLAIN)), help="ways to go, all by default"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--python", help="an interpreter that has the libraries, instead of build/frameworks")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {}
    chosen = [entry for entry in catalogue.entries() if re.search(options.only, entry.name)]
    again = set(options.again.split(",")) - {""}
    for entry in chosen:
        if entry.name in results and again & {"all", verdicts.of_model(results[entry.name])}:
            del results[entry.name]
    fresh: dict[str, Any] = {"ways": {}}
    waiting = [
        (entry, ways)
        for entry in chosen
        if (
            ways := [name for name in options.ways.split(",") if verdicts.is_open(results.get(entry.name, fresh), name)]
        )
    ]
    waiting.sort(key=lambda each: _cost(each[0], results))
    python = options.python or str(environment.python())
    end, lock = time.time() + 60 * options.minutes, threading.Lock()
    print(f"{len(waiting)} of {len(catalogue.entries())} to run, bnexport {bnexport.__version__}", flush=True)

    def run(waiting: Iterator[tuple[catalogue.Entry, list[str]]]) -> None:
        worker = Worker(python)
        while time.time() < end:
            with lock:
                following = next(waiting, None)
            if following is None:
                break
            record(worker.trial(*following))
        worker.close()

    def record(result: dict[str, Any]) -> None:
        with lock:
            ways = results.get(result["name"], fresh)["ways"] | result["ways"]
            results[result["name"]] = result = result | {"ways": ways}
            staged = options.results.with_suffix(".new")
            staged.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
            staged.replace(options.results)
            print(verdicts.line(result), flush=True)

    queue = iter(waiting)
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(run, [queue] * options.workers))


if __name__ == "__main__":
    main()
