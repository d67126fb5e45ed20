"""The command verify: a file, or a torch module, against a file."""

from __future__ import annotations

import contextlib
import csv
import shlex
import tempfile
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
from bnexport.cli.fold import inputs_of, method_of, verdict
from bnexport.cli.manifest import verify_pairs
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
    write_whole,
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
    context: typer.Context,
    reference: Annotated[
        str | None,
        typer.Argument(
            metavar="A", help="The reference: an ONNX file, or a torch module as `bnexport export` takes it."
        ),
    ] = None,
    candidate: Annotated[
        Path | None, typer.Argument(metavar="B", help="The file to check: ONNX; .pt or .pt2 where A is a module.")
    ] = None,
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
    manifest: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Verify many pairs: a line has A, B and options of its own. Pairs that the file of --json has are not run again.",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="INT", min=1, help="Pairs of a manifest to verify at a time.")] = 1,
    save_inputs: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write the inputs that show the verdict, both outputs, and the command that replays it."
        ),
    ] = None,
    html: Html = None,
    json_target: Json = None,
) -> int:
    """Compares a file or module with a file. Their folds are proved.

    The folds are those of the certificate in B, or those that are found. Where B fails, the first module that differs is named.
    """
    from bnexport.cli.input_options import calm, feeds_of
    from bnexport.exporting import against_file

    check_targets(html=html, json=json_target)
    if manifest is not None:
        if reference is not None or html is not None:
            what = "A" if reference is not None else "--html"
            raise UsageError(f"--manifest: got {what} as well; write it into the line of its pair")
        # Limits and libraries are in the environment.
        options = _typed(context, "manifest", "jobs", "limit", "library")
        return verify_pairs(manifest, jobs, options, json_target)
    if reference is None or candidate is None:
        raise UsageError(f"Missing argument {'A' if reference is None else 'B'!r}; see bnexport verify --help")
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
    with contextlib.ExitStack() as stack:
        folder = save_inputs
        if html is not None and folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(status(f"comparing {reference} and {candidate}"))
        stack.enter_context(quiet)
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
            save_inputs=folder,
        )
        pictures = [] if html is None or folder is None else witness_tables(folder)
    tables = [*result.tables(f"{reference} and {candidate}"), *_proofs(result.sites)]
    if html is not None:
        write_page(html, [verdict(result), *filter(None, [result.place])], [*tables, *pictures])
    if save_inputs is not None and result.witness:
        options = _typed(context, "reference", "candidate", "inputs", "save_inputs", "html")
        _save_command(save_inputs, reference, candidate, options)
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


def _typed(context: typer.Context, *without: str) -> list[str]:
    """Return the options of the command line, but for some and for those that say where the result goes."""
    found: list[str] = []
    for option in context.command.params:
        name = str(option.name)
        source, value = context.get_parameter_source(name), context.params.get(name)
        if name in (*without, "json_target", "quiet", "verbose") or getattr(source, "name", "") != "COMMANDLINE":
            continue
        for each in [True] if isinstance(value, bool) else value if isinstance(value, (list, tuple)) else [value]:
            found += [option.opts[0]] if each is True else [option.opts[0], str(each)]
    return found


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
    """Build the module that A names, and its example inputs; none where the file states what it takes."""
    from bnexport.cli.input_options import example_inputs, module_of, parse

    check_exists(candidate, "B")
    check_exists(checkpoint, "--checkpoint")
    module, arguments = reference, parse(inputs or ())
    if not reference.endswith(".pt2"):
        module, arguments = module_of(reference, "A", arguments, checkpoint, key, allow_unexpected)
    elif checkpoint is not None:
        raise UsageError(f"--checkpoint: {reference} has its own weights, expected a module as A")
    given, tensors = example_inputs(arguments, seed)
    return module, dict(zip(given, tensors))


def _save_command(folder: Path, reference: str, candidate: Path, options: list[str]) -> None:
    """Write the command that compares the same models on the saved inputs, and print it."""
    words = ["bnexport", "verify", reference, str(candidate), "-i", str(folder / "inputs.npz"), *options]
    write_whole(folder / "replay.txt", f"{shlex.join(words)}\n")
    say(f"{folder} written; to repeat: {shlex.join(words)}")


def witness_tables(folder: Path) -> list[Any]:
    """Return histograms of the differences of each output, and the table of layers, of a folder of --save-inputs."""
    import numpy as np

    paths = [folder / "reference.npz", folder / "candidate.npz"]
    if not all(path.exists() for path in paths):
        return []
    with np.load(paths[0]) as one, np.load(paths[1]) as other:
        pairs = {name: (one[name], other[name]) for name in one.files if name in other.files}
    tables = [
        _histogram(name, np.abs(first.astype(np.float64) - second.astype(np.float64)))
        for name, (first, second) in pairs.items()
        if first.dtype.kind == "f" and first.shape == second.shape
    ]
    if (folder / "layers.csv").exists():
        with open(folder / "layers.csv", newline="", encoding="utf-8") as file:
            columns, *rows = csv.reader(file)
        tables.append(table("modules of A, and the nearest values of B", columns, rows, right=columns[3:5]))
    return tables


def _histogram(name: str, differences: Any) -> Any:
    """Return a table of how many numbers differ by how much, by powers of ten."""
    import numpy as np

    finite = differences[np.isfinite(differences)]
    powers = np.where(finite > 0, np.floor(np.log10(np.maximum(finite, np.finfo(float).tiny))), -np.inf)
    found, counts = np.unique(powers, return_counts=True)
    rows = [
        (
            "0" if np.isinf(power) else f"{10.0**power:.0e} to {10.0 ** (power + 1):.0e}",
            f"{count:,}",
            "█" * -(-40 * count // counts.max()),
        )
        for power, count in zip(found, counts)
    ]
    rows += [("not finite", f"{differences.size - finite.size:,}", "")] * (differences.size > finite.size)
    return table(f"differences of {name}", ("difference", "numbers", ""), rows, right=["numbers"])


def _proofs(sites: Any) -> list[Any]:
    """Return a table of the folds that were proved, or only those that were not where there are many."""
    shown = sites if is_verbose() else [site for site in sites if site.method != "proved"]
    rows = [(site.site, site.method, f"{site.error:.2g}", f"{site.bound:.2g}", site.reason) for site in shown]
    columns = ("fold of", "mark", "error", "bound", "")
    return [table(f"{len(shown)} of {len(sites)} folds", columns, rows, right=columns[2:4])] if rows else []
