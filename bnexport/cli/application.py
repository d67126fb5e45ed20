"""The commands in one application, and the exit code and line of every error."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from typing import Annotated, Any

import typer

from bnexport import __version__, interface
from bnexport.cli import doctor, export, fold, recalibrate, run, verify  # noqa: F401 - each registers its commands
from bnexport.cli.common import app, place
from bnexport.cli.output import complain, err, is_verbose, out, set_level
from bnexport.errors import BnexportError, NotVerifiedWarning

__all__ = ["app", "run_command_line"]

_COMPLETION = "_BNEXPORT_COMPLETE"
_BROKEN_PIPE, _INTERRUPTED, _INTERNAL = 141, 130, 70

# typer carries click inside since 0.20 and depends on it before: the base class is found by its name.
_ClickException: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def run_command_line(arguments: list[str] | None) -> int:
    """Runs one command and returns its exit code; exits with it where no arguments are given."""
    set_level(quiet=False, verbose=False)
    if arguments is None:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotVerifiedWarning)  # the commands say it in their own line
            result = _invoke(sys.argv[1:] if arguments is None else arguments)
        code = result if isinstance(result, int) else 0
    except typer.Exit as exit_:
        code = exit_.exit_code
    except (typer.Abort, KeyboardInterrupt) as error:
        code = _INTERRUPTED
        complain(str(error) or "interrupted; files are as they were, or complete")
    except BrokenPipeError:
        code = _BROKEN_PIPE
        for stream in (sys.stdout, sys.stderr):
            _abandon(stream)
    except Exception as error:
        try:
            code = _explain(error)
        except BrokenPipeError:
            code = _BROKEN_PIPE
            _abandon(sys.stderr)
    if arguments is None:
        sys.exit(code)
    return code


def _invoke(arguments: list[str]) -> Any:
    """Runs the command, or answers the shell that asks for completions.

    typer's own entry point turns a closed pipe into 1 and an interrupt into a silent exit: the context is ours.
    """
    app.registered_commands.sort(key=place)
    if _COMPLETION in os.environ:
        return app(arguments, prog_name="bnexport", complete_var=_COMPLETION)
    command = typer.main.get_command(app)
    with command.make_context("bnexport", list(arguments)) as context:
        return command.invoke(context)


def _abandon(stream: Any) -> None:
    """Discard what is left in the buffer of a closed pipe, so that Python's own flush at the end is silent."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _explain(error: Exception) -> int:
    """Print an error in one line, with -v its traceback too; return the exit code."""
    if is_verbose():
        err.print("".join(traceback.format_exception(error)).rstrip(), soft_wrap=True)
    if isinstance(error, BnexportError):
        message, code = str(error), error.exit_code
    elif isinstance(error, _ClickException):
        context = getattr(error, "ctx", None)
        hint = f"; see {context.command_path} --help" if context else ""
        message, code = f"{error.format_message().rstrip('.')}{hint}", 2
    elif isinstance(error, MemoryError):
        message, code = "there is not enough memory; nothing was written", 4
    elif isinstance(error, ImportError):
        name = (error.name or "").partition(".")[0]
        message, code = f"{error}; {interface.advice(name) or 'see bnexport doctor'}", 4
    elif isinstance(error, OSError):
        message, code = f"{error.filename or 'a file'}: {error.strerror or error}", 4
    else:
        message, code = f"an error of bnexport itself: {type(error).__name__}: {error}; -v says where", _INTERNAL
    complain(message)
    return code


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        out.print(f"bnexport {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        err.print(context.get_help(), soft_wrap=True)
        raise typer.Exit(2)
