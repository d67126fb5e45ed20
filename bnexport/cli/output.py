"""What a command prints and writes: data on stdout, messages on stderr, files, and the line at its end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bnexport import interface
from bnexport.errors import MissingFileError, UsageError
from bnexport.interface import check_onnx_suffix, suggestion
from bnexport.pages import page, plain

# Two consoles: data on stdout, messages on stderr; verbosity and progress display.

# Columns without a terminal: wide enough for names, narrow enough for a log.
_PIPE_WIDTH = 120


def open_closed_streams() -> None:
    """Opens the null device in place of each closed standard stream (`<&-`, `>&-`), which Python leaves None.

    Otherwise the next file that is opened becomes the standard stream of every process that we start.
    """
    for name, descriptor, flags, mode in (("stdin", 0, os.O_RDONLY, "r"), ("stdout", 1, os.O_WRONLY, "w"),
                                          ("stderr", 2, os.O_WRONLY, "w")):  # fmt: skip
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, flags)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - for good


class _Console(Console):
    """A console that leaves a closed pipe to `main`, which knows its exit code."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 - rich calls this while it handles the error


def _console(*, stderr: bool = False, file: IO[str] | None = None) -> Console:
    """Without any escape sequence where NO_COLOR asks for that; names from model files are never markup."""
    stream = sys.stderr if stderr else sys.stdout
    bare = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    color_system: Any = None if bare else "auto"
    return _Console(
        stderr=stderr,
        file=file,
        highlight=False,
        markup=False,
        emoji=False,
        color_system=color_system,
        width=None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH,
    )


open_closed_streams()
out = _console()
err = _console(stderr=True)
# -q silences `out` and `err`, not errors.
_errors = _console(stderr=True)
_verbose = False


def set_level(*, quiet: bool, verbose: bool) -> None:
    """Set how much the commands to come print, as -q and -v ask."""
    global _verbose  # noqa: PLW0603 - a property of the process, as the consoles are
    _verbose = verbose
    out.quiet = err.quiet = quiet


def is_verbose() -> bool:
    return _verbose


def say(text: str) -> None:
    """Print a message, unless -q."""
    err.print(plain(text), soft_wrap=not err.is_terminal)


def detail(text: str) -> None:
    """Print a message of -v."""
    if _verbose:
        say(text)


def complain(text: str) -> None:
    """Print an error in one line, even with -q."""
    _errors.print("error:", style="red", end=" ")
    _errors.print(plain(" ".join(text.split())), soft_wrap=not _errors.is_terminal)


def _animated() -> bool:
    """Whether to animate progress: on a terminal that takes escape sequences, without -q."""
    return err.is_terminal and err.color_system is not None and not err.quiet


@contextlib.contextmanager
def status(message: str) -> Iterator[None]:
    """Show what long work does on a terminal: a spinner, the stage, the time and a bar where the amount is known."""
    if not _animated():
        yield
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    # It stays on this stderr when messages of others are kept away from it.
    console = _console(stderr=True, file=sys.stderr)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, BarColumn(20), console=console, transient=True) as shown:
        task = shown.add_task(plain(message), total=None)

        def update(stage: str, done: int | None, total: int | None) -> None:
            text = plain(_stage_text(message, stage, done, total))
            shown.update(task, description=text, completed=done or 0, total=total)

        with interface.listen(update):
            yield


def _stage_text(message: str, stage: str, done: int | None, total: int | None) -> str:
    """Return the work with its stage: `folding m.onnx: folding 3,120 of 10,000`, bytes from a megabyte on in MB or GB."""
    if done is None or total is None:
        return f"{message}: {stage}"
    if stage == "writing":
        unit, size = ("GB", 1e9) if total >= 1e9 else ("MB", 1e6)
        return f"{message}: {stage} {done / size:.1f} of {total / size:.1f} {unit}"
    return f"{message}: {stage} {done:,} of {total:,}"


# The last lines of a fold or an export: batch norms that were asked for, and with --bench the result in one line.

Explain = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Say what happened to one batch norm, or to those of a module, and why."),
]
Bench = Annotated[bool, typer.Option("--bench", help="Compare the latency with that of the unfolded model.")]

# Batch norms that the last line names; more are counted.
_NAMED = 3


def explain_site(report: Any, name: str | None) -> None:
    """Print a line for each batch norm that `name` means."""
    if name is None:
        return
    sites = report.find(name)
    if not sites:
        near = suggestion(name, [each for site in report.sites for each in (*site.modules, *site.nodes)])
        say(f"{name}: no part of a batch norm, so there was nothing to do{near}")
    for site in sites:
        into = f" into {', '.join(site.targets)}" if site.targets else ""
        say(f"{site.name}: {site.outcome_in_words}{into}{f': {site.reason}' if site.reason else ''}")


def note_growth(report: Any) -> None:
    """Print a note where the parameters take more bytes than before."""
    before, after = report.before.parameter_bytes, report.after.parameter_bytes
    if after > before:
        say(
            f"note: the parameters grew from {before:,} to {after:,} bytes: weights that several batch norms share are "
            "folded once for each"
        )


def result_line(report: Any, verification: Any, ratio: Any) -> str:
    """Return the folds proved and compared, the batch norms that stay, and the latency against the unfolded model's."""
    kept = [site for site in report.kept if not site.lone]
    named = ", ".join(f"{site.name} ({site.reason or site.outcome_in_words})" for site in kept[:_NAMED])
    more = f" and {len(kept) - _NAMED} more" if len(kept) > _NAMED else ""
    left = f"{len(kept)} batch norm{'s' * (len(kept) != 1)} left{': ' * bool(kept)}{named}{more}"
    folds = "not verified" if verification is None else verification.proved
    if ratio is None:
        return f"result: nothing folded; {left}; no latency to compare: it is the same model"
    latency = f"{ratio.value:.2f} times the latency of the unfolded model ({ratio.least:.2f} to {ratio.most:.2f})"
    return f"result: {folds}; {left}; {latency if ratio.decided else f'latency {ratio}'}"


def latency_json(ratio: Any) -> dict[str, Any]:
    """Return the entries of --json about a comparison of latencies, None where nothing was folded."""
    if ratio is None:
        return {"latency_ratio": None, "latency_ratio_range": None}
    return {"latency_ratio": ratio.value, "latency_ratio_range": [ratio.least, ratio.most]}


# Results: tables or JSON on stdout, and files, written atomically.


def write_page(target: Path, lines: Iterable[str], tables: Iterable[Table]) -> None:
    """Write lines and tables as an HTML page."""
    write_whole(target, page(lines, tables))


def emit(data: dict[str, Any], target: str | None, tables: Iterable[Table]) -> None:
    """Print or write the result: JSON where asked for, else tables."""
    if target is None:
        for each in tables:
            out.print(each)
        return
    from bnexport.schema import REPORT_VERSION

    result = {"schema_version": REPORT_VERSION, **data}
    try:
        text = json.dumps(result, indent=2, allow_nan=False, default=str)
    except ValueError:  # an infinity or NaN, which JSON does not have
        text = json.dumps(_finite(result), indent=2, allow_nan=False, default=str)
    if target == "-":
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    else:
        write_whole(Path(target), text + "\n")


def _finite(value: Any) -> Any:
    """Return the value with None in place of infinities and NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


# Bytes of the name of a file to write: file systems take 255, among them those of the temporary folder's name.
_LONGEST_NAME = 220


def check_targets(**targets: str | Path | None) -> None:
    """Raises UsageError for a file that cannot be written, before any work is done for it.

    Args:
        targets: where an option (by its name without dashes) or an argument (in capitals) writes; "-" is stdout.
    """
    for name, target in targets.items():
        if target is None or target == "-":
            continue
        option = name if name.isupper() else f"--{name}"
        folder = Path(target).parent
        length = len(os.fsencode(Path(target).name))
        if length > _LONGEST_NAME:
            raise UsageError(f"{option}: got a file name of {length} bytes, expected at most {_LONGEST_NAME}")
        if Path(target).is_dir():
            raise UsageError(f"{option}: got the folder {str(target)!r}, expected the name of a file to write")
        if not folder.is_dir():
            problem = "is a file" if folder.exists() else "does not exist; make it first"
            raise UsageError(f"{option}: cannot write {str(target)!r}: its folder {str(folder)!r} {problem}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(
                f"{option}: cannot write {str(target)!r}: its folder {str(folder)!r} may not be written to"
            )


def check_new(target: str | Path, overwrite: bool, argument: str = "OUT") -> None:
    """Raise UsageError for a model file that exists, before any work is done, unless it may be replaced."""
    if not overwrite and os.path.lexists(target):
        raise UsageError(f"{argument}: {str(target)!r} exists; write to another file, or replace it with --overwrite")


def check_exists(path: str | Path | None, argument: str) -> None:
    """Raise MissingFileError for a file to read that does not exist, before anything slow is imported."""
    if path is not None and not os.path.exists(path):
        raise MissingFileError(f"{argument}: {path}: no such file; check the path")


def check_change(source: Path, target: Path, overwrite: bool) -> None:
    """Raise UsageError or MissingFileError for a change of the ONNX file IN to OUT that cannot be made."""
    check_onnx_suffix(target, "OUT")
    if not overwrite and os.path.exists(source) and target.exists() and source.samefile(target):
        raise UsageError(
            f"OUT: got {str(target)!r}, which is IN; write to another file, or replace IN with --overwrite"
        )
    check_exists(source, "IN")
    check_new(target, overwrite)


@contextlib.contextmanager
def binary_file(target: Path) -> Iterator[Any]:
    """Open a binary stream; the file is written as `model_io.staging.whole_file` does."""
    from bnexport.model_io.staging import whole_file

    with whole_file(target) as staged, open(staged, "wb") as file:
        yield file


def write_whole(target: Path, text: str) -> None:
    with binary_file(target) as file:
        file.write(text.encode("utf-8", "replace"))
