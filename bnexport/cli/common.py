"""The application, and options that all commands share."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from bnexport.cli.output import set_level
from bnexport.errors import MissingFileError, UsageError

# Help as a terminal shows it: plain names of arguments, examples, and the exit codes.

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


_Function = TypeVar("_Function", bound=Callable[..., Any])


class _App(typer.Typer):
    """Every command takes -q, -v, --limit and --library, because it is registered here."""

    def command(  # type: ignore[override]
        self, name: str | None = None, *, place: int, examples: tuple[str, ...], **options: Any
    ) -> Callable[[_Function], _Function]:
        """Register a command. place: among all, in help. examples: lines of its help."""
        register = super().command(name, cls=HelpfulCommand, **options)

        def decorate(function: _Function) -> _Function:
            register(_with_common_options(function))
            shown = name or function.__name__
            PLACES[shown], EXAMPLES[shown] = place, examples
            return function

        return decorate


app = _App(
    name="bnexport",
    help="From a model trained with sync batch norm to one that runs anywhere.",
    epilog=EXIT_CODES,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _bound(value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise typer.BadParameter(f"{value:g} is no bound, expected a finite number >= 0.")
    return value


Json = Annotated[
    str | None, typer.Option("--json", metavar="PATH|-", help="Write the result as JSON to a file, or to stdout.")
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        "-i",
        metavar="NAME:1,3,224,224|NAME:FILE.npy|FILE.npz",
        help="An input: a shape for random numbers, or a NumPy file. Repeatable.",
    ),
]
Seed = Annotated[int, typer.Option(metavar="INT", min=0, help="Seed of random inputs.")]
Atol = Annotated[
    float | None, typer.Option(metavar="FLOAT", callback=_bound, help="Absolute bound instead of the table's.")
]
Rtol = Annotated[
    float | None, typer.Option(metavar="FLOAT", callback=_bound, help="Relative bound instead of the table's.")
]
ProofSeconds = Annotated[
    float | None,
    typer.Option(
        metavar="FLOAT", callback=_bound, help="Processor time for the proof, instead of what the size allows."
    ),
]
Providers = Annotated[
    list[str] | None,
    typer.Option("--provider", metavar="NAME", help="An execution provider, such as cuda; repeatable. Default: cpu."),
]
FixedInitializers = Annotated[
    bool,
    typer.Option("--fixed-initializers", help="No caller overrides initializers that are inputs as well."),
]
Certificate = Annotated[
    bool,
    typer.Option(
        "--certificate/--no-certificate",
        help="Write the names of each fold's nodes into the file, so that verify can prove it.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists, atomically.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="PATH", help="Write the result as an HTML page.")]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file.")]
Source = Annotated[Path, typer.Argument(metavar="IN", help="The ONNX file; unchanged unless it is OUT, too.")]
Key = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Where the weights are in the checkpoint, such as state_dict_ema or ema.module."),
]
AllowUnexpected = Annotated[
    bool, typer.Option("--allow-unexpected", help="Ignore names of the checkpoint that the module does not have.")
]
VerifyWithTorch = Annotated[bool, typer.Option("--verify/--no-verify", help="Compare with torch.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only, and JSON if asked for.")]
_Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print more messages, and the traceback of an error.")]


_Limit = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=NUMBER",
        help="Raise a limit on model files, such as nodes=5000000, or allow_links=yes. Repeatable.",
    ),
]


_Library = Annotated[
    list[str] | None,
    typer.Option(
        "--library",
        metavar="PATH",
        help="A custom-op library of another project, whose operators the model needs to run. Its code is run. Repeatable.",
    ),
]


@contextlib.contextmanager
def _in_environment(variable: str, values: list[str], separator: str) -> Iterator[None]:
    """Add the values of an option to a variable, where the processes that we start find them, too."""
    before = os.environ.get(variable)
    if values:
        os.environ[variable] = separator.join([*([before] if before else []), *values])
    try:
        yield
    finally:
        if before is not None:
            os.environ[variable] = before
        elif values:
            del os.environ[variable]


@contextlib.contextmanager
def _settings(limit: list[str] | None, library: list[str] | None) -> Iterator[None]:
    """Put the settings of --limit and --library into the environment."""
    from bnexport.model_io import limits
    from bnexport.native.library import OTHERS_VARIABLE

    limits.parse(limit or [], "--limit")
    for path in library or ():
        if not os.path.isfile(path):
            raise MissingFileError(f"--library: {path}: no such file; check the path")
    paths = [os.path.abspath(path) for path in library or ()]
    with (
        _in_environment(limits.ENVIRONMENT_VARIABLE, limit or [], ","),
        _in_environment(OTHERS_VARIABLE, paths, os.pathsep),
    ):
        yield


def _with_common_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with -q, -v, --limit and --library behind its own options."""

    @functools.wraps(function)
    def run(*, quiet: bool, verbose: bool, limit: list[str] | None, library: list[str] | None, **options: Any) -> Any:
        if quiet and verbose:
            raise UsageError("--quiet, --verbose: got both, expected one of them at most")
        set_level(quiet=quiet, verbose=verbose)
        with _settings(limit, library) if limit or library else contextlib.nullcontext():
            return function(**options)

    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(function, eval_str=True).parameters.values()
    ]
    common = (
        *(("quiet", False, _Quiet), ("verbose", False, _Verbose)),
        *(("limit", None, _Limit), ("library", None, _Library)),
    )
    for name, default, annotation in common:
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
