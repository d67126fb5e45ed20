"""Our proof next to onnxsim's certify, on the same pairs of files (`bench_proof --peers`).

Right folds: small patterns, ResNet-50 and the networks of `models/`, each folded by bnexport and by other tools. Wrong
folds: known mistakes of tools, and right folds with a change. ONNX Runtime says first which is which, for inputs
in [-4, 4], so that neither judge is taken at its word. Each pair comes with named sizes and with fixed ones. Fixed ones
are small where the network allows it, in certify's favour: its work grows with the elements of a tensor.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnxruntime
import torch

import bnexport
from benchmarks import fold_models, foreign_models, machine, records
from benchmarks.tools import worker
from benchmarks.tools.cases import trained
from models import branches
from models.densenet import DenseNet
from models.mobilenet import MobileNet
from models.resnet import digits_resnet
from models.segmentation import Segmenter
from models.unet import UNet
from tests.miscompilations import batch_norms
from tests.verification.changes import several

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "proof_peers.json"
TOOLS = ("onnxsim", "onnxslim", "onnxscript")
# The judges, each with the range of the inputs that it is told.
JUDGES = {"bnexport": ("bnexport", None), "certify": ("certify", None), "certify, range": ("certify", 4.0)}
SECONDS = 60
LARGEST = 4.0
# Of the largest output: at most that of a right fold, at least that of a wrong one.
SAME, DIFFERENT = 1e-4, 1e-3
IMAGE = (1, 6, 5, 5)
PATTERNS = {
    "Conv": IMAGE,
    "Conv 1-D": (1, 6, 5),
    "depthwise Conv": IMAGE,
    "ConvTranspose": (1, 6, 3, 3),
    "Gemm": (2, 6),
    "MatMul, Add": (2, 6),
    "forward into Conv": IMAGE,
    "ResNet-50": (1, 3, 112, 112),
}
NETWORKS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "models/resnet.py": (digits_resnet, (1, 1, 8, 8)),
    "models/mobilenet.py": (MobileNet, (1, 3, 32, 32)),
    "models/densenet.py": (DenseNet, (1, 3, 32, 32)),
    "models/unet.py": (UNet, (1, 3, 16, 16)),
    "models/segmentation.py": (Segmenter, (1, 3, 32, 32)),
    "models/branches.py": (lambda: branches.BranchNet(branches.repvgg_block, 8, ((8, 2),)), (1, 3, 32, 32)),
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A model and what became of it. shape: of the first input, where its sizes are fixed; sizes: "named" or "fixed"."""

    name: str
    sizes: str
    maker: str
    right: bool
    shape: tuple[int, ...]
    original: Path
    other: Path


def sized(model: onnx.ModelProto, shape: tuple[int, ...], sizes: str) -> onnx.ModelProto:
    """Returns the model with these sizes of every input of that rank, or with names for all but the channels."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for value in copy.graph.input:
        dims = value.type.tensor_type.shape.dim
        for axis, (dim, size) in enumerate(zip(dims, shape, strict=True)):
            if axis != 1 and sizes == "named":
                dim.dim_param = "NCHW"[axis]
            else:
                dim.dim_value = size
    del copy.graph.value_info[:]
    for value in copy.graph.output:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"{value.name}_{axis}"
    return copy


def exported(build: Callable[[], torch.nn.Module], shape: tuple[int, ...], sizes: str, path: Path) -> onnx.ModelProto:
    """Exports a network with its batch norms as they are."""
    torch.manual_seed(0)
    network, preserve = bnexport.revert_sync_batchnorm(trained(build())), torch.onnx.TrainingMode.PRESERVE
    axes = {"dynamic_axes": {"x": {0: "N"}}} if sizes == "named" else {}
    inputs = (torch.zeros(shape),)
    torch.onnx.export(
        network, inputs, str(path), dynamo=False, training=preserve, input_names=["x"], opset_version=18, **axes
    )
    return onnx.load(path)


def right_folds(python: str, folder: Path) -> Iterator[Pair]:
    """Yields every fold of every tool that removed a batch norm."""
    patterns = foreign_models.patterns()
    chains = folder / "chain"
    fold_models.pairs(2, 4, chains, external=False)
    patterns["Conv, Relu, twice"] = onnx.load(chains)
    sources: dict[Path, tuple[str, str, tuple[int, ...]]] = {}
    for sizes in ("named", "fixed"):
        for name, shape in {**PATTERNS, "Conv, Relu, twice": (1, 4, 12, 12)}.items():
            path = folder / f"{len(sources):02}.onnx"
            onnx.save(sized(patterns[name], shape, sizes), path)
            sources[path] = name, sizes, shape
        for name, (build, shape) in NETWORKS.items():
            path = folder / f"{len(sources):02}.onnx"
            exported(build, shape, sizes, path)
            sources[path] = name, sizes, shape
    for tool in ("bnexport", *TOOLS):
        command = [sys.executable if tool == "bnexport" else python, worker.__file__, tool, str(folder)]
        quiet = {**os.environ, "ONNXSIM_CERTIFY": "0"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=quiet)
        for stem, result in json.loads(done.stdout)["cases"].items():
            path = folder / f"{stem}.onnx"
            name, sizes, shape = sources[path]
            if result.get("left", 1) < result.get("before", 0):
                yield Pair(name, sizes, tool, True, shape, path, path.with_suffix(f".{tool}.onnx"))


def wrong_folds(folder: Path) -> Iterator[Pair]:
    """Yields known mistakes of tools and changed folds; some of them mean the same, or do not run."""
    numbers = itertools.count()

    def saved(model: onnx.ModelProto) -> Path:
        path = folder / f"wrong.{next(numbers)}"
        onnx.save(model, path)
        return path

    for sizes in ("named", "fixed"):
        for mistake in batch_norms.MISTAKES:
            if mistake.runs and mistake.verdict == "failed":
                original, wrong = mistake.model("original"), mistake.model("wrong")
                _, *dims = original.graph.input[0].type.tensor_type.shape.dim
                shape = (1, *(dim.dim_value for dim in dims))
                paths = [saved(batch_sized(model, sizes)) for model in (original, wrong)]
                yield Pair(f"mistake: {mistake.name}", sizes, mistake.source, False, shape, *paths)
        for name in ("Conv", "Gemm", "forward into Conv"):
            original = sized(foreign_models.patterns()[name], PATTERNS[name], sizes)
            path = saved(original)
            bnexport.fold(original, folder / "folded", verify=False)
            changes = several(onnx.load(folder / "folded"), np.random.default_rng(0), 40)
            for kind, change, wrong in changes:
                yield Pair(f"{kind} of {name}: {change}", sizes, "bnexport", False, PATTERNS[name], path, saved(wrong))


def batch_sized(model: onnx.ModelProto, sizes: str) -> onnx.ModelProto:
    """Returns the model as it is, or for batches of one."""
    if sizes == "fixed":
        for value in (*model.graph.input, *model.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param == "N":
                    dim.dim_value = 1
    return model


def difference(pair: Pair) -> float | None:
    """Returns the largest difference of the outputs in ONNX Runtime, of the largest value; None where one does not run."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    generator = np.random.default_rng(0)
    worst = 0.0
    try:
        sessions = [
            onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            for path in (pair.original, pair.other)
        ]
        for scale in (LARGEST, LARGEST / 16):
            feeds = {}
            for value in sessions[0].get_inputs():
                shape = [
                    dim if isinstance(dim, int) else size + (axis == 0)
                    for axis, (dim, size) in enumerate(zip(value.shape, pair.shape, strict=True))
                ]
                feeds[value.name] = generator.uniform(-scale, scale, shape).astype(np.float32)
            for one, two in zip(*(session.run(None, feeds) for session in sessions), strict=True):
                if one.shape != two.shape or not np.isfinite(two).all():
                    return float("inf")
                largest = np.abs(one).max(initial=1e-30)
                worst = max(worst, float(np.abs(one.astype(np.float64) - two).max(initial=0.0) / largest))
    except Exception:  # ONNX Runtime has no common class for what it refuses
        return None
    return worst


def told_apart(pairs: Iterator[Pair]) -> tuple[list[tuple[Pair, float]], int]:
    """Returns the pairs that ONNX Runtime calls right or wrong, with their differences, and the number of the others.

    A tool's fold that is wrong counts as one; a change that means the same, or does not run, counts as nothing.
    """
    found, dropped = [], 0
    for pair in pairs:
        error = difference(pair)
        if error is not None and (error >= DIFFERENT or (pair.right and error <= SAME)):
            found.append((dataclasses.replace(pair, right=error <= SAME), error))
        else:
            dropped += 1
    return found, dropped


def ask(judge: str, python: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the verdicts of a judge, which has one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable if judge == "bnexport" else python, "-m", "benchmarks.tools.judge", judge]
    lines = "\n".join(map(json.dumps, requests))
    done = subprocess.run(
        command, input=lines, stdout=subprocess.PIPE, text=True, check=True, env=environment, cwd=ROOT
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def measure(python: str, processes: int) -> dict[str, Any]:
    """Asks each judge about each pair. python: of an environment with onnxsim, z3-solver and the tools."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        pairs, dropped = told_apart(itertools.chain(right_folds(python, folder), wrong_folds(folder)))
        rows: list[dict[str, Any]] = []
        for pair, error in pairs:
            row = {"name": pair.name, "sizes": pair.sizes, "maker": pair.maker, "right": pair.right}
            rows.append({**row, "difference": min(error, 1e30), "verdicts": {}})
        with concurrent.futures.ThreadPoolExecutor(processes) as pool:
            asked = []
            for column, (judge, largest) in JUDGES.items():
                for first in range(processes):
                    requests = [
                        {"original": str(pair.original), "other": str(pair.other), "range": largest, "seconds": SECONDS}
                        for pair, _ in pairs[first::processes]
                    ]
                    asked.append((column, rows[first::processes], pool.submit(ask, judge, python, requests)))
            for column, own, verdicts in asked:
                for row, verdict in zip(own, verdicts.result(), strict=True):
                    row["verdicts"][column] = verdict
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    packages = [*TOOLS, "z3-solver"]
    done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True)
    limits = {"seconds": SECONDS, "range": LARGEST, "dropped": dropped}
    return {"machine": machine.describe(), "versions": json.loads(done.stdout), **limits, "rows": rows}


def main(python: str, processes: int) -> None:
    report = measure(python, processes)
    records.write(RESULT, report)
