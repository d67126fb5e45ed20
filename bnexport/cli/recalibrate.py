"""Commands on running statistics: recalibrate re-estimates them on data, statistics compares them with data."""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from bnexport import interface
from bnexport.cli.common import AllowUnexpected, Html, Json, Key, Overwrite, Source, app
from bnexport.cli.output import check_change, check_exists, check_targets, detail, emit, say, status, write_page
from bnexport.errors import UsageError

_ROWS = "NAME:FILE.npy|FOLDER"
Rows = Annotated[
    list[str],
    typer.Option(
        "--input", "-i", metavar=_ROWS, help="Rows of an input: a NumPy file, or a folder of them. Repeatable."
    ),
]
Batch = Annotated[int, typer.Option(metavar="INT", min=1, help="Rows of one batch.")]


@app.command(
    place=30,
    examples=(
        "bnexport recalibrate model.onnx better.onnx -i x:rows.npy --html changes.html",
        "bnexport recalibrate model.onnx better.onnx -i x:folder --layers together --batch 64",
    ),
)
def recalibrate(
    source: Source,
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Where the model with new statistics goes.")],
    inputs: Rows,
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
    interface.check_choice("--layers", layers, ("one_by_one", "together"))
    from bnexport.recalibration.files import open_rows, recalibrate_file

    batches = open_rows(_rows_of(inputs, source), batch)
    with status(f"re-estimating the statistics of {source}"):
        report = recalibrate_file(source, target, batches, layers=layers, overwrite=overwrite).report
    say(report.summary())
    for line in report.warnings():
        say(f"note: {line}")
    detail(f"{report.batches} batches of {batch} rows at most")
    say(f"{target} written" if report.layers else f"{target} is the same model")
    tables = report.tables(str(target))
    if html is not None:
        write_page(html, [report.summary(), *report.warnings()], tables)
    emit(report.to_dict(), json_target, tables)


@app.command(
    place=25,
    examples=(
        "bnexport statistics model.onnx -i x:rows.npy --html statistics.html",
        "bnexport statistics package:network --checkpoint weights.pth -i x:rows.npy",
    ),
)
def statistics(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="An ONNX file, or a torch module as `export` takes it: MODULE:FACTORY or LIBRARY:NAME.",
        ),
    ],
    inputs: Rows,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weights of a module, as `export` reads them.")
    ] = None,
    key: Key = None,
    allow_unexpected: AllowUnexpected = False,
    batch: Batch = 32,
    html: Html = None,
    json_target: Json = None,
) -> None:
    """Compares stored running statistics with those of data.

    Nothing is changed. The first batch norm whose statistics do not fit is named, and the command that mends it.
    """
    check_targets(html=html, json=json_target)
    check_exists(checkpoint, "--checkpoint")
    is_file = os.path.exists(model) or ":" not in model
    if is_file:
        check_exists(model, "MODEL")
        if checkpoint is not None:
            raise UsageError(f"--checkpoint: {model} is a file, which has its own weights; expected MODULE:FACTORY")
    from bnexport.recalibration.files import open_rows

    batches = open_rows(_rows_of(inputs, model if is_file else None), batch)
    loaded: Any = model
    if not is_file:
        from bnexport.cli.input_options import Argument, module_of

        loaded, _ = module_of(model, "MODEL", [Argument("", (), None)], checkpoint, key, allow_unexpected)
    with status(f"measuring the statistics of {model}"):
        from bnexport.recalibration.deviations import statistics as measure

        report = measure(loaded, batches)
    if is_file:
        options = [part for text in inputs for part in ("-i", text)]
        report = dataclasses.replace(report, mend=shlex.join(["bnexport", "recalibrate", model, "OUT.onnx", *options]))
    say(report.summary())
    for line in report.warnings():
        say(f"note: {line}")
    tables = report.tables(model)
    if html is not None:
        write_page(html, [report.summary(), *report.warnings()], tables)
    emit(report.to_dict(), json_target, tables)


def _rows_of(texts: list[str], source: str | Path | None) -> dict[str, str]:
    """Return the files of --input by name. source: the ONNX file whose inputs they are."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, path = text.partition(":")
        if not name or not path:
            raise UsageError(f"--input: got {text!r}, expected {_ROWS}, such as x:rows.npy")
        if name in found:
            raise UsageError(f"--input: got {name!r} twice, expected each input once")
        found[name] = path
    if source is not None:
        from bnexport.model_io import load

        wanted = [str(value.name) for value in load(source).graph.inputs if not value.is_initializer()]
        if set(found) != set(wanted):
            raise UsageError(f"--input: got rows of {', '.join(found)}; {source} takes {', '.join(wanted)}")
    return found
