"""The command that runs a model in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bnexport.cli.common import Inputs, Json, Model, Providers, Seed, app
from bnexport.cli.output import binary_file, check_targets, detail, emit, say, status
from bnexport.errors import UnsupportedModelError, UsageError
from bnexport.pages import table


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
        feeds, done = first_feeds(model, inputs, seed, provider or ())
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


def first_feeds(
    model: Path, inputs: list[str] | None, seed: int, providers: Sequence[str] = ()
) -> tuple[dict[str, Any], Any]:
    """Run the model; return its inputs, of the first sizes that it accepts where it leaves them open, and the outputs.

    Raises UnsupportedModelError where no sizes fit.
    """
    from bnexport.cli.input_options import feeds_of
    from bnexport.runtime import engine
    from bnexport.verification.inputs import FREE_SIZES

    loaded, tried = None, None
    for free in FREE_SIZES:
        feeds = feeds_of(inputs, seed, model, all_of_them=True, free=free)
        shapes = [array.shape for array in feeds.values()]
        if shapes == tried:  # No size is open.
            break
        loaded = loaded or engine.load(model, providers=providers)
        try:
            return feeds, engine.run(loaded, feeds)
        except UnsupportedModelError as error:
            tried, refused = shapes, error
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
