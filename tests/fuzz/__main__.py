"""python -m tests.fuzz [--time SECONDS] [--target models|nodes] [--driver plain|atheris] [--replay FILE]

Runs every target with every driver, prints a table, and ends with 1 where something was found. atheris (the
extra `fuzz`) is used where it is installed; the plain driver needs nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.fuzz import plain
from tests.fuzz.targets import TARGETS, work_folder

ROOT = Path(__file__).parents[2]


def main() -> int:
    arguments = _arguments()
    if arguments.replay is not None:
        target = TARGETS[arguments.target or arguments.replay.name.split("-")[0]]
        target.prepare()
        with work_folder() as work:
            print("accepted" if target.run(arguments.replay.read_bytes(), work) else "refused")
        return 0
    names = [arguments.target] if arguments.target else list(TARGETS)
    there = importlib.util.find_spec("atheris") is not None
    drivers = [arguments.driver] if arguments.driver else ["plain", *(["atheris"] if there else [])]
    share = arguments.time / (len(names) * len(drivers))
    rows, findings = [], 0
    for name in names:
        for driver in drivers:
            run = _atheris if driver == "atheris" else _plain
            outcome = run(name, share, arguments.seed, arguments.folder)
            findings += len(outcome.findings)
            rows.append((name, driver, outcome))
    print(f"{'target':8} {'driver':8} {'inputs':>9} {'accepted':>9} {'seconds':>8} {'a second':>9} {'findings':>9}")
    for name, driver, outcome in rows:
        accepted = str(outcome.accepted) if driver == "plain" else ""
        print(
            f"{name:8} {driver:8} {outcome.inputs:9} {accepted:>9} {outcome.seconds:8.1f}"
            f" {outcome.inputs / outcome.seconds:9.1f} {len(outcome.findings):9}"
        )
    return 1 if findings else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--time", type=float, default=600.0, help="seconds for all targets together")
    parser.add_argument("--target", choices=list(TARGETS))
    parser.add_argument("--driver", choices=["plain", "atheris"])
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "fuzz", help="where findings are saved")
    parser.add_argument("--replay", type=Path, help="one saved input instead")
    return parser.parse_args()


def _plain(name: str, seconds: float, seed: int, folder: Path) -> plain.Outcome:
    return plain.run(TARGETS[name], seconds, seed, folder)


def _atheris(name: str, seconds: float, seed: int, folder: Path) -> plain.Outcome:
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz.coverage_guided"),
            *(name, str(max(1, int(seconds))), str(seed % 2**31), str(folder)),
        ],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        cwd=ROOT,
    )
    outcome = plain.Outcome(seconds=time.monotonic() - start)
    count = re.search(r"number_of_executed_units:\s*([0-9]+)", done.stderr)
    outcome.inputs = int(count.group(1)) if count else 0
    if done.returncode or count is None:
        saved = re.findall(r"Test unit written to (\S+)", done.stderr)
        print(f"FINDING {name}: atheris ended with {done.returncode}: {saved}\n{done.stderr[-4000:]}", flush=True)
        outcome.findings[f"exit code {done.returncode}"] = saved[0] if saved else ""
    return outcome


if __name__ == "__main__":
    sys.exit(main())
