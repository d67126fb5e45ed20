"""Commands on model files: inspect, fold, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bnexport.cli import startup
from bnexport.cli.common import Atol, Certificate, Html, Inputs, Json, Model, Providers, Rtol, Seed, app
from bnexport.cli.console import detail, is_verbose, say, status
from bnexport.cli.output import check_change, check_targets, emit, table, write_whole
from bnexport.cli.recalibrate import Batch
from bnexport.errors import MissingDependencyError, UsageError, VerificationError


@app.command()
def inspect(model: Model, json_target: Json = None) -> None:
    """Lists a model's operators, batch norms, groups and sizes."""
    from bnexport import folding

    check_targets(json=json_target)
    report = folding.inspect(model)
    kinds = [f"{count} {name}" for name, count in report.op_counts.items()]
    shown = len(kinds) if is_verbose() else 8
    if len(kinds) > shown:
        rest = sum(list(report.op_counts.values())[shown:])
        kinds[shown:] = [f"and {rest} of {len(kinds) - shown} more kinds"]
    operators = ", ".join(kinds)
    opsets = ", ".join(f"{name or 'onnx'} {version}" for name, version in report.opsets.items())
    summary = (
        ("producer", report.producer),
        ("IR version, opsets", f"{report.ir_version}, {opsets}"),
        ("inputs", "\n".join(_value(value) for value in report.inputs)),
        ("outputs", "\n".join(_value(value) for value in report.outputs)),
        ("nodes", f"{report.nodes:,} ({operators})"),
        ("parameters", f"{report.parameter_count:,} ({report.parameter_bytes:,} bytes)"),
        ("functions", ", ".join(report.functions) or "none"),
        ("groups", ", ".join(f"{name or 'none'} (size {size})" for name, size in report.groups) or "none"),
        ("external files", ", ".join(report.external_files) or "none"),
    )
    sites = [
        (
            site.node,
            f"{site.domain or 'onnx'}:{site.op_type}",
            site.channels or "",
            _shape(site.input_shape),
            ", ".join(f"{name}={_attribute(value)}" for name, value in site.attributes.items() if value != ""),
        )
        for site in report.batch_norms
    ]
    tables = [table(str(model), ("", ""), summary)]
    if sites:
        tables.append(
            table(
                f"{len(sites)} batch norms",
                ("node", "operator", "channels", "input", "attributes"),
                sites,
                right=["channels"],
            )
        )
    for note in report.notes:
        say(f"note: {note}")
    if not sites:
        say("no batch norms: there is nothing to fold, unless an exporter wrote them as arithmetic")
    emit(report.to_dict(), json_target, tables)


def _attribute(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _value(value: Any) -> str:
    return f"{value.name}: {value.dtype} {_shape(value.shape)}"


def _shape(shape: tuple[Any, ...] | None) -> str:
    return "" if shape is None else "(" + ", ".join("?" if size is None else str(size) for size in shape) + ")"


@app.command()
def fold(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="The ONNX file to fold; unchanged unless it is OUT, too.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Where the folded model goes.")],
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Prove each fold, and compare the outputs of both models.")
    ] = True,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="local|whole|both", help="How to verify. Default: both up to 1 GiB of weights, then local."
        ),
    ] = None,
    inputs: Inputs = None,
    seed: Seed = 0,
    atol: Atol = None,
    rtol: Rtol = None,
    explain: Annotated[str | None, typer.Option(metavar="NODE", help="Say what happened to one node, and why.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="Fold this batch norm only. Repeatable.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="Leave this batch norm alone. Repeatable.")
    ] = None,
    training_to_inference: Annotated[
        bool,
        typer.Option("--training-to-inference", help="Also turn BatchNormalization in training mode into inference."),
    ] = False,
    leftover: Annotated[
        str,
        typer.Option(metavar="batch-norm|conv|arithmetic", help="The form of batch norms that stay."),
    ] = "batch-norm",
    simplify: Annotated[
        bool, typer.Option("--simplify", help="Also evaluate shape arithmetic and remove nodes without effect.")
    ] = False,
    recalibrate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:FILE.npy|FOLDER", help="First re-estimate the running statistics on these rows. Repeatable."
        ),
    ] = None,
    batch: Batch = 32,
    certificate: Certificate = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT where it exists, as a whole; it may be IN.")
    ] = False,
    html: Html = None,
    json_target: Json = None,
) -> None:
    """Folds batch norms into the weights beside them."""
    check_targets(OUT=target, html=html, json=json_target)
    check_change(source, target, overwrite)
    from bnexport import folding
    from bnexport.cli.inputs import feeds_of

    if only or skip or explain:
        from bnexport.folding.selection import check_selection
        from bnexport.model_io import load

        names = {"only": only or (), "skip": skip or (), "explain": [explain] if explain else ()}
        check_selection(load(source), where=str(source), prefix="--", **names)
    feeds = feeds_of(inputs, seed, source) if verify else {}
    model: Any = source
    if recalibrate:
        from bnexport.cli import recalibrate as command

        model = command.run(source, None, recalibrate, batch).model
    with status(f"folding {source}"):
        result = folding.fold(
            model,
            target,
            verify=_method(verify, method),
            inputs=feeds or None,
            seed=seed,
            atol=atol,
            rtol=rtol,
            only=only or None,
            skip=skip or (),
            training_to_inference=training_to_inference,
            leftover=leftover,  # type: ignore[arg-type]
            simplify=simplify,
            overwrite_input=overwrite,
            certificate=certificate,
        )
    startup.settle()
    report = result.report
    if html is not None:
        write_html(report, html)
    if explain is not None:
        say(_explanation(explain, report.explain(explain)))
    if simplify:
        say(f"{report.summary()}; {report.before.nodes:,} nodes before, {report.after.nodes:,} after; {target} written")
    elif not report.changed:
        say(f"nothing to fold: {target} is an unchanged copy")
    else:
        say(f"{report.summary()}; {target} written")
    if report.meaning_changed:
        say("note: the graph trained; it is an inference graph now, with its stored running statistics")
    for note in report.notes:
        say(f"note: {note}")
    if report.verification is not None:
        say(verdict(report.verification))
        detail(_inputs_of(report.verification))
    emit(report.to_dict(), json_target, [] if json_target else folding.render(report, everything=is_verbose()))


def _method(verify: bool, method: str | None) -> Any:
    """Return the argument `verify` of the fold."""
    if method is None or not verify:
        return verify
    if method not in ("local", "whole", "both"):
        raise UsageError(f"--method: got {method!r}, expected local, whole or both")
    return method


def write_html(report: Any, path: Path) -> None:
    from bnexport.folding.reporting import html_report

    write_whole(path, html_report.render_html(report.to_dict()))


def _explanation(node: str, site: Any) -> str:
    if site is None:
        return f"{node}: no part of a batch norm, so there was nothing to do"
    return f"{node}: {site.outcome}" + (f" into {', '.join(site.targets)}" if site.targets else f": {site.reason}")


def verdict(result: Any, *, wanted: bool = True, folds: bool = True) -> str:
    """Return the line that every command prints about a verification. folds: whether anything can have been folded."""
    text = result.summary(folds=folds)
    if result.status == "not_verified":
        return f"{'warning: ' if wanted else ''}{text}"
    return f"verification {result.status}: {text}"


def _inputs_of(result: Any) -> str:
    """Return one line about the inputs of a verification."""
    if not result.samples:
        return "verified without inputs: no model was run"
    return f"verified with {result.samples} sets of inputs, seed {result.seed}"


def _proofs(sites: Any) -> list[Any]:
    """Return a table of the folds that were proved, or only those that were not where there are many."""
    shown = sites if is_verbose() else [site for site in sites if site.method != "proved"]
    rows = [(site.site, site.method, f"{site.error:.2g}", f"{site.bound:.2g}", site.reason) for site in shown]
    columns = ("fold of", "mark", "error", "bound", "")
    return [table(f"{len(shown)} of {len(sites)} folds", columns, rows, right=columns[2:4])] if rows else []


@app.command()
def verify(
    reference: Annotated[Path, typer.Argument(metavar="A", help="The reference.")],
    candidate: Annotated[Path, typer.Argument(metavar="B", help="The model to check.")],
    inputs: Inputs = None,
    seed: Seed = 0,
    atol: Atol = None,
    rtol: Rtol = None,
    method: Annotated[
        str,
        typer.Option(
            metavar="local|whole|both",
            help="Prove the folds that tell A and B apart (local), run both models (whole), or both.",
        ),
    ] = "both",
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="The fold's report (fold --json): prove each fold instead of running models."
        ),
    ] = None,
    provider: Providers = None,
    json_target: Json = None,
) -> None:
    """Compares two models on the same inputs and proves the folds.

    Those of the certificate in B, or those that are found.
    """
    from bnexport import folding
    from bnexport.cli.inputs import feeds_of

    check_targets(json=json_target)
    feeds = feeds_of(inputs, seed, reference)
    with status(f"comparing {reference} and {candidate}"):
        result = folding.verify(
            reference,
            candidate,
            inputs=feeds or None,
            seed=seed,
            atol=atol,
            rtol=rtol,
            providers=provider or (),
            method=_method(True, method),
            report=report,
        )
    rows = [
        (
            output.name,
            output.dtype,
            f"{output.max_abs_diff:.3g}",
            f"{output.max_rel_diff:.3g}",
            f"{output.atol:.3g}" + (f" + {output.rtol:.3g} |y|" if output.rtol else ""),
            "ok" if output.passed else f"{'differs' if output.decided else 'undecided'}: {output.reason}",
        )
        for output in result.outputs
    ]
    columns = ("output", "type", "largest difference", "relative", "allowed", "")
    tables = [table(f"{reference} and {candidate}", columns, rows, right=columns[2:4])] if rows else []
    tables += _proofs(result.sites)
    if result.certificate.startswith("not used"):
        say(f"note: the certificate in {candidate} was {result.certificate}")
    if result.passed:
        say(verdict(result))
        detail(_inputs_of(result))
    emit(result.to_dict(), json_target, tables)
    if result.status == "not_verified":
        raise MissingDependencyError(result.summary())
    if not result.passed:
        raise VerificationError(f"{candidate} differs from {reference}: {result.reason}; {result.proved}")
