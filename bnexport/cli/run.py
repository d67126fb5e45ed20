"""Commands that run models in ONNX Runtime: run, bench."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bnexport.cli.common import Inputs, Json, Model, Providers, Seed, app
from bnexport.cli.output import binary_file, check_targets, detail, emit, progress, say, status, table
from bnexport.errors import UnsupportedModelError, UsageError


@app.command(
    place=70,
    examples=(
        "bnexport run model.onnx",
        "bnexport run model.onnx -i x:image.npy -o outputs.npz --provider cuda",
    ),
)
def run(
    model: Model,
    inputs: Inputs = None,
    seed: Seed = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE.npz", help="Save the outputs.")] = None,
    provider: Providers = None,
    json_target: Json = None,
) -> None:
    """Runs a model once in ONNX Runtime. Nodes that need our library get it."""
    import numpy as np

    check_targets(output=output, json=json_target)
    if output is not None and output.suffix != ".npz":
        raise UsageError(f"--output: got {str(output)!r}, expected a file that ends in .npz")
    with status(f"running {model}"):
        feeds, done = _run(model, inputs, seed, provider or ())
    say(f"inputs: {_shapes(feeds)}, seed {seed}; in {done.engine}")
    rows = [_row(name, np.asarray(value)) for name, value in done.outputs.items()]
    if output is not None:
        with binary_file(output) as file:
            np.savez(file, **done.outputs)
    cells = [
        (row["name"], row["dtype"], row["shape"], *(f"{row[key]:.6g}" for key in ("min", "mean", "max")))
        for row in rows
    ]
    columns = ("output", "type", "shape", "min", "mean", "max")
    if output is not None:
        say(f"{output} written")
    detail("with the custom-op library" if done.library else "with ONNX Runtime's own operators only")
    emit(
        {
            "model": str(model),
            "inputs": [
                {"name": name, "dtype": str(array.dtype), "shape": list(array.shape)} for name, array in feeds.items()
            ],
            "seed": seed,
            "engine": done.engine,
            "seconds": done.seconds,
            "library": done.library,
            "outputs": rows,
        },
        json_target,
        [table(f"{model}: {done.seconds * 1e3:.1f} ms", columns, cells, right=columns[3:])],
    )


def _run(model: Path, inputs: list[str] | None, seed: int, providers: Sequence[str]) -> tuple[dict[str, Any], Any]:
    """Run the model; return its inputs, of the first sizes that it accepts where it leaves them open, and the outputs."""
    from bnexport.runtime import engine

    loaded = functools.cache(lambda path: engine.load(path, providers=providers))
    (feeds,), done = first_feeds([model], inputs, seed, lambda path, each: engine.run(loaded(path), each))
    return feeds, done


def first_feeds(
    models: Sequence[Path], inputs: list[str] | None, seed: int, run: Callable[[Path, Any], Any] | None = None
) -> tuple[list[dict[str, Any]], Any]:
    """Return inputs of each model, of the first sizes with which all run where they leave sizes open, and a result.

    run: how to run a model; None for ONNX Runtime on the CPU. Raise UnsupportedModelError where no sizes fit.
    """
    from bnexport.cli.input_options import feeds_of
    from bnexport.runtime import engine
    from bnexport.verification.inputs import FREE_SIZES

    run, tried = run or engine.run, None
    for free in FREE_SIZES:
        feeds = [feeds_of(inputs, seed, model, all_of_them=True, free=free) for model in models]
        shapes = [array.shape for array in feeds[0].values()]
        if shapes == tried:  # No size is open.
            break
        try:
            results = [run(model, each) for model, each in zip(models, feeds)]
        except UnsupportedModelError as error:
            tried, refused = shapes, error
        else:
            return feeds, results[-1]
    raise refused


def _shapes(feeds: dict[str, Any]) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, array.shape)) or 'scalar'}" for name, array in feeds.items()) or "none"


def _row(name: str, array: Any) -> dict[str, Any]:
    import numpy as np

    has_numbers = array.size and array.dtype.kind in "biuf"
    numbers = {
        key: float(function(array)) if has_numbers else float("nan")
        for key, function in (("min", np.min), ("mean", np.mean), ("max", np.max))
    }
    return {"name": name, "dtype": str(array.dtype), "shape": list(array.shape), **numbers}


@app.command(
    place=80,
    examples=("bnexport bench kept.onnx folded.onnx -i x:1,3,224,224 --chart latency.png",),
)
def bench(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL...", help="ONNX files with the same inputs.")],
    inputs: Inputs = None,
    seed: Seed = 0,
    runs: Annotated[int, typer.Option(metavar="INT", min=1, help="Timed runs of each model.")] = 100,
    warm_up: Annotated[int, typer.Option(metavar="INT", min=0, help="Runs before that do not count.")] = 10,
    threads: Annotated[int, typer.Option(metavar="INT", min=0, help="Threads of ONNX Runtime; 0 lets it choose.")] = 0,
    chart: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Draw the distributions to a .png, .svg or .pdf file.")
    ] = None,
    provider: Providers = None,
    json_target: Json = None,
) -> None:
    """Compares the latency of models in ONNX Runtime. They take turns."""
    from bnexport.cli.latency import PERCENTILES, draw_chart, measure, ratio_of
    from bnexport.runtime import engine

    check_targets(chart=chart, json=json_target)
    if chart is not None and chart.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--chart: got {str(chart)!r}, expected a file that ends in .png, .svg or .pdf")
    if chart is not None:
        import matplotlib  # noqa: F401 - whether it is there, before any time is spent
    if len(set(models)) < len(models):
        raise UsageError(f"MODEL: got {', '.join(map(str, models))}, expected each file once")
    loaded = functools.cache(lambda path: engine.load(path, engine.default_options(threads=threads), provider or ()))
    with status(f"loading {', '.join(map(str, models))}"):
        feeds, _ = first_feeds(models, inputs, seed, lambda path, each: loaded(path).run(each))
    say(f"inputs: {_shapes(feeds[0])}, seed {seed}; --input sets others")
    calls = {str(path): functools.partial(loaded(path).run, each) for path, each in zip(models, feeds)}
    with progress("timing", runs * len(models)) as advance:
        results = measure(calls, runs=runs, warm_up=warm_up, progress=advance)
    ratios = [ratio_of(result, results[0]) for result in results]
    rows = [
        {**result.to_dict(), "ratio": ratio.value, "ratio_range": [ratio.least, ratio.most]}
        for result, ratio in zip(results, ratios)
    ]
    columns = ("model", *(f"p{q}" for q in PERCENTILES), f"against {models[0].name}")
    shown = ["1.00", *map(str, ratios[1:])]
    cells = [(row["model"], *(f"{row[f'p{q}_ms']:.3f}" for q in PERCENTILES), text) for row, text in zip(rows, shown)]
    if chart is not None:
        draw_chart(results, chart)
        say(f"{chart} written")
    sizes = [{"name": name, "shape": list(array.shape)} for name, array in feeds[0].items()]
    emit(
        {"inputs": sizes, "models": rows},
        json_target,
        [table(f"latency in ms, {runs} runs each", columns, cells, right=columns[1:])],
    )
