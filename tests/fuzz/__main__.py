"""python -m tests.fuzz [--time SECONDS] [--target models|nodes] [--replay FILE]

Runs every target, prints a table, and ends with 1 where something was found.
"""

from __future__ import annotations

import argparse
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
    outcomes = {
        name: plain.run(TARGETS[name], arguments.time / len(names), arguments.seed, arguments.folder) for name in names
    }
    print(f"{'target':8} {'inputs':>9} {'accepted':>9} {'seconds':>8} {'a second':>9} {'findings':>9}")
    for name, outcome in outcomes.items():
        rate = outcome.inputs / outcome.seconds
        print(
            f"{name:8} {outcome.inputs:9} {outcome.accepted:9} {outcome.seconds:8.1f} {rate:9.1f} {len(outcome.findings):9}"
        )
    return int(any(outcome.findings for outcome in outcomes.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--time", type=float, default=600.0, help="seconds for all targets together")
    parser.add_argument("--target", choices=list(TARGETS))
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "fuzz", help="where findings are saved")
    parser.add_argument("--replay", type=Path, help="one saved input instead")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
