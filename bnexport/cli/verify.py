"""The command verify: a file, or a torch module, against a file."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bnexport.cli.common import (
    NOT_VERIFIED,
    AllowUnexpected,
    Atol,
    FixedInitializers,
    Html,
    Inputs,
    Json,
    Key,
    ProofSeconds,
    Providers,
    Rtol,
    Seed,
    app,
)
from bnexport.cli.fold import inputs_of, method_of, outputs_of, verdict
from bnexport.cli.output import (
    check_exists,
    check_targets,
    complain,
    detail,
    emit,
    is_verbose,
    say,
    status,
    write_page,
)
from bnexport.errors import UsageError, VerificationError
from bnexport.pages import table


@app.command(
    place=60,
    examples=(
        "bnexport verify kept.onnx folded.onnx",
        "bnexport verify package:network model.onnx --checkpoint weights.pth",
        "bnexport verify kept.onnx folded.onnx -i x:image.npy",
    ),
)
def verify(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="A", help="The reference: an ONNX file, or a torch module as `bnexport export` takes it."
        ),
    ],
    candidate: Annotated[
        Path, typer.Argument(metavar="B", help="The file to check: ONNX; .pt or .pt2 where A is a module.")
    ],
    inputs: Inputs = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weights of a module A, as `bnexport export` reads them.")
    ] = None,
    key: Key = None,
    allow_unexpected: AllowUnexpected = False,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="A=B",
            help="An input or output of A, and what B calls it. Repeatable. Outputs of one alone are left out.",
        ),
    ] = None,
    seed: Seed = 0,
    atol: Atol = None,
    rtol: Rtol = None,
    proof_seconds: ProofSeconds = None,
    method: Annotated[
        str,
        typer.Option(
            metavar="local|whole|both",
            help="Prove the folds that tell A and B apart (local), run both models (whole), or both.",
        ),
    ] = "both",
    provider: Providers = None,
    fixed_initializers: FixedInitializers = False,
    allow_not_verified: Annotated[
        bool,
        typer.Option("--allow-not-verified", help="Exit with 0 instead of 5 if the models could not be verified."),
    ] = False,
    html: Html = None,
    json_target: Json = None,
) -> int:
    """Compares a file or module with a file. Their folds are proved.

    The folds are those of the certificate in B, or those that are found. Where B fails, the first module that differs is named.
    """
    from bnexport.cli.input_options import calm, feeds_of
    from bnexport.exporting import against_file

    check_targets(html=html, json=json_target)
    given = _names(names)
    source: Any = reference
    quiet: Any = contextlib.nullcontext()
    if _is_module(reference):
        source, feeds = _module(reference, candidate, inputs, seed, checkpoint, key, allow_unexpected)
        quiet = calm()
    elif checkpoint is not None:
        raise UsageError(f"--checkpoint: got weights for the file {reference}, expected a module as A")
    else:
        feeds = feeds_of(inputs, seed, Path(reference))
    with status(f"comparing {reference} and {candidate}"), quiet:
        result = against_file.verify(
            source,
            candidate,
            inputs=feeds or None,
            seed=seed,
            atol=atol,
            rtol=rtol,
            proof_seconds=proof_seconds,
            providers=provider or (),
            method=method_of(True, method),
            fixed_initializers=fixed_initializers,
            names=given,
        )
    tables = [*outputs_of(f"{reference} and {candidate}", result), *_proofs(result.sites)]
    if html is not None:
        write_page(html, [verdict(result)], tables)
    if result.certificate.startswith("not used"):
        say(f"note: the certificate in {candidate} was {result.certificate}")
    if result.passed:
        say(verdict(result))
        detail(inputs_of(result))
    emit(result.to_dict(), json_target, tables)
    if result.status == "not_verified":
        if allow_not_verified:
            say(f"warning: {result.summary()}")
            return 0
        complain(result.summary())
        return NOT_VERIFIED
    if not result.passed:
        place = f"; {result.place}" if result.place else ""
        raise VerificationError(f"{candidate} differs from {reference}: {result.reason}{place}; {result.proved}")
    return 0


def _is_module(reference: str) -> bool:
    """Whether A is a module, by the form of its name, and no ONNX file."""
    if reference.endswith(".pt2"):
        return True
    return ":" in reference and not reference.endswith(".onnx") and not Path(reference).exists()


def _names(texts: list[str] | None) -> dict[str, str] | None:
    found = {}
    for text in texts or ():
        mine, _, theirs = text.partition("=")
        if not mine or not theirs:
            raise UsageError(f"--map: got {text!r}, expected A's name and B's, such as out=logits")
        found[mine] = theirs
    return found or None


def _module(
    reference: str,
    candidate: Path,
    inputs: list[str] | None,
    seed: int,
    checkpoint: Path | None,
    key: str | None,
    allow_unexpected: bool,
) -> tuple[Any, Any]:
    """Build the module that A names, and its example inputs; None where the file states what it takes."""
    from bnexport.cli.input_options import (
        build,
        build_named,
        check_reference,
        example_inputs,
        load_weights,
        parse,
        parse_name,
    )

    check_exists(candidate, "B")
    check_exists(checkpoint, "--checkpoint")
    arguments = parse(inputs or ())
    name = None if reference.endswith(".pt2") else parse_name(reference)
    if name is None and not reference.endswith(".pt2"):
        check_reference(reference, "A")
    with contextlib.redirect_stdout(sys.stderr):
        module: Any = reference
        if name is not None:
            module, arguments = build_named(name, arguments)
        elif not reference.endswith(".pt2"):
            module = build(reference)
        if checkpoint is not None:
            load_weights(module, checkpoint, key, allow_unexpected)
        elif name is not None:
            say(f"note: the weights of {reference} are random; --checkpoint loads those of the file")
    if not arguments:
        return module, None
    given, tensors = example_inputs(arguments, seed)
    return module, dict(zip(given, tensors))


def _proofs(sites: Any) -> list[Any]:
    """Return a table of the folds that were proved, or only those that were not where there are many."""
    shown = sites if is_verbose() else [site for site in sites if site.method != "proved"]
    rows = [(site.site, site.method, f"{site.error:.2g}", f"{site.bound:.2g}", site.reason) for site in shown]
    columns = ("fold of", "mark", "error", "bound", "")
    return [table(f"{len(shown)} of {len(sites)} folds", columns, rows, right=columns[2:4])] if rows else []
