"""Time of an export against plain torch.onnx.export, with dynamic sizes, on ten networks.

    python -m benchmarks.bench_export [NETWORK ...] [--rounds 3] [--json PATH]

Processor time on one thread, which what else the machine does hardly changes; the candidates run in turn, after one
export of a small network. ours: `export(..., verify=False)`, folded and simplified; verified: with `verify=True`;
tracer: the same as ours with exporter="torchscript". The ratios are those of the least times. Networks that are not asked
for keep their results.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

import bnexport
from benchmarks import machine, records
from models.branches import BranchNet, asymmetric_block, mobileone_s0, repvgg_a0
from models.deep_resnet import resnet18, resnet50
from models.densenet import DenseNet
from models.mobilenet import MobileNet, MobileNetV2
from models.segmentation import Segmenter
from models.unet import UNet

RESULT = Path(__file__).parent / "results" / "export.json"
IMAGE = (2, 3, 64, 64)
# A network counts for the median where plain torch.onnx.export takes this many seconds.
LEAST = 3.0

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-18": resnet18,
    "ResNet-50": resnet50,
    "MobileNetV2": MobileNetV2,
    "MobileNetV3, blocks": lambda: MobileNet(version=3),
    "DenseNet, 2 x 12": lambda: DenseNet(growth=16, depths=(12, 12)),
    "RepVGG-A0": repvgg_a0,
    "MobileOne-S0": mobileone_s0,
    "ACNet, 12 blocks": lambda: BranchNet(asymmetric_block, 32, ((32, 4), (64, 4), (128, 4))),
    "U-Net": lambda: UNet(width=16, depth=4),
    "PSP head": lambda: Segmenter(norm=nn.BatchNorm2d),
}


def plain(model: nn.Module, x: torch.Tensor, path: Path) -> None:
    dimensions = {0: "batch", 2: "height", 3: "width"}
    torch.onnx.export(
        model,
        (x,),
        path,
        dynamo=True,
        dynamic_shapes=(dimensions,),
        opset_version=18,
        external_data=False,
        verbose=False,
    )


def ours(model: nn.Module, x: torch.Tensor, path: Path, **options: Any) -> None:
    bnexport.export(model, x, path, **{"verify": False, "overwrite": True, **options})


CANDIDATES: dict[str, Callable[[nn.Module, torch.Tensor, Path], None]] = {
    "plain": plain,
    "ours": ours,
    "verified": lambda model, x, path: ours(model, x, path, verify=True),
    "tracer": lambda model, x, path: ours(model, x, path, exporter="torchscript"),
}


def measure(build: Callable[[], nn.Module], rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(IMAGE)
    seconds: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    nodes = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for name, run in CANDIDATES.items():
                path = Path(folder) / f"{name}.onnx"
                start = os.times()
                with contextlib.redirect_stdout(io.StringIO()):
                    run(model, x, path)
                end = os.times()
                seconds[name].append(end.user + end.system - start.user - start.system)
                nodes[name] = len(onnx.load(path, load_external_data=False).graph.node)
    least = {name: round(min(values), 3) for name, values in seconds.items()}
    return {
        "seconds": least,
        "ratio": round(least["ours"] / least["plain"], 3),
        "rounds": rounds,
        "nodes": {name: nodes[name] for name in ("plain", "ours")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NETWORK", help=", ".join(NETWORKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NETWORKS):
        parser.error(f"got {', '.join(sorted(unknown))}, expected some of {', '.join(NETWORKS)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = json.loads(arguments.json.read_text())["rows"] if arguments.json.exists() else {}
    measure(lambda: DenseNet(depths=(1, 1)), 1)
    for name in arguments.names or NETWORKS:
        start = time.monotonic()
        rows[name] = measure(NETWORKS[name], arguments.rounds)
        print(f"{name}: {rows[name]} ({time.monotonic() - start:.0f} s)", flush=True)
        records.write(arguments.json, report(rows))


def report(rows: dict[str, Any]) -> dict[str, Any]:
    """The result: rows in the order of the networks, and the medians of their ratios."""
    rows = {name: rows[name] for name in NETWORKS if name in rows}
    long = [row["ratio"] for row in rows.values() if row["seconds"]["plain"] >= LEAST]
    return {
        "machine": machine.describe(),
        "image": list(IMAGE),
        "least_seconds": LEAST,
        "median_ratio": round(statistics.median(long), 3) if long else None,
        "median_ratio_of_all": round(statistics.median(row["ratio"] for row in rows.values()), 3),
        "rows": rows,
    }


if __name__ == "__main__":
    main()
