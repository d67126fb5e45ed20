"""Data-parallel steps in ONNX Runtime: two processes on this machine against one, one thread in each.

    python -m benchmarks.bench_parallel_training [--json PATH] [--rounds N]

ResNet-18 of width 16, 64 x 64, AdamW; the joint batch is halved over gloo. One process and two take turns, and the
figure is the median of all steps. Verified first: both must agree about the joint loss.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, records
from benchmarks.bench_training_step import CLASSES, ROOT, export, make_batch

RESULT = ROOT / "benchmarks" / "results" / "parallel_training.json"
BATCHES, SIZE = (16, 64, 128), 64


def work(rank: int, size: int, folder: Path) -> None:
    """For each line "batch steps" on stdin: the loss and the seconds of the steps, as JSON on stdout."""
    import onnxruntime
    import torch
    import torch.distributed as dist

    from bnexport.training.session import TrainingSession

    torch.set_num_threads(1)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if size > 1:
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    group = dist.group.WORLD if size > 1 else None
    session = TrainingSession(folder / "step.onnx", session_options=options, group=group)
    initial = session.state_dict()
    for line in sys.stdin:
        batch, steps = map(int, line.split())
        images, labels = make_batch(batch, SIZE)
        rows = slice(rank * batch // size, (rank + 1) * batch // size)
        arrays = images[rows], labels[rows]
        session.load_state_dict(initial)
        loss, seconds = session.step(arrays), []
        for _ in range(steps):
            start = time.perf_counter()
            session.step(arrays)
            seconds.append(time.perf_counter() - start)
        print(json.dumps({"loss": loss, "seconds": seconds}), flush=True)


def start(rank: int, size: int, folder: Path) -> subprocess.Popen[str]:
    arguments = ["--rank", str(rank), "--size", str(size), "--folder", str(folder)]
    command = [sys.executable, "-m", "benchmarks.bench_parallel_training", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def run(processes: list[subprocess.Popen[str]], batch: int, steps: int) -> dict[str, Any]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{batch} {steps}\n")
        process.stdin.flush()
    answers = []
    for process in processes:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("a process ended; what it said is above")
        answers.append(json.loads(line))
    return answers[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        work(arguments.rank, arguments.size, arguments.folder)
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export("resnet18-16", make_batch(8, SIZE), folder, build=False)
        alone, together = [start(0, 1, folder)], [start(rank, 2, folder) for rank in range(2)]
        try:
            for batch in BATCHES:
                seconds: dict[int, list[float]] = {1: [], 2: []}
                for _ in range(arguments.rounds):
                    one, two = run(alone, batch, 5), run(together, batch, 5)
                    if not np.isclose(one["loss"], two["loss"], rtol=1e-5):
                        raise SystemExit(f"batch {batch}: losses {one['loss']} and {two['loss']}; nothing was timed")
                    seconds[1] += one["seconds"]
                    seconds[2] += two["seconds"]
                medians = {count: float(np.median(values)) * 1e3 for count, values in seconds.items()}
                rows.append(
                    {"batch": batch, "one_ms": medians[1], "two_ms": medians[2], "ratio": medians[2] / medians[1]}
                )
                print(
                    f"batch {batch}: one {medians[1]:.1f} ms, two {medians[2]:.1f} ms, {rows[-1]['ratio']:.2f}",
                    flush=True,
                )
        finally:
            for process in (*alone, *together):
                process.communicate()
    report = {"machine": machine.describe(), "classes": CLASSES, "rows": rows}
    records.write(arguments.json, report)


if __name__ == "__main__":
    main()
