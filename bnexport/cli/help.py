"""Help as a terminal shows it: plain names of arguments, examples, and the exit codes."""

from __future__ import annotations

import textwrap
from typing import Any

from typer.core import TyperCommand

# What each command is registered with (`common.app`): its place among all, in the order in which a model goes through them.
PLACES: dict[str, int] = {}
EXAMPLES: dict[str, tuple[str, ...]] = {}
NOT_VERIFIED = 5
EXIT_CODES = (
    "Exit codes: 0 ok, 1 verification failed, 2 usage, 3 model refused, 4 missing dependency or resource, "
    "5 verify neither passed nor failed, 70 defect of bnexport, 130 interrupted, 141 closed pipe."
)


def place(command: Any) -> int:
    """Return the place of a registered command among all."""
    return PLACES[command.name or command.callback.__name__]


class HelpfulCommand(TyperCommand):
    """A command whose help names its arguments as its messages do, and ends with examples."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [self.options_metavar or "", *(_shown(each) for each in self.params if _is_argument(each))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments = [(_shown(each), getattr(each, "help", "") or "") for each in self.params if _is_argument(each)]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        records = [each.get_help_record(ctx) for each in self.get_params(ctx) if not _is_argument(each)]
        with formatter.section("Options"):
            formatter.write_dl([record for record in records if record is not None])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Examples"):
            for example in EXAMPLES.get(self.name or "", ()):
                lines = textwrap.wrap(example, max(formatter.width - 6, 20), break_on_hyphens=False)
                formatter.write("  " + " \\\n      ".join(lines) + "\n")
        formatter.write_paragraph()
        formatter.write_text(EXIT_CODES)


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _shown(argument: Any) -> str:
    name = str(argument.metavar or argument.name).removesuffix("...")
    return f"{name}..." if argument.nargs == -1 else name
