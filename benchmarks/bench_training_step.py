"""One training step, optimizer included: ours in ONNX Runtime against torch and ONNX Runtime's training build.

    python -m benchmarks.bench_training_step [--training-build FOLDER] [--json PATH] [--only NAME] [--threads N]

ResNet-18 and MobileNetV2 with AdamW, on random images. Engines: torch eager and torch.compile with
nn.BatchNorm2d; ours with the library's kernels, and of standard operators only; and the last training build of
ONNX Runtime, where FOLDER names it:

    pip install --target FOLDER onnxruntime-training-cpu==1.19.2 onnx==1.16.2 'numpy<2' 'protobuf<5' cerberus h5py 'ml_dtypes<0.5'

Each engine has a process of its own and they take turns, some steps at a time; the figure is the median of all
steps, and the ratio that to torch eager of the same run. Verified first: all engines start from the same
weights and must agree about the losses of the first steps. Memory is the process's peak beyond its state
before the model was made. Floor: what ONNX Runtime's profile says the convolutions and matrix products
of our step take.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, page, records

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "training_step.json"
LEARNING_RATE, WEIGHT_DECAY, CLASSES = 1e-3, 1e-2, 10
# name: (network, batch, size)
NETWORKS: dict[str, tuple[str, int, int]] = {
    "ResNet-18, width 16, 8 x 64 x 64": ("resnet18-16", 8, 64),
    "ResNet-18, width 64, 4 x 112 x 112": ("resnet18-64", 4, 112),
    "MobileNetV2, 8 x 96 x 96": ("mobilenet-v2", 8, 96),
}
ENGINES = ("torch eager", "torch compile", "ours", "ours, standard operators", "ORT training 1.19.2")
VERIFIED_STEPS = 3
MATRIX_WORK = {
    "Conv",
    "ConvInputGrad",
    "ConvWeightGrad",
    "ConvTranspose",
    "Gemm",
    "MatMul",
    "FusedMatMul",
    "FusedConv",
    "FusedGemm",
}


def make_network(name: str) -> Any:
    import torch

    from models import deep_resnet, mobilenet

    torch.manual_seed(0)
    if name.startswith("resnet18"):
        return deep_resnet.resnet18(width=int(name.rpartition("-")[2]), classes=CLASSES).train()
    return mobilenet.MobileNetV2(classes=CLASSES).train()


def make_batch(batch: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(batch, 3, size, size)).astype(np.float32), rng.integers(0, CLASSES, batch)


def peak_memory() -> int:
    """Bytes, from the kernel."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def reset_peak_memory() -> int:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return peak_memory()


def torch_engine(network: str, arrays: tuple[np.ndarray, np.ndarray], compiled: bool) -> Callable[[], float]:
    import torch

    model = make_network(network)
    called = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    images, labels = (torch.from_numpy(array) for array in arrays)

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(called(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def our_engine(path: Path, arrays: tuple[np.ndarray, np.ndarray], threads: int) -> Callable[[], float]:
    import onnxruntime

    from bnexport.training.session import TrainingSession

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = TrainingSession(path, session_options=options)
    return lambda: session.step(arrays)


def training_build_engine(path: Path, arrays: tuple[np.ndarray, np.ndarray], threads: int) -> Callable[[], float]:
    import onnx
    import onnxruntime
    from onnxruntime.training import api, artifacts

    model = onnx.load(str(path))
    names = [tensor.name for tensor in model.graph.initializer]
    frozen = [name for name in names if "running_" in name]
    folder = tempfile.mkdtemp(dir=path.parent)
    artifacts.generate_artifacts(
        model,
        requires_grad=[name for name in names if name not in frozen and "num_batches" not in name],
        frozen_params=frozen,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    state = api.CheckpointState.load_checkpoint(f"{folder}/checkpoint")
    module = api.Module(f"{folder}/training_model.onnx", state, session_options=options)
    optimizer = api.Optimizer(f"{folder}/optimizer_model.onnx", module)
    optimizer.set_learning_rate(LEARNING_RATE)
    module.train()

    def step() -> float:
        loss = float(module(*arrays))
        optimizer.step()
        module.lazy_reset_grad()
        return loss

    return step


def work(engine: str, network: str, batch: int, size: int, folder: Path, threads: int) -> None:
    """A worker: for each line "n" on stdin, n steps, and one line of JSON on stdout."""
    # What libraries print goes to stderr, so that stdout holds the answers only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    arrays = make_batch(batch, size)
    if engine.startswith("torch"):
        import torch

        torch.set_num_threads(threads)
        torch.zeros(1).add(1)
        before = reset_peak_memory()
        step = torch_engine(network, arrays, engine == "torch compile")
    elif engine.startswith("ours"):
        import onnxruntime  # noqa: F401

        from bnexport.training.session import TrainingSession  # noqa: F401

        before = reset_peak_memory()
        name = "standard" if "standard" in engine else "step"
        step = our_engine(folder / f"{name}.onnx", arrays, threads)
    else:
        from onnxruntime.training import api, artifacts  # noqa: F401

        before = reset_peak_memory()
        step = training_build_engine(folder / "forward.onnx", arrays, threads)
    losses = [step() for _ in range(VERIFIED_STEPS)]
    reset_peak_memory()
    answers.write(json.dumps({"losses": losses}) + "\n")
    answers.flush()
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        machine.rest()  # before another engine has its turn
        answers.write(
            json.dumps({"seconds": seconds, "peak_bytes": peak_memory(), "bytes": peak_memory() - before}) + "\n"
        )
        answers.flush()


class Worker:
    def __init__(self, engine: str, arguments: list[str], environment: dict[str, str]) -> None:
        self.engine = engine
        self.seconds: list[float] = []
        self.last: dict[str, Any] = {}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bench_training_step", "--worker", engine, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, errors = self.process.communicate()
            raise SystemExit(f"{self.engine}: stopped: {errors.strip()[-2000:]}")
        return json.loads(line)

    def run(self, steps: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        self.last = self.answer()
        self.seconds += self.last["seconds"]

    def close(self) -> None:
        self.process.communicate()


def export(network: str, arrays: tuple[np.ndarray, np.ndarray], folder: Path, build: bool) -> None:
    import torch

    import bnexport

    tensors = tuple(torch.from_numpy(array) for array in arrays)
    for name, standard in (("step", False), ("standard", True)):
        bnexport.export_training_step(
            make_network(network),
            torch.nn.functional.cross_entropy,
            tensors,
            folder / f"{name}.onnx",
            overwrite=True,
            optimizer="adamw",
            optimizer_options={"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY},
            standard_ops_only=standard,
        )
    if build:
        warnings.filterwarnings("ignore", message="ONNX Preprocess")
        torch.onnx.export(
            make_network(network),
            (tensors[0],),
            str(folder / "forward.onnx"),
            dynamo=False,
            opset_version=15,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            input_names=["input"],
            output_names=["output"],
        )


def floor(path: Path, arrays: tuple[np.ndarray, np.ndarray], threads: int, steps: int = 20) -> dict[str, float]:
    """Seconds of a step by kind of node, from ONNX Runtime's profile."""
    import onnxruntime

    from bnexport.training.session import TrainingSession

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_profiling = True
    options.profile_file_prefix = str(path.with_suffix(""))
    session = TrainingSession(path, session_options=options)
    for _ in range(steps):
        session.step(arrays)
    events = json.loads(Path(session._steps.session.end_profiling()).read_text())
    durations: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            durations.setdefault(event["name"], []).append(event["dur"] * 1e-6)
    kinds = {event["name"]: event["args"]["op_name"] for event in events if event.get("cat") == "Node"}
    result: dict[str, float] = {}
    for name, values in durations.items():
        result[kinds[name]] = result.get(kinds[name], 0.0) + float(np.median(values))
    return dict(sorted(result.items(), key=lambda item: -item[1]))


def measure(title: str, threads: int, rounds: int, build: str | None, exports: Path | None) -> dict[str, Any]:
    network, batch, size = NETWORKS[title]
    arrays = make_batch(batch, size)
    with contextlib.ExitStack() as stack:
        folder = exports / network if exports is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not (folder / "step.onnx").exists():
            print(f"{title}: exporting", file=sys.stderr, flush=True)
            folder.mkdir(parents=True, exist_ok=True)
            export(network, arrays, folder, build is not None)
        workers = []
        # torch.compile's kernels of a run with another instruction set end the process that finds them in its cache.
        cache = stack.enter_context(tempfile.TemporaryDirectory())
        for engine in ENGINES:
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
            if engine.startswith("ORT"):
                if build is None:
                    continue
                environment["PYTHONPATH"] = build
            arguments = ["--network", network, "--batch", str(batch), "--size", str(size)]
            arguments += ["--folder", str(folder), "--threads", str(threads)]
            workers.append(Worker(engine, arguments, environment))
        try:
            losses = {worker.engine: worker.answer()["losses"] for worker in workers}
            expected = losses["torch eager"]
            for engine, own in losses.items():
                # Adam's first updates are the gradients' signs, and rounding decides some: engines drift apart.
                if not (np.isclose(own[0], expected[0], rtol=1e-5) and np.allclose(own, expected, 2e-2, 2e-2)):
                    raise SystemExit(f"{title}: {engine}: losses {own}, torch eager {expected}; nothing was timed")
            for index in range(rounds):
                print(f"{title}: round {index + 1} of {rounds}", file=sys.stderr, flush=True)
                for worker in workers:
                    worker.run(5)
        finally:
            for worker in workers:
                worker.close()
        profile = floor(folder / "step.onnx", arrays, threads)
    eager = float(np.median(workers[0].seconds))
    return {
        "network": title,
        "losses": losses,
        "engines": {
            worker.engine: {
                "median_ms": float(np.median(worker.seconds)) * 1e3,
                "best_ms": min(worker.seconds) * 1e3,
                "ratio_to_eager": float(np.median(worker.seconds)) / eager,
                "best_ratio_to_eager": min(worker.seconds) / min(workers[0].seconds),
                "step_memory_mb": worker.last["bytes"] / 2**20,
                "peak_memory_mb": worker.last["peak_bytes"] / 2**20,
            }
            for worker in workers
        },
        "profile_ms": {kind: seconds * 1e3 for kind, seconds in profile.items()},
        "floor_ms": sum(seconds for kind, seconds in profile.items() if kind in MATRIX_WORK) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training-build", metavar="FOLDER")
    parser.add_argument("--json", type=Path, help="instead of benchmarks/results/training_step.json, ..._avx2.json")
    machine.add_isa_option(parser)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--exports", type=Path, metavar="FOLDER", help="keep the exported graphs there, and reuse them")
    parser.add_argument("--only", metavar="NAME", help="networks whose name contains this")
    for name in ("worker", "network", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(
            arguments.worker,
            arguments.network,
            arguments.batch,
            arguments.size,
            Path(arguments.folder),
            arguments.threads,
        )
        return
    machine.limit(arguments.isa)
    if arguments.json is None:
        arguments.json = machine.result_of(RESULT, arguments.isa)
    chosen = [name for name in NETWORKS if not arguments.only or arguments.only.lower() in name.lower()]
    results = [
        measure(name, arguments.threads, arguments.rounds, arguments.training_build, arguments.exports)
        for name in chosen
    ]
    report = {"machine": machine.describe(), "threads": arguments.threads, "results": results}
    print(page.training_step(report))
    records.write(arguments.json, report)


if __name__ == "__main__":
    main()
