"""The main job end to end, on real data: train with sync BN, export, run in ONNX Runtime, fold, verify.

Two processes train a small ResNet with bnexport.SyncBatchNorm on scikit-learn's digits. The result
is exported in both modes, run with and without the custom-op library, folded, and compared. One
table comes out, and a picture of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib  # of the picture: missing, it is missed at once
import numpy as np
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table

import bnexport
from benchmarks import machine
from bnexport import model_io
from models.digits import Digits, load_digits
from models.resnet import digits_resnet
from models.training import train

ACCURACY_AT_LEAST = 0.97
DIFFERENCE_BELOW = 1e-4
TRAINING_GRAPH_DIFFERENCE_BELOW = 1e-5
BLOCKS, WARM_UP, ROUNDS = 3, 5, 20

console = Console(highlight=False, width=110)


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    accuracy: float
    max_difference: float
    milliseconds: float
    file_bytes: int
    batch_norms: int
    same_predictions: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for models, table and picture")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=90, help="images a batch in the comparison")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed runs of each engine in a block")
    arguments = parser.parse_args()
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()

    digits = load_digits()
    checkpoint = folder / "digits.pt"
    console.print(f"training on {len(digits.train_images)} digits with 2 processes (gloo)")
    train(digits_resnet, digits, checkpoint, epochs=arguments.epochs)
    model = digits_resnet()
    model.load_state_dict(torch.load(checkpoint, weights_only=True))
    model.eval()
    threads = os.cpu_count() or 1
    torch.set_num_threads(threads)

    console.print("exporting with the node kept")
    example = torch.from_numpy(digits.test_images[: arguments.batch])
    kept, folded, deployed, training = (
        folder / f"{name}.onnx" for name in ("custom_op", "folded", "deployed", "training")
    )
    bnexport.export(model, example, kept, mode="custom_op", overwrite=True)
    console.print("folding that file")
    fold_report = bnexport.fold(kept, folded, overwrite=True).report
    console.print("exporting for deployment")
    bnexport.export(model, example, deployed, mode="deploy", overwrite=True)
    console.print("exporting the training graph")
    bnexport.export(model.train(), example, training, mode="custom_op", overwrite=True)
    model.eval()

    console.print("running the test set in every engine, timed in turn")
    rows = compare(model, digits, checkpoint, kept, folded, arguments.batch, threads, arguments.rounds)
    console.print("running the training graph")
    training_errors = compare_training_graph(model, training, example, threads)
    deployed_nodes = batch_norms_in(deployed)

    print_table(rows)
    console.print(
        "train-mode graph, output and updated statistics against torch: "
        + ", ".join(f"{engine} {error:.1e}" for engine, error in training_errors.items())
    )
    console.print(
        f"folding: {len(fold_report.folded)} folded, {len(fold_report.kept)} kept; {fold_report.verification.status}"
    )
    console.print(f"export(mode='deploy'): {deployed_nodes} batch norms left")
    picture = folder / "demo.png"
    draw(rows, picture)
    (folder / "demo.json").write_text(
        json.dumps(
            {
                "machine": machine.describe(),
                "threads": threads,
                "rows": [dataclasses.asdict(row) for row in rows],
                "training_graph": training_errors,
            },
            indent=2,
        )
        + "\n"
    )
    console.print(f"{time.perf_counter() - start:.0f} s; models, table and picture in {folder}/")
    check(rows, training_errors, deployed_nodes)


def compare(
    model: torch.nn.Module,
    digits: Digits,
    checkpoint: Path,
    kept: Path,
    folded: Path,
    batch: int,
    threads: int,
    rounds: int,
) -> list[Row]:
    """Runs the test set through every engine; times them in turn, so that they share what the machine does."""

    def torch_run(images: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(images)).numpy()

    def session_run(session: Any) -> Callable[[np.ndarray], np.ndarray]:
        return lambda images: session.run(None, {"x": images})[0]

    options = session_options(threads)
    engines = {
        "torch eager": (
            torch_run,
            checkpoint,
            sum(isinstance(module, bnexport.SyncBatchNorm) for module in model.modules()),
        ),
        "ORT, library (node kept)": (
            session_run(bnexport.InferenceSession(kept, sess_options=session_options(threads))),
            kept,
            None,
        ),
        "ORT, no library (body)": (session_run(onnxruntime.InferenceSession(kept, options)), kept, None),
        "ORT, folded": (session_run(onnxruntime.InferenceSession(folded, options)), folded, None),
    }
    images, labels = digits.test_images, digits.test_labels
    batches = [images[start : start + batch] for start in range(0, len(images), batch)]
    outputs = {name: np.concatenate([run(part) for part in batches]) for name, (run, _, _) in engines.items()}
    times: dict[str, list[float]] = {name: [] for name in engines}
    # In blocks: threads of the engine before fall asleep during the first runs, which do not count.
    for block in range(BLOCKS):
        console.print(f"  block {block + 1}/{BLOCKS} of {rounds} runs each")
        for name, (run, _, _) in engines.items():
            for step in range(WARM_UP + rounds):
                begin = time.perf_counter()
                run(batches[0])
                if step >= WARM_UP:
                    times[name].append(time.perf_counter() - begin)
    reference = outputs["torch eager"]
    return [
        Row(
            name=name,
            accuracy=float((outputs[name].argmax(1) == labels).mean()),
            max_difference=float(np.abs(outputs[name] - reference).max()),
            milliseconds=statistics.median(times[name]) * 1e3,
            file_bytes=file.stat().st_size,
            batch_norms=batch_norms_in(file) if count is None else count,
            same_predictions=bool((outputs[name].argmax(1) == reference.argmax(1)).all()),
        )
        for name, (_, file, count) in engines.items()
    ]


def compare_training_graph(model: torch.nn.Module, path: Path, example: torch.Tensor, threads: int) -> dict[str, float]:
    """Largest difference of output and updated statistics from one torch training forward, by engine."""
    trained = digits_resnet()
    trained.load_state_dict(model.state_dict())
    expected = {"output": trained.train()(example).detach().numpy()}
    expected |= {
        f"{name}.new": value.numpy()
        for name, value in trained.state_dict().items()
        if name.split(".")[-1].startswith(("running", "num"))
    }
    errors = {}
    for engine, session in {
        "library": bnexport.InferenceSession(path, sess_options=session_options(threads)),
        "portable body": onnxruntime.InferenceSession(path, session_options(threads)),
    }.items():
        names = [output.name for output in session.get_outputs()]
        if set(names) != set(expected):
            raise SystemExit(f"the training graph returns {names}, expected {sorted(expected)}")
        got = dict(zip(names, session.run(None, {"x": example.numpy()})))
        errors[engine] = max(float(np.abs(got[name].astype(np.float64) - expected[name]).max()) for name in names)
    return errors


def session_options(threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # A spinning pool of one engine would take the cores from the next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def batch_norms_in(path: Path) -> int:
    """Batch norm nodes in a file, ours and ONNX's, outside function bodies."""
    return sum(
        node.op_type in ("BatchNormalization", "MMCVSyncBatchNorm") for node in model_io.load(path).graph.all_nodes()
    )


def print_table(rows: list[Row]) -> None:
    table = Table(title="one test set, four engines")
    for column in ("engine", "test accuracy", "max |difference|", "ms / batch", "file size", "BatchNorm nodes"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.accuracy:.2%}",
            f"{row.max_difference:.1e}",
            f"{row.milliseconds:.2f}",
            f"{row.file_bytes / 1024:.0f} KiB",
            str(row.batch_norms),
        )
    console.print(table)


def draw(rows: list[Row], path: Path) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (latency, difference) = plt.subplots(1, 2, figsize=(11, 3.4), sharey=True)
    names = [row.name for row in rows][::-1]
    colours = ["#7f7f7f", "#1f77b4", "#76b7e5", "#2ca02c"][::-1]
    bars = latency.barh(names, [row.milliseconds for row in rows][::-1], color=colours)
    latency.bar_label(bars, fmt="%.2f", padding=3)
    latency.set(xlabel="milliseconds per batch (median)", xmargin=0.15)
    bars = difference.barh(names, [max(row.max_difference, 1e-9) for row in rows][::-1], color=colours)
    difference.bar_label(
        bars, [f"{row.max_difference:.0e}" if row.max_difference else "reference" for row in rows][::-1], padding=3
    )
    difference.axvline(DIFFERENCE_BELOW, color="#d62728", linestyle="--", linewidth=1)
    difference.text(
        DIFFERENCE_BELOW * 0.8, len(rows) - 0.55, "bound", color="#d62728", ha="right", va="center", fontsize=9
    )
    difference.set(xlabel="largest |difference| from torch", xscale="log", xlim=(1e-9, 1e-3))
    for axes in (latency, difference):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("A ResNet with sync batch norm, deployed")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def check(rows: list[Row], training_errors: dict[str, float], deployed_nodes: int) -> None:
    """The demo's own claims; an unmet one ends with exit code 1."""
    problems = [f"{row.name}: accuracy {row.accuracy:.2%}" for row in rows if row.accuracy < ACCURACY_AT_LEAST]
    problems += [
        f"{row.name}: differs by {row.max_difference:.1e}" for row in rows if row.max_difference >= DIFFERENCE_BELOW
    ]
    problems += [f"{row.name}: other predictions than torch" for row in rows if not row.same_predictions]
    problems += [
        f"{row.name}: {row.batch_norms} batch norms left"
        for row in rows
        if row.name == "ORT, folded" and row.batch_norms
    ]
    problems += [f"deploy: {deployed_nodes} batch norms left"] if deployed_nodes else []
    problems += [
        f"training graph ({engine}): differs by {error:.1e}"
        for engine, error in training_errors.items()
        if error >= TRAINING_GRAPH_DIFFERENCE_BELOW
    ]
    if problems:
        raise SystemExit("not as promised: " + "; ".join(problems))
    console.print("as promised: accuracy, equal predictions, differences and folding are within the demo's bounds")


if __name__ == "__main__":
    main()
