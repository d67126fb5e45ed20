"""Command inline: model-local functions replaced by their bodies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bnexport import choices
from bnexport.cli import startup
from bnexport.cli.common import Atol, Inputs, Json, Overwrite, Rtol, Seed, app
from bnexport.cli.console import say, status
from bnexport.cli.inputs import feeds_of
from bnexport.cli.models import verdict
from bnexport.cli.output import check_exists, check_new, check_targets, emit, table
from bnexport.errors import UsageError


@app.command()
def inline(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="The ONNX file to inline; unchanged unless it is OUT, too.")
    ],
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
    choices.check_onnx_suffix(target, "OUT")
    if not overwrite and source.exists() and target.exists() and source.samefile(target):
        raise UsageError(
            f"OUT: got {str(target)!r}, which is IN; write to another file, or replace IN with --overwrite"
        )
    check_exists(source, "IN")
    check_new(target, overwrite)
    from bnexport import folding

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
            overwrite_input=overwrite,
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
        say(verdict(result.verification))
    rows = [(name, "inlined", count) for name, count in sorted(result.calls.items())]
    if result.converted:
        rows.append(("MMCVSyncBatchNorm in inference", "converted to BatchNormalization", result.converted))
    tables = [table(str(target), ("function", "", "calls"), rows, right=["calls"])] if rows else []
    emit(result.to_dict(), json_target, tables)
