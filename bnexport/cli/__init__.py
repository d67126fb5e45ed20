"""The command line: arguments in, library calls, tables or JSON out.

Data go to stdout, messages to stderr. Exit codes: 0 ok, 1 verification failed, 2 usage, 3 model
refused, 4 environment.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from bnexport import __version__
from bnexport.cli import doctor, export, models, run  # noqa: F401 - each registers its commands
from bnexport.cli.common import app, err, escape, out
from bnexport.errors import BnexportError

__all__ = ["app", "main"]

# typer carries click inside since 0.20 and depends on it before: the base class is found by its name.
_ClickException: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    try:
        result = app(arguments, standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except BnexportError as error:
        code = _fail(str(error), error.exit_code)
    except typer.Exit as exit_:
        code = exit_.exit_code
    except _ClickException as error:
        context = getattr(error, "ctx", None)
        code = _fail(f"{error.format_message()} {context.get_usage() if context else ''}".strip(), 2)
    except MemoryError:
        code = _fail("there is not enough memory; nothing was written", 4)
    except (typer.Abort, KeyboardInterrupt):
        code = _fail("interrupted", 130)
    if arguments is None:
        sys.exit(code)
    return code


def _fail(message: str, code: int) -> int:
    err.print(f"[red]error:[/red] {escape(' '.join(message.split()))}", soft_wrap=True)
    return code


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        out.print(f"bnexport {__version__}")
        raise typer.Exit
