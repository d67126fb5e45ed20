"""The command that exports torch modules."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from bnexport import choices
from bnexport.cli.common import Certificate, Html, Json, Overwrite, Seed, app
from bnexport.cli.console import detail, is_verbose, say, status
from bnexport.cli.models import verdict, write_html
from bnexport.cli.output import check_exists, check_new, check_targets, emit


@app.command()
def export(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY|LIBRARY:NAME",
            help="A function, or class, that builds the torch module; or a model by name, without weights: "
            "timm:NAME, torchvision:NAME, smp:CLASS, hf:config.json or mmengine:config.py (a configuration is "
            "Python code, and it is run), with arguments as in smp:Unet?encoder_name=resnet34&classes=3.",
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            metavar="NAME:1,3,224,224|NAME:FILE.npy",
            help="An input: a shape for random numbers, or a NumPy file. Repeatable, in the order of forward. "
            "A model by name has a default, of the size that its library or configuration states.",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Weights as torch, MMCV, mmengine, timm, Lightning or detectron2 save them, or safetensors.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Where the weights are in the checkpoint, such as state_dict_ema or ema.module."
        ),
    ] = None,
    allow_unexpected: Annotated[
        bool, typer.Option("--allow-unexpected", help="Ignore names of the checkpoint that the module does not have.")
    ] = False,
    mode: Annotated[
        str, typer.Option(metavar="MODE", help="deploy: folded inference. custom_op: the node is kept.")
    ] = "deploy",
    exporter: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="For ONNX: dynamo or torchscript; by default dynamo from torch 2.9 on."),
    ] = None,
    file_format: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="NAME", help="onnx, torchscript or pt2; OUT's suffix names it: .onnx, .pt, .pt2."
        ),
    ] = None,
    fold: Annotated[bool, typer.Option("--fold/--no-fold", help="Fold batch norms, in mode deploy.")] = True,
    train: Annotated[
        bool, typer.Option("--train/--eval", help="The mode of the module; training graphs return new statistics.")
    ] = False,
    dynamic: Annotated[bool, typer.Option("--dynamic/--static", help="Dynamic batch and spatial sizes.")] = True,
    dynamic_dims: Annotated[
        list[str] | None,
        typer.Option(
            "--dynamic-dims",
            metavar="NAME:0,2=height",
            help="Dynamic dimensions of an input, and no others; an error where one cannot be. Repeatable.",
        ),
    ] = None,
    simplify: Annotated[
        bool, typer.Option("--simplify/--no-simplify", help="Evaluate shape arithmetic after folding.")
    ] = True,
    opset: Annotated[int, typer.Option(metavar="INT", help="Opset of an ONNX file, 18 or newer.")] = 18,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare with torch.")] = True,
    certificate: Certificate = True,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    html: Html = None,
    json_target: Json = None,
) -> None:
    """Exports a torch module, folded and verified."""
    from bnexport.cli.factory import build, calm, check_reference, explained
    from bnexport.cli.inputs import chosen_dimensions, example_inputs, missing_input, parse
    from bnexport.cli.model_names import build_named, parse_name

    check_targets(OUT=target, html=html, json=json_target)
    check_new(target, overwrite)
    kind = choices.choose_format(target, file_format, path_name="OUT", name="--format")
    choices.check_choice("--mode", mode, choices.MODES)
    if exporter is not None:
        choices.check_choice("--exporter", exporter, choices.EXPORTERS)
    arguments = parse(inputs or ())
    chosen = chosen_dimensions(dynamic_dims, dynamic, [argument.name for argument in arguments])
    check_exists(checkpoint, "--checkpoint")
    name = parse_name(factory)
    if name is None:
        check_reference(factory)
        if not arguments:
            raise missing_input(factory)
    # What a factory or an exporter prints is no data.
    with contextlib.redirect_stdout(sys.stderr):
        with status("importing torch"):
            from bnexport import exporting, folding
            from bnexport.exporting.checkpoint import load_checkpoint
        model, arguments = (build(factory), arguments) if name is None else build_named(name, arguments)
        input_names, args = example_inputs(arguments, seed)
        if checkpoint is not None:
            loaded = load_checkpoint(model, checkpoint, key=key, allow_unexpected=allow_unexpected)
            detail(f"weights of {checkpoint}, from {loaded.container or 'the top'!r}, without {loaded.prefix!r}")
            for what, names in (
                ("objects that were not built", loaded.ignored_objects),
                ("unexpected", loaded.unexpected),
            ):
                if names:
                    say(f"note: {checkpoint}: {what}: {', '.join(names)}")
        elif name is not None:
            say(f"note: the weights of {factory} are random; --checkpoint loads trained ones")
        with status(f"exporting {factory}"), calm(), explained(factory, exporter):
            result = exporting.export(
                model.train(train),
                args,
                target,
                mode=mode,  # type: ignore[arg-type]
                exporter=exporter,  # type: ignore[arg-type]
                format=kind,  # type: ignore[arg-type]
                fold=fold,
                dynamic=chosen,
                simplify=simplify,
                opset_version=opset,
                verify=verify,
                certificate=certificate,
                overwrite=overwrite,
                input_names=input_names if kind == "onnx" else None,
            )
    if html is not None:
        if result.report is None:
            say(f"note: nothing was folded, so that there is no report for {html}")
        else:
            write_html(result.report, html)
    if checkpoint is None and name is None:
        say(f"note: the weights are those that {factory} made; --checkpoint loads others")
    for note in (*result.notes, *(() if result.report is None else result.report.notes)):
        say(f"note: {note}")
    folded = "" if result.report is None else f"{result.report.summary()}; "
    say(f"{folded}{target} written")
    say(verdict(result.verification, wanted=verify))
    emit(
        result.to_dict(),
        json_target,
        [] if result.report is None else folding.render(result.report, everything=is_verbose()),
    )
