"""Commands on model files: inspect, fold, inline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bnexport import startup
from bnexport.cli.common import (
    Atol,
    Certificate,
    FixedInitializers,
    Html,
    Inputs,
    Json,
    Overwrite,
    ProofSeconds,
    Rtol,
    Seed,
    Source,
    app,
)
from bnexport.cli.output import (
    Bench,
    Explain,
    check_change,
    check_exists,
    check_targets,
    detail,
    emit,
    explain_site,
    is_verbose,
    latency_json,
    note_growth,
    result_line,
    say,
    status,
    write_page,
)
from bnexport.cli.run import first_feeds
from bnexport.errors import UsageError
from bnexport.pages import table


@app.command(
    place=20,
    examples=(
        "bnexport inspect model.onnx",
        "bnexport inspect kept.onnx folded.onnx --json -",
    ),
)
def inspect(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL...", help="ONNX files; several are put side by side.")],
    fixed_initializers: FixedInitializers = False,
    json_target: Json = None,
) -> None:
    """Lists a model's operators, batch norms, groups and sizes."""
    from bnexport import folding
    from bnexport.graph.inspection import side_by_side

    check_targets(json=json_target)
    reports = [folding.inspect(model, fixed_initializers=fixed_initializers) for model in models]
    for model, report in zip(models, reports):
        at = f"{model}: " if len(models) > 1 else ""
        for note in report.notes:
            say(f"note: {at}{note}")
        if not report.batch_norms:
            say(f"{at}no batch norms: there is nothing to fold, unless an exporter wrote them as arithmetic")
    if len(models) > 1:
        data = {"models": [report.to_dict() for report in reports]}
        emit(data, json_target, [side_by_side(list(map(str, models)), reports, everything=is_verbose())])
    else:
        emit(reports[0].to_dict(), json_target, reports[0].tables(everything=is_verbose()))


@app.command(
    place=40,
    examples=(
        "bnexport fold kept.onnx folded.onnx",
        "bnexport fold kept.onnx folded.onnx --html report.html -i x:1,3,224,224",
        "bnexport fold kept.onnx --explain backbone.layer1",
    ),
)
def fold(
    source: Source,
    target: Annotated[
        Path | None,
        typer.Argument(metavar="OUT", help="Where the folded model goes; with --explain it may be missing."),
    ] = None,
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
    proof_seconds: ProofSeconds = None,
    explain: Explain = None,
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
        typer.Option(metavar="batch-norm|conv|arithmetic", help="How to write batch norms that stay."),
    ] = "batch-norm",
    simplify: Annotated[
        bool, typer.Option("--simplify", help="Also evaluate shape arithmetic and remove nodes without effect.")
    ] = False,
    bench: Bench = False,
    fixed_initializers: FixedInitializers = False,
    standard_ops: Annotated[
        bool,
        typer.Option(help="Write operators of MMCV and MMDeploy as standard ones, or leave them."),
    ] = True,
    certificate: Certificate = True,
    overwrite: Overwrite = False,
    html: Html = None,
    json_target: Json = None,
) -> None:
    """Folds batch norms into the neighbouring weights."""
    check_targets(OUT=target, html=html, json=json_target)
    if target is not None:
        check_change(source, target, overwrite)
    elif explain is None or bench:
        raise UsageError("Missing argument 'OUT'; see bnexport fold --help")
    else:
        check_exists(source, "IN")
    from bnexport import folding
    from bnexport.cli.input_options import feeds_of

    if only or skip or explain:
        from bnexport.folding.folder import check_selection
        from bnexport.model_io import load

        names = {"only": only or (), "skip": skip or (), "explain": [explain] if explain else ()}
        check_selection(load(source), where=str(source), prefix="--", **names)
    verify = verify and target is not None
    feeds = feeds_of(inputs, seed, source) if verify else {}
    with status(f"folding {source}"):
        result = folding.fold(
            source,
            target,
            verify=method_of(verify, method),
            inputs=feeds or None,
            seed=seed,
            atol=atol,
            rtol=rtol,
            proof_seconds=proof_seconds,
            only=only or None,
            skip=skip or (),
            training_to_inference=training_to_inference,
            leftover=leftover,  # type: ignore[arg-type]
            simplify=simplify,
            overwrite=overwrite,
            certificate=certificate,
            fixed_initializers=fixed_initializers,
            standard_ops=standard_ops,
        )
    startup.settle()
    report = result.report
    if html is not None:
        write_html(report, html)
    explain_site(report, explain)
    if target is None:
        if json_target:
            emit(report.to_dict(), json_target, [])
        return
    if simplify:
        say(f"{report.summary()}; {report.before.nodes:,} nodes before, {report.after.nodes:,} after; {target} written")
    elif not report.changed:
        say(f"nothing to fold: {target} is the same model{', but for the notes' * bool(report.notes)}")
    else:
        say(f"{report.summary()}; {target} written")
    if report.meaning_changed:
        say("note: the graph trained; it is an inference graph now, with its stored running statistics")
    for note in report.notes:
        say(f"note: {note}")
    note_growth(report)
    if report.uncertified:
        detail(f"note: {report.uncertified}")
    if report.verification is not None:
        say(verdict(report.verification))
        detail(inputs_of(report.verification))
    ratio = None
    if bench and (report.changed or simplify):
        from bnexport.cli import latency

        shown = feeds or first_feeds(source, inputs, seed)[0]
        with status("timing both models"):
            ratio = latency.compare(source, target, shown)
    data = report.to_dict() | (latency_json(ratio) if bench else {})
    emit(data, json_target, [] if json_target else folding.render(report, everything=is_verbose()))
    if bench:
        say(result_line(report, report.verification, ratio))


def method_of(verify: bool, method: str | None) -> Any:
    """Return the argument `verify` of the fold."""
    if method is None or not verify:
        return verify
    if method not in ("local", "whole", "both"):
        raise UsageError(f"--method: got {method!r}, expected local, whole or both")
    return method


def write_html(report: Any, path: Path) -> None:
    """Write the page of a fold: what the command prints, with every batch norm."""
    from bnexport import folding

    result = report.verification
    tables = folding.render(report, everything=True, most=None)
    write_page(path, report.lines(), tables + ([] if result is None else result.tables("Outputs")))


def verdict(result: Any, *, wanted: bool = True, folds: bool = True) -> str:
    """Return the line that every command prints about a verification. folds: whether to count folds."""
    unasked = result.status != "not_verified" or not wanted
    return f"{'' if unasked else 'warning: '}{result.line(folds=folds)}"


def inputs_of(result: Any) -> str:
    """Return one line about the inputs of a verification."""
    if not result.samples:
        return "verified without inputs: no model was run"
    return f"verified with {result.samples} set{'s' * (result.samples != 1)} of inputs, seed {result.seed}"


# Command inline: model-local functions replaced by their bodies.


@app.command(
    place=50,
    examples=(
        "bnexport inline kept.onnx plain.onnx",
        "bnexport inline kept.onnx plain.onnx -i x:1,3,224,224",
    ),
)
def inline(
    source: Source,
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Where the model without functions goes.")],
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare the outputs of both models.")] = True,
    inputs: Inputs = None,
    seed: Seed = 0,
    atol: Atol = None,
    rtol: Rtol = None,
    overwrite: Overwrite = False,
    json_target: Json = None,
) -> None:
    """Replaces model-local functions by their bodies."""
    check_targets(OUT=target, json=json_target)
    check_change(source, target, overwrite)
    from bnexport import folding
    from bnexport.cli.input_options import feeds_of

    feeds = feeds_of(inputs, seed, source) if verify else {}
    with status(f"inlining {source}"):
        result = folding.inline(
            source,
            target,
            verify=verify,
            inputs=feeds or None,
            seed=seed,
            atol=atol,
            rtol=rtol,
            overwrite=overwrite,
        )
    startup.settle()
    if not result.changed:
        say(f"no functions to inline: {target} is an unchanged copy")
    else:
        parts = (
            [f"{sum(result.calls.values()):,} calls of {len(result.calls)} functions inlined"] if result.calls else []
        )
        if result.converted:
            parts.append(f"{result.converted:,} sync batch norms in inference converted to BatchNormalization")
        say(f"{', '.join(parts)}; {target} written")
    if result.foreign:
        say(f"note: operators of other domains remain: {', '.join(result.foreign[:8])}")
    if result.verification is not None:
        say(verdict(result.verification, folds=False))
    rows = [(name, "inlined", count) for name, count in sorted(result.calls.items())]
    if result.converted:
        rows.append(("MMCVSyncBatchNorm in inference", "converted to BatchNormalization", result.converted))
    tables = [table(str(target), ("function", "", "calls"), rows, right=["calls"])] if rows else []
    emit(result.to_dict(), json_target, tables)
