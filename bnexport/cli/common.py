"""What all commands share: the application, the two consoles, options, output and errors."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    name="bnexport",
    help="From a model trained with sync batch norm to one that runs anywhere.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

Json = Annotated[
    str | None, typer.Option("--json", metavar="PATH|-", help="Write the result as JSON to a file, or to stdout.")
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        "-i",
        metavar="NAME:FILE.npy|NAME:1,3,224,224",
        help="An input, as a NumPy file or a shape for random numbers.",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of random inputs.")]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file.")]


def escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def emit(data: dict[str, Any], target: str | None, tables: list[Table]) -> None:
    """The result as JSON where asked for, else as tables."""
    if target is None:
        for table in tables:
            out.print(table)
        return
    text = json.dumps(data, indent=2, default=str)
    if target == "-":
        sys.stdout.write(text + "\n")
        return
    write_whole(Path(target), text + "\n")


def write_whole(target: Path, text: str) -> None:
    """The file appears whole or not at all."""
    temporary = Path(f"{target}.part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, target)


def status(message: str) -> Any:
    """A spinner on a terminal; nothing elsewhere."""
    return err.status(message) if err.is_terminal else _Silent()


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere; yields a function that takes how much is done."""
    if not err.is_terminal:
        yield lambda _: None
        return
    from rich.progress import Progress

    with Progress(console=err, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)


class _Silent:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def parse_shape(text: str) -> tuple[int, ...] | None:
    parts = text.split(",")
    return tuple(int(part) for part in parts) if all(part.strip().isdigit() for part in parts) else None
