"""The command line: arguments in, library calls, tables or JSON out.

Data go to stdout, messages to stderr. Exit codes: 0 ok, 1 verification failed, 2 usage, 3 model
refused, 4 environment.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bnexport import __version__
from bnexport.errors import BnexportError, MissingDependencyError, UsageError, VerificationError

# typer carries click inside since 0.20 and depends on it before: the base class is found by its name.
_ClickException: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

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
    err.print(f"[red]error:[/red] {_escape(' '.join(message.split()))}", soft_wrap=True)
    return code


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _emit(data: dict[str, Any], target: str | None, tables: list[Table]) -> None:
    """The result as JSON where asked for, else as tables."""
    if target is None:
        for table in tables:
            out.print(table)
        return
    text = json.dumps(data, indent=2, default=str)
    if target == "-":
        sys.stdout.write(text + "\n")
        return
    _write_whole(Path(target), text + "\n")


def _write_whole(target: Path, text: str) -> None:
    """The file appears whole or not at all."""
    temporary = Path(f"{target}.part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, target)


def _status(message: str) -> Any:
    """A spinner on a terminal; nothing elsewhere."""
    return err.status(message) if err.is_terminal else _Silent()


class _Silent:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@app.command()
def inspect(model: Model, json_target: Json = None) -> None:
    """What is in a model: operators, batch norms, groups, sizes."""
    from bnexport import folding

    report = folding.inspect(model)
    summary = Table(title=str(model), show_header=False)
    summary.add_row("producer", report.producer)
    summary.add_row(
        "IR version, opsets",
        f"{report.ir_version}, " + ", ".join(f"{name or 'onnx'} {v}" for name, v in report.opsets.items()),
    )
    summary.add_row("inputs", "\n".join(_value(value) for value in report.inputs))
    summary.add_row("outputs", "\n".join(_value(value) for value in report.outputs))
    summary.add_row(
        "nodes",
        f"{report.nodes:,} ({', '.join(f'{count} {name}' for name, count in list(report.op_counts.items())[:8])})",
    )
    summary.add_row("parameters", f"{report.parameter_count:,} ({report.parameter_bytes:,} bytes)")
    summary.add_row("functions", ", ".join(report.functions) or "none")
    summary.add_row("groups", ", ".join(f"{name or 'none'} (size {size})" for name, size in report.groups) or "none")
    sites = Table(title=f"{len(report.batch_norms)} batch norms")
    for column in ("node", "operator", "channels", "input", "attributes"):
        sites.add_column(column, overflow="fold")
    for site in report.batch_norms:
        attributes = ", ".join(f"{name}={_attribute(value)}" for name, value in site.attributes.items() if value != "")
        sites.add_row(
            site.node,
            f"{site.domain or 'onnx'}:{site.op_type}",
            str(site.channels or ""),
            _shape(site.input_shape),
            attributes,
        )
    _emit(report.to_dict(), json_target, [summary, sites])


def _attribute(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _value(value: Any) -> str:
    return f"{value.name}: {value.dtype} {_shape(value.shape)}"


def _shape(shape: tuple[Any, ...] | None) -> str:
    return "" if shape is None else "(" + ", ".join("?" if size is None else str(size) for size in shape) + ")"


@app.command()
def fold(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The ONNX file to fold; it is never changed.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Where the folded model goes.")],
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Run both models and compare them.")] = True,
    explain: Annotated[str | None, typer.Option(metavar="NODE", help="Say what happened to one node, and why.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="Fold this batch norm only; repeatable.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="Leave this batch norm alone; repeatable.")
    ] = None,
    training_to_inference: Annotated[
        bool,
        typer.Option("--training-to-inference", help="Also turn BatchNormalization in training mode into inference."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Allow OUT to be IN; it is replaced as a whole.")
    ] = False,
    seed: Seed = 0,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="PATH", help="Write the report as one HTML page.")
    ] = None,
    json_target: Json = None,
) -> None:
    """Turns sync batch norm into BatchNormalization and folds it into the weights beside it."""
    from bnexport import folding
    from bnexport.folding import html_report

    with _status(f"folding {source}"):
        result = folding.fold(
            source,
            target,
            verify=verify,
            seed=seed,
            only=only or None,
            skip=skip or (),
            training_to_inference=training_to_inference,
            overwrite_input=overwrite,
        )
    report = result.report
    if html is not None:
        _write_whole(html, html_report.render_html(report.to_dict()))
    _emit(report.to_dict(), json_target, folding.render(report))
    if explain is not None:
        site = report.explain(explain)
        if site is None:
            raise UsageError(
                f"--explain: got {explain!r}, expected a batch norm of the model: {', '.join(n for s in report.sites for n in s.nodes)}"
            )
        err.print(
            f"{explain}: {site.outcome}" + (f" into {', '.join(site.targets)}" if site.targets else f": {site.reason}")
        )
    if not report.changed:
        err.print(f"nothing to fold: {target} is an unchanged copy")
    else:
        before, after = (counts.batch_norm + counts.sync_batch_norm for counts in (report.before, report.after))
        err.print(f"{before - after} of {before} batch norms folded; {target} written", soft_wrap=True)
    if report.meaning_changed:
        err.print(
            "note: the graph trained; it is an inference graph now, with its stored running statistics", soft_wrap=True
        )
    for note in report.notes:
        err.print(f"note: {note}", soft_wrap=True)
    if report.verification is not None:
        err.print(_verdict(report.verification), soft_wrap=True)


def _verdict(result: Any) -> str:
    if result.status == "not verified":
        return f"not verified: {result.reason}"
    against = "" if result.reference == "original" else " from the converted, unfolded graph"
    return f"verification {result.status}: largest difference{against} {result.max_abs_diff:.3g}, relative {result.max_rel_diff:.3g}"


@app.command()
def verify(
    reference: Annotated[Path, typer.Argument(metavar="A", help="The reference.")],
    candidate: Annotated[Path, typer.Argument(metavar="B", help="The model to check.")],
    inputs: Inputs = None,
    seed: Seed = 0,
    atol: Annotated[float | None, typer.Option(help="Absolute bound instead of the table's.")] = None,
    rtol: Annotated[float | None, typer.Option(help="Relative bound instead of the table's.")] = None,
    json_target: Json = None,
) -> None:
    """Runs two models on the same inputs and compares every output."""
    from bnexport import folding

    feeds = _feeds(inputs, seed, reference)
    with _status(f"comparing {reference} and {candidate}"):
        result = folding.verify(reference, candidate, inputs=feeds or None, seed=seed, atol=atol, rtol=rtol)
    table = Table(title=f"{reference} and {candidate}")
    for column in ("output", "type", "largest difference", "relative", "allowed", ""):
        table.add_column(column, overflow="fold")
    for output in result.outputs:
        allowed = f"{output.atol:.3g}" + (f" + {output.rtol:.3g} |y|" if output.rtol else "")
        verdict = "ok" if output.passed else f"differs: {output.reason}"
        table.add_row(
            output.name, output.dtype, f"{output.max_abs_diff:.3g}", f"{output.max_rel_diff:.3g}", allowed, verdict
        )
    _emit(result.to_dict(), json_target, [table])
    if result.status == "not verified":
        raise MissingDependencyError(f"not verified: {result.reason}")
    if not result.passed:
        raise VerificationError(f"{candidate} differs from {reference}: {result.reason}")
    err.print(_verdict(result))


@app.command()
def run(
    model: Model,
    inputs: Inputs = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE.npz", help="Save the outputs.")] = None,
    seed: Seed = 0,
    json_target: Json = None,
) -> None:
    """Runs a model once in ONNX Runtime, with the custom-op library where the model needs it."""
    import numpy as np

    from bnexport.runtime import execution

    with _status(f"running {model}"):
        done = execution.run(model, _feeds(inputs, seed, model))
    results = done.outputs
    table = Table(title=f"{model}: {done.seconds * 1e3:.1f} ms" + (", custom-op library" if done.library else ""))
    for column in ("output", "type", "shape", "min", "mean", "max"):
        table.add_column(column, overflow="fold")
    rows = []
    for name, value in results.items():
        array = np.asarray(value)
        numbers = (
            [float(f(array)) for f in (np.min, np.mean, np.max)]
            if array.size and array.dtype.kind in "biuf"
            else [float("nan")] * 3
        )
        table.add_row(name, str(array.dtype), str(list(array.shape)), *(f"{number:.6g}" for number in numbers))
        rows.append(
            {
                "name": name,
                "dtype": str(array.dtype),
                "shape": list(array.shape),
                "min": numbers[0],
                "mean": numbers[1],
                "max": numbers[2],
            }
        )
    if output is not None:
        temporary = output.with_name(output.name + ".part")
        with temporary.open("wb") as file:
            np.savez(file, **results)  # type: ignore[arg-type]
        os.replace(temporary, output)
    _emit(
        {"schema_version": 1, "model": str(model), "seconds": done.seconds, "library": done.library, "outputs": rows},
        json_target,
        [table],
    )


def _feeds(inputs: list[str] | None, seed: int, model: Path) -> dict[str, Any]:
    """--input arguments as arrays: a .npy file, or random numbers of a shape in the type the model asks for."""
    import numpy as np

    from bnexport.model_io import load

    feeds: dict[str, Any] = {}
    if not inputs:
        return feeds
    graph = load(model).graph
    types = {str(value.name): value.dtype for value in graph.inputs}
    generator = np.random.default_rng(seed)
    for text in inputs:
        name, separator, value = text.partition(":")
        if not separator or name not in types:
            raise UsageError(
                f"--input: got {text!r}, expected NAME:FILE.npy or NAME:SHAPE with NAME one of {', '.join(types) or 'none'}"
            )
        dtype = types[name]
        shape = _parse_shape(value)
        if shape is not None:
            feeds[name] = generator.standard_normal(shape).astype(np.float32 if dtype is None else dtype.numpy())
            continue
        try:
            feeds[name] = np.load(value, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UsageError(f"--input {name}: cannot read {value!r} as a NumPy file: {error}") from error
    return feeds


def _parse_shape(text: str) -> tuple[int, ...] | None:
    parts = text.split(",")
    return tuple(int(part) for part in parts) if all(part.strip().isdigit() for part in parts) else None


@app.command()
def export(
    factory: Annotated[
        str, typer.Argument(metavar="MODULE:FACTORY", help="A function, or class, that builds the torch module.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.")],
    inputs: Annotated[
        list[str],
        typer.Option("--input", "-i", metavar="NAME:1,3,224,224", help="Shape (or .npy file) of each input, in order."),
    ],
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="A state_dict saved by torch.save, or a dict with one under state_dict or model."),
    ] = None,
    mode: Annotated[str, typer.Option(help="deploy: folded inference. custom_op: the node is kept.")] = "deploy",
    exporter: Annotated[str, typer.Option(help="For ONNX: dynamo or torchscript.")] = "dynamo",
    file_format: Annotated[str, typer.Option("--format", help="onnx, torchscript or pt2.")] = "onnx",
    fold: Annotated[bool, typer.Option("--fold/--no-fold", help="Fold batch norms, in mode deploy.")] = True,
    train: Annotated[
        bool, typer.Option("--train/--eval", help="The mode of the module; training graphs return new statistics.")
    ] = False,
    dynamic: Annotated[bool, typer.Option("--dynamic/--static", help="Dynamic batch and spatial sizes.")] = True,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare with torch.")] = True,
    seed: Seed = 0,
    json_target: Json = None,
) -> None:
    """Exports a torch module, for example: bnexport export models.resnet:digits_resnet out.onnx --input x:1,1,8,8"""
    from bnexport import exporting, folding

    model = _build(factory, checkpoint)
    names, args = _example_inputs(inputs, seed)
    with _status(f"exporting {factory}"):
        result = exporting.export(
            model.train(train),
            args,
            target,
            mode=mode,  # type: ignore[arg-type]
            exporter=exporter,  # type: ignore[arg-type]
            format=file_format,  # type: ignore[arg-type]
            fold=fold,
            dynamic=dynamic,
            verify=verify,
            input_names=names if file_format == "onnx" else None,
        )
    tables = [] if result.report is None else folding.render(result.report)
    _emit({"schema_version": 1, **result.to_dict()}, json_target, tables)
    for note in result.notes:
        err.print(f"note: {note}", soft_wrap=True)
    err.print(
        f"{target} written; {'verified: ' if result.verification.passed else ''}{result.verification.summary()}",
        soft_wrap=True,
    )


def _build(factory: str, checkpoint: Path | None) -> Any:
    import torch

    module_name, separator, attribute = factory.partition(":")
    if not separator:
        raise UsageError(f"got {factory!r}, expected MODULE:FACTORY, such as models.resnet:digits_resnet")
    sys.path.insert(0, os.getcwd())
    try:
        target = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{factory}: cannot be imported: {error}") from error
    model = target if isinstance(target, torch.nn.Module) else target()
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{factory}: got a {type(model).__name__}, expected a torch.nn.Module")
    if checkpoint is not None:
        _load_checkpoint(model, checkpoint)
    return model


def _load_checkpoint(model: Any, path: Path) -> None:
    import torch

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UsageError(f"--checkpoint {path}: cannot be read: {error}") from error
    for key in ("state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    state = {str(name).removeprefix("module."): value for name, value in loaded.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if missing or unexpected:
        raise UsageError(
            f"--checkpoint {path}: missing {', '.join(missing) or 'nothing'}; unexpected {', '.join(unexpected) or 'nothing'}"
        )


def _example_inputs(inputs: list[str], seed: int) -> tuple[list[str], tuple[Any, ...]]:
    import numpy as np
    import torch

    generator = torch.Generator().manual_seed(seed)
    names, args = [], []
    for text in inputs:
        name, separator, value = text.partition(":")
        if not separator:
            raise UsageError(f"--input: got {text!r}, expected NAME:SHAPE or NAME:FILE.npy")
        shape = _parse_shape(value)
        if shape is None:
            try:
                args.append(torch.from_numpy(np.load(value, allow_pickle=False)))
            except (OSError, ValueError) as error:
                raise UsageError(f"--input {name}: cannot read {value!r} as a NumPy file: {error}") from error
        else:
            args.append(torch.randn(shape, generator=generator))
        names.append(name)
    return names, tuple(args)


@app.command()
def doctor(json_target: Json = None) -> None:
    """Versions, the custom-op library, execution providers: what works here, and what does not and why."""
    from bnexport.runtime.doctor import examine

    checks = examine()
    table = Table(title="bnexport doctor", show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    marks = {True: "[green]ok[/green]", False: "[red]no[/red]", None: "[yellow]--[/yellow]"}
    for check in checks:
        table.add_row(marks[check.ok], check.name, _escape(check.value))
    _emit({"schema_version": 1, "checks": [dataclasses.asdict(check) for check in checks]}, json_target, [table])
    broken = [f"{check.name}: {check.value}" for check in checks if check.ok is False]
    if broken:
        raise MissingDependencyError("; ".join(broken))


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        out.print(f"bnexport {__version__}")
        raise typer.Exit


if __name__ == "__main__":
    main()
