"""Command inline: model-local functions replaced by their bodies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bnexport.cli import startup
from bnexport.cli.common import Atol, Inputs, Json, Overwrite, Rtol, Seed, app
from bnexport.cli.console import say, status
from bnexport.cli.models import verdict
from bnexport.cli.output import check_change, check_targets, emit, table


@app.command(
    place=50,
    examples=(
        "bnexport inline kept.onnx plain.onnx",
        "bnexport inline kept.onnx plain.onnx -i x:1,3,224,224",
    ),
)
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
    check_change(source, target, overwrite)
    from bnexport import folding
    from bnexport.cli.inputs import feeds_of

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
