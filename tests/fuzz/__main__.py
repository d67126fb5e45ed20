"""python -m tests.fuzz [--time SECONDS] [--replay FILE]

Fuzzes reading, folding and writing of models; ends with 1 where something was found. Nodes: tests/cpp/fuzz.sh.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.fuzz import plain, seeds
from tests.fuzz.targets import load_fold_save, work_folder

parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
parser.add_argument("--time", type=float, default=600.0, help="seconds")
parser.add_argument("--seed", type=int, default=int(time.time()))
parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="where findings are saved")
parser.add_argument("--replay", type=Path, help="one saved input instead")
arguments = parser.parse_args()
if arguments.replay is not None:
    with work_folder() as work:
        print("accepted" if load_fold_save(arguments.replay.read_bytes(), work) else "refused")
else:
    models = [data for _, data in seeds.models()]
    outcome = plain.run(load_fold_save, models, arguments.time, arguments.seed, arguments.folder)
    print(f"{outcome.inputs} inputs, {outcome.accepted} accepted, {len(outcome.findings)} findings")
    sys.exit(int(bool(outcome.findings)))
