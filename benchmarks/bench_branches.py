"""What merging parallel branches buys at run time: one file folded with and without it, in ONNX Runtime.

    python -m benchmarks.bench_branches [--rounds 12] [--json PATH]

Networks of the widths and depths of RepVGG-A0 and MobileOne-S0 with random weights, images of 224 x 224, two threads,
default optimisations. Both files are compared first; their sessions then run in turn. The ratio is that of the
medians of one run, next to that of the least times.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import nn

import bnexport
from benchmarks import machine, records
from bnexport import tolerances
from models import branches

NETWORKS = {"RepVGG-A0": branches.repvgg_a0, "MobileOne-S0": branches.mobileone_s0}
THREADS, RUNS, WARM_UP = 2, 4, 2


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def measure(name: str, net: nn.Module, folder: Path, rounds: int) -> dict[str, Any]:
    x = torch.randn(1, 3, 224, 224)
    source = folder / "source.onnx"
    bnexport.export(net, x, source, exporter="torchscript", fold=False, verify=False, overwrite=True)
    reports = {
        "apart": bnexport.fold(source, folder / "apart.onnx", skip=["parallel"], verify=False).report,
        "merged": bnexport.fold(source, folder / "merged.onnx", verify=False).report,
    }
    sessions = {kind: session(folder / f"{kind}.onnx") for kind in reports}
    feeds = {sessions["merged"].get_inputs()[0].name: x.numpy()}
    apart, merged = (sessions[kind].run(None, feeds)[0] for kind in ("apart", "merged"))
    bound = tolerances.model("float32", apart)
    difference = float(np.abs(apart - merged).max())
    if difference > bound.atol:
        raise SystemExit(f"{name}: the files differ by {difference:.3g}, the bound is {bound}")
    seconds: dict[str, list[float]] = {kind: [] for kind in sessions}
    for _ in range(rounds):
        for kind, each in sessions.items():
            for step in range(WARM_UP + RUNS):
                start = time.perf_counter()
                each.run(None, feeds)
                if step >= WARM_UP:
                    seconds[kind].append(time.perf_counter() - start)
    row: dict[str, Any] = {"network": name, "batch_norms": reports["merged"].before.batch_norm}
    for kind, report in reports.items():
        row[kind] = {
            "nodes": report.after.nodes,
            "batch_norms": report.after.batch_norm,
            "megabytes": (folder / f"{kind}.onnx").stat().st_size / 1e6,
            "median_ms": statistics.median(seconds[kind]) * 1e3,
            "least_ms": min(seconds[kind]) * 1e3,
        }
    row["ratio"] = row["merged"]["median_ms"] / row["apart"]["median_ms"]
    row["best_ratio"] = row["merged"]["least_ms"] / row["apart"]["least_ms"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/branches.json"))
    arguments = parser.parse_args()
    rows = []
    for name, make in NETWORKS.items():
        torch.manual_seed(0)
        net = branches.randomise_statistics(make()).eval()
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(name, net, Path(folder), arguments.rounds))
        print(
            f"{name:13} apart {rows[-1]['apart']['median_ms']:6.1f} ms  merged {rows[-1]['merged']['median_ms']:6.1f} ms"
            f"  x {rows[-1]['ratio']:.2f} (least {rows[-1]['best_ratio']:.2f})"
        )
    report = {"machine": machine.describe(), "threads": THREADS, "rows": rows}
    records.write(arguments.json, report)


if __name__ == "__main__":
    main()
