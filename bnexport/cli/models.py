"""Commands on model files: inspect, fold, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from bnexport.cli.common import Inputs, Json, Model, Seed, app, emit, err, status, write_whole
from bnexport.cli.inputs import feeds_of
from bnexport.errors import MissingDependencyError, UsageError, VerificationError


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
    emit(report.to_dict(), json_target, [summary, sites])


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

    with status(f"folding {source}"):
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
        write_whole(html, html_report.render_html(report.to_dict()))
    emit(report.to_dict(), json_target, folding.render(report))
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

    feeds = feeds_of(inputs, seed, reference)
    with status(f"comparing {reference} and {candidate}"):
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
    emit(result.to_dict(), json_target, [table])
    if result.status == "not verified":
        raise MissingDependencyError(f"not verified: {result.reason}")
    if not result.passed:
        raise VerificationError(f"{candidate} differs from {reference}: {result.reason}")
    err.print(_verdict(result))
