"""Two consoles: data on stdout, messages on stderr; verbosity and progress display."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from rich.console import Console

from bnexport import interface

# Columns without a terminal: wide enough for names, narrow enough for a log.
_PIPE_WIDTH = 120
# Interval of progress lines without a terminal.
_SECONDS = 30.0


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


def plain(text: object) -> str:
    """Text from a model file, without characters that steer a terminal."""
    return "".join(character if character.isprintable() or character == "\n" else "\ufffd" for character in str(text))


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
    """Show what long work does: on a terminal a spinner, the stage, the time and a bar where the amount is known; in a log a
    line every 30 seconds."""
    if err.quiet:
        yield
        return
    if not _animated():
        with _Log(plain(message)) as log, interface.listen(log.update):
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


class _Log:
    """Prints where the work is every _SECONDS seconds, from a thread of its own."""

    def __init__(self, message: str) -> None:
        self._message, self._text, self._begun = message, message, time.monotonic()
        self._over = threading.Event()
        # It stays on this stderr when messages of others are kept away from it.
        self._console = _console(stderr=True, file=sys.stderr)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def update(self, stage: str, done: int | None, total: int | None) -> None:
        self._text = _stage_text(self._message, stage, done, total)

    def _run(self) -> None:
        while not self._over.wait(_SECONDS):
            with contextlib.suppress(OSError, ValueError):
                self._console.print(f"{plain(self._text)} ({time.monotonic() - self._begun:.0f} s)", soft_wrap=True)

    def __enter__(self) -> _Log:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, nothing elsewhere; yields a function that takes how much is done."""
    if not _animated():
        yield lambda _: None
        return
    from rich.progress import Progress

    with Progress(console=err, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)
