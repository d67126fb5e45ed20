"""Command recalibrate: the running statistics of an ONNX file, re-estimated on data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bnexport import interface
from bnexport.cli.common import Html, Json, Overwrite, app
from bnexport.cli.console import detail, say, status
from bnexport.cli.output import check_change, check_targets, emit, table, write_page
from bnexport.errors import UsageError

_ROWS = "NAME:FILE.npy|FOLDER"
Batch = Annotated[int, typer.Option("--batch", metavar="INT", min=1, help="Rows of one batch.")]


@app.command(
    place=30,
    examples=(
        "bnexport recalibrate model.onnx better.onnx -i x:rows.npy --html changes.html",
        "bnexport recalibrate model.onnx better.onnx -i x:folder --layers together --batch 64",
    ),
)
def recalibrate(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The ONNX file; unchanged unless it is OUT, too.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Where the model with new statistics goes.")],
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input", "-i", metavar=_ROWS, help="Rows of an input: a NumPy file, or a folder of them. Repeatable."
        ),
    ],
    batch: Batch = 32,
    layers: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="one_by_one: exact for any batches, several passes; together: one pass, as in training.",
        ),
    ] = "one_by_one",
    overwrite: Overwrite = False,
    html: Html = None,
    json_target: Json = None,
) -> None:
    """Re-estimates running statistics on data."""
    check_targets(OUT=target, html=html, json=json_target)
    check_change(source, target, overwrite)
    result = run(source, target, inputs, batch, layers=layers, overwrite=overwrite)
    report = result.report
    say(f"{target} written" if report.layers else f"{target} is the same model")
    rows = [
        (
            layer.name,
            len(layer.old_mean),
            layer.count,
            f"{abs(layer.shift).max():.3g}",
            f"{layer.stretch.min():.3g} to {layer.stretch.max():.3g}",
        )
        for layer in report.layers
    ]
    columns = ("batch norm", "channels", "values a channel", "largest shift, std", "std, new / old")
    tables = [table(str(target), columns, rows, right=columns[1:])] if rows else []
    if html is not None:
        write_page(html, [report.summary(), *report.warnings()], tables)
    emit(report.to_dict(), json_target, tables)


def run(source: Path, target: Path | None, inputs: list[str], batch: int, **options: Any) -> Any:
    """Re-estimate the statistics of a file, and say what changed."""
    interface.check_choice("--layers", options.get("layers", "one_by_one"), ("one_by_one", "together"))
    from bnexport.model_io import load
    from bnexport.recalibration import files
    from bnexport.recalibration.files import open_rows

    named = _named(inputs)
    wanted = [str(value.name) for value in load(source).graph.inputs if not value.is_initializer()]
    if set(named) != set(wanted):
        raise UsageError(f"--input: got rows of {', '.join(named)}; {source} takes {', '.join(wanted)}")
    rows = open_rows(named, batch)
    with status(f"re-estimating the statistics of {source}"):
        result = files.recalibrate_file(source, target, rows, **options)
    say(result.report.summary())
    for line in result.report.warnings():
        say(f"note: {line}")
    detail(f"{result.report.batches} batches of {batch} rows at most")
    return result


def _named(texts: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, _, path = text.partition(":")
        if not name or not path:
            raise UsageError(f"--input: got {text!r}, expected {_ROWS}, such as x:rows.npy")
        if name in found:
            raise UsageError(f"--input: got {name!r} twice, expected each input once")
        found[name] = path
    return found
