"""The charts of docs/performance.md, from the JSON in benchmarks/results. Needs matplotlib.

python -m benchmarks.charts
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import bench_fold
from benchmarks.page import RESULTS, ROOT, shape_of

Report = dict[str, Any]
SMALLEST = 1.0  # megabytes: below, the price of a call is what a chart would show
OURS, ORT, TORCH = "#1f6f8b", "#c7a23c", "#b5523b"


def bars(
    path: Path, title: str, label: str, names: list[str], series: dict[str, tuple[str, list[float | None]]]
) -> None:
    """Horizontal bars, one group for each name, with a line at 1."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8.5, 0.8 + 0.22 * len(names) * (len(series) + 0.8)))
    height = 0.8 / len(series)
    for index, (name, (colour, values)) in enumerate(series.items()):
        places = [place + (index - (len(series) - 1) / 2) * height for place in range(len(names))]
        axes.barh(places, [value or 0 for value in values], 0.9 * height, color=colour, label=name)
        for place, value in zip(places, values, strict=True):
            if value is not None:
                axes.text(value, place, f" {value:.2f}", va="center", fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.axvline(1, color="0.3", linewidth=0.8, linestyle="--")
    axes.margins(x=0.06)
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10, loc="left", pad=22)
    axes.legend(fontsize=8, frameon=False, ncols=len(series), loc="lower left", bbox_to_anchor=(-0.01, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def ort_cpu(report: Report, path: Path) -> None:
    rows = [row for row in report["rows"] if row["dtype"] == "float32" and row["megabytes"] >= SMALLEST]
    floor = [row["microseconds"]["train"] / row["train/(read+copy)"] for row in rows]
    series: dict[str, tuple[str, list[float | None]]] = {}
    for name, key, colour in (
        ("bnexport in ONNX Runtime", "train", OURS),
        ("ONNX Runtime", "ort_train", ORT),
        ("torch", "torch_train", TORCH),
    ):
        values = [row["microseconds"].get(key) for row in rows]
        series[name] = (colour, [value and value / low for value, low in zip(values, floor, strict=True)])
    title = "Training forward, float32: time / (one read pass + one copy)"
    bars(path, title, "1: what memory alone takes; shorter is better", [shape_of(row) for row in rows], series)


def torch_operator(report: Report, path: Path) -> None:
    rows = [row for row in report["rows"] if row["megabytes"] >= SMALLEST]
    names = [
        shape_of(row)
        + ("" if row["dtype"] == "float32" else f" {row['dtype']}")
        + ("" if row["layout"] == "contiguous" else f" {row['layout']}")
        for row in rows
    ]
    series: dict[str, tuple[str, list[float | None]]] = {
        "forward": (OURS, [row["forward_ratio"] for row in rows]),
        "backward": (ORT, [row["backward_ratio"] for row in rows]),
    }
    title = "SyncBatchNorm in a training step: torch's time / ours"
    bars(path, title, "1: as fast as torch.nn.BatchNorm2d; longer is better", names, series)


def fold(report: Report, path: Path) -> None:
    bench_fold.chart(report["fold"], path)


def training_step(report: Report, path: Path) -> None:
    colours = {"ours": OURS, "torch eager": TORCH, "torch compile": "#d98c7a", "ORT training 1.19.2": ORT}
    colours["ours, standard operators"] = "#8fb8c6"
    results = report["results"]
    series: dict[str, tuple[str, list[float | None]]] = {
        engine: (colour, [result["engines"].get(engine, {}).get("ratio_to_eager") for result in results])
        for engine, colour in colours.items()
    }
    names = [result["network"].replace(", ", "\n") for result in results]
    bars(path, "A training step with AdamW", "time, as a multiple of torch eager's", names, series)


# A chart joins by a line here, and by its picture in the page.
CHARTS: dict[str, tuple[str, Callable[[Report, Path], None]]] = {
    "performance_ort.png": ("ort_cpu.json", ort_cpu),
    "performance_torch.png": ("torch_operator_cpu.json", torch_operator),
    "performance_training.png": ("training_step.json", training_step),
    "performance_fold.png": ("fold.json", fold),
}


def draw() -> None:
    for name, (result, chart) in CHARTS.items():
        if (RESULTS / result).exists():
            chart(json.loads((RESULTS / result).read_text()), ROOT / "docs" / name)
            print(f"wrote docs/{name}")


if __name__ == "__main__":
    draw()
