"""Runs the trials of a zoo in worker processes, and keeps each result as soon as it is there.

A run that was stopped goes on where it was. What a trial does is its module's: tests.zoo.trial exports,
tests.zoo.training.trial makes training steps.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import records
from bnexport.native import library
from tests.frameworks import environment

ROOT = Path(__file__).parents[2]
Result = dict[str, Any]


class Worker:
    """A process that runs trials of one module, started when it gets the first one."""

    def __init__(self, python: str, module: str) -> None:
        self.command = [python, "-m", "tests.zoo.worker", module]
        self.process: subprocess.Popen[str] | None = None

    def trial(self, name: str, ways: Sequence[str]) -> Result:
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
            self.process.stdin.write(f"{name}\t{place}\t{','.join(ways)}\n")
            self.process.stdin.flush()
            code = self.process.stdout.readline().strip()
            if not code:
                self.process.wait()
            result: Result = json.loads(place.read_text()) if place.exists() else {"name": name, "ways": {}}
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


def parser(description: str | None, results: Path, ways: Sequence[str]) -> argparse.ArgumentParser:
    """The options of both zoos."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--workers", type=int, default=2)
    made.add_argument("--minutes", type=float, default=1e6)
    made.add_argument("--only", default="", help="a regular expression; names in which it is found")
    made.add_argument("--again", default="", help="verdicts to run again, such as wrong,refused, or all")
    made.add_argument("--ways", default=",".join(ways), help="ways to go")
    made.add_argument("--results", type=Path, default=results)
    made.add_argument("--python", help="an interpreter that has the libraries, instead of build/frameworks")
    return made


def load(options: argparse.Namespace, chosen: Sequence[str], verdict: Callable[[Result], str]) -> dict[str, Result]:
    """The results so far, without those that run again."""
    results: dict[str, Result] = json.loads(options.results.read_text()) if options.results.exists() else {}
    again = set(options.again.split(",")) - {""}
    for name in chosen:
        if name in results and again & {"all", verdict(results[name])}:
            del results[name]
    return results


def run(
    options: argparse.Namespace,
    module: str,
    results: dict[str, Result],
    waiting: Sequence[tuple[str, Sequence[str]]],
    line: Callable[[Result], str],
) -> None:
    """Run trials of `module`, (name, ways) each, and write `results` after each of them; print its line."""
    python = options.python or str(environment.python())
    end, lock = time.time() + 60 * options.minutes, threading.Lock()

    def work(queue: Iterator[tuple[str, Sequence[str]]]) -> None:
        worker = Worker(python, module)
        while time.time() < end:
            with lock:
                following = next(queue, None)
            if following is None:
                break
            record(worker.trial(*following))
        worker.close()

    def record(result: Result) -> None:
        with lock:
            before = results.get(result["name"], {})
            results[result["name"]] = result = {
                **before,
                **result,
                "ways": {**before.get("ways", {}), **result["ways"]},
            }
            records.write(options.results, dict(sorted(results.items())))
            print(line(result), flush=True)

    shared = iter(waiting)
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(work, [shared] * options.workers))
