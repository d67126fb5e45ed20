"""Commands that run models in ONNX Runtime: run, bench."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from bnexport.cli.common import Inputs, Json, Model, Seed, app, emit, progress, status
from bnexport.cli.inputs import feeds_of


@app.command()
def run(
    model: Model,
    inputs: Inputs = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE.npz", help="Save the outputs.")] = None,
    seed: Seed = 0,
    json_target: Json = None,
) -> None:
    """Runs a model once in ONNX Runtime, with the custom-op library where the model needs it."""
    import numpy as np

    from bnexport.runtime import execution

    with status(f"running {model}"):
        done = execution.run(model, feeds_of(inputs, seed, model))
    results = done.outputs
    table = Table(title=f"{model}: {done.seconds * 1e3:.1f} ms" + (", custom-op library" if done.library else ""))
    for column in ("output", "type", "shape", "min", "mean", "max"):
        table.add_column(column, overflow="fold")
    rows = []
    for name, value in results.items():
        array = np.asarray(value)
        numbers = (
            [float(f(array)) for f in (np.min, np.mean, np.max)]
            if array.size and array.dtype.kind in "biuf"
            else [float("nan")] * 3
        )
        table.add_row(name, str(array.dtype), str(list(array.shape)), *(f"{number:.6g}" for number in numbers))
        rows.append(
            {
                "name": name,
                "dtype": str(array.dtype),
                "shape": list(array.shape),
                "min": numbers[0],
                "mean": numbers[1],
                "max": numbers[2],
            }
        )
    if output is not None:
        temporary = output.with_name(output.name + ".part")
        with temporary.open("wb") as file:
            np.savez(file, **results)  # type: ignore[arg-type]
        os.replace(temporary, output)
    emit(
        {"schema_version": 1, "model": str(model), "seconds": done.seconds, "library": done.library, "outputs": rows},
        json_target,
        [table],
    )


@app.command()
def bench(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL...", help="ONNX files with the same inputs.")],
    inputs: Inputs = None,
    runs: Annotated[int, typer.Option(help="Timed runs of each model.")] = 100,
    warm_up: Annotated[int, typer.Option(help="Runs before that do not count.")] = 10,
    threads: Annotated[int, typer.Option(help="Threads of ONNX Runtime; 0 lets it choose.")] = 0,
    chart: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the distributions.")] = None,
    seed: Seed = 0,
    json_target: Json = None,
) -> None:
    """Compares the latency of models in ONNX Runtime, in turn and in one process."""
    import onnxruntime

    from bnexport.runtime import execution, latency

    loaded = {}
    for path in models:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        with status(f"loading {path}"):
            loaded[str(path)] = (execution.load(path, options), feeds_of(inputs, seed, path))
    with progress("timing", runs * len(models)) as advance:
        results = latency.measure(
            {name: functools.partial(model.run, feeds) for name, (model, feeds) in loaded.items()},
            runs=runs,
            warm_up=warm_up,
            progress=advance,
        )
    table = Table(title=f"latency in ms, {runs} runs each")
    for column in ("model", *(f"p{q}" for q in latency.PERCENTILES), f"against {models[0].name}"):
        table.add_column(column, overflow="fold", justify="left" if column == "model" else "right")
    rows = [{**result.to_dict(), "ratio": result.percentile(50) / results[0].percentile(50)} for result in results]
    for row in rows:
        table.add_row(
            str(row["model"]), *(f"{row[f'p{q}_ms']:.3f}" for q in latency.PERCENTILES), f"{row['ratio']:.2f}"
        )
    if chart is not None:
        latency.chart(results, chart)
    emit({"schema_version": 1, "models": rows}, json_target, [table])
