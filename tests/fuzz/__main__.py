"""python -m tests.fuzz [--time SECONDS] [--replay FILE]

Fuzzes reading, folding and writing of models; ends with 1 where something was found. Nodes: tests/custom_ops/test_fuzz.py and
tests/cpp/fuzz.sh.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.fuzz import plain
from tests.fuzz.targets import MODELS, work_folder

ROOT = Path(__file__).parents[2]


def main() -> int:
    arguments = _arguments()
    if arguments.replay is not None:
        MODELS.prepare()
        with work_folder() as work:
            print("accepted" if MODELS.run(arguments.replay.read_bytes(), work) else "refused")
        return 0
    outcome = plain.run(MODELS, arguments.time, arguments.seed, arguments.folder)
    print(
        f"{outcome.inputs} inputs, {outcome.accepted} accepted, {outcome.inputs / outcome.seconds:.1f} a second, "
        f"{len(outcome.findings)} findings"
    )
    return int(bool(outcome.findings))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--time", type=float, default=600.0, help="seconds")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "fuzz", help="where findings are saved")
    parser.add_argument("--replay", type=Path, help="one saved input instead")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
