"""Command line: arguments in, library calls, tables or JSON out.

Data go to stdout, messages to stderr. Exit codes: 0 ok, 1 verification failed, 2 usage, 3 model
refused, 4 environment; 70 an error of bnexport itself, 130 interrupted, 141 closed pipe.
"""

from __future__ import annotations

from bnexport import startup

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code; exits with it where no arguments are given."""
    if arguments is None:
        startup.prepare()
    # Imported here: prepare() makes the imports fast.
    from bnexport.cli.application import run_command_line

    return run_command_line(arguments)
