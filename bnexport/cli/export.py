"""The command that exports torch modules."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from bnexport import interface
from bnexport.cli import output
from bnexport.cli.common import Certificate, Html, Json, Overwrite, Seed, app
from bnexport.cli.console import detail, is_verbose, say, status
from bnexport.cli.fold import verdict, write_html
from bnexport.cli.output import Bench, Explain, check_exists, check_new, check_targets, emit
from bnexport.errors import UsageError


@app.command(
    place=10,
    examples=(
        "bnexport export package:network model.onnx --checkpoint weights.pth -i x:1,3,224,224",
        "bnexport export package:network kept.onnx --mode custom_op -i x:1,3,224,224",
        "bnexport export package:network model.pt2 -i image:image.npy --static",
    ),
)
def export(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY|LIBRARY:NAME|FILE.pt2",
            help="A function, or class, that builds the torch module; or a model by name, without weights: "
            "timm:NAME, torchvision:NAME or mmengine:config.py (a configuration is Python code, and it is run), "
            "with arguments as in timm:resnet50d?num_classes=3&in_chans=1.",
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
    explain: Explain = None,
    bench: Bench = False,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    html: Html = None,
    json_target: Json = None,
) -> None:
    """Exports a torch module, folded and verified."""
    from bnexport.cli.factory import build, build_named, calm, check_reference, explained, load_weights, parse_name
    from bnexport.cli.input_options import chosen_dimensions, example_inputs, missing_input, parse

    check_targets(OUT=target, html=html, json=json_target)
    check_new(target, overwrite)
    kind = interface.choose_format(target, file_format, path_name="OUT", name="--format")
    interface.check_choice("--mode", mode, interface.MODES)
    if exporter is not None:
        interface.check_choice("--exporter", exporter, interface.EXPORTERS)
    arguments = parse(inputs or ())
    chosen = chosen_dimensions(dynamic_dims, dynamic, [argument.name for argument in arguments])
    check_exists(checkpoint, "--checkpoint")
    if bench and (kind != "onnx" or mode != "deploy" or not fold):
        raise UsageError(
            "--bench: compares a folded ONNX file with an unfolded one, expected --mode deploy, --fold and OUT.onnx"
        )
    is_program = factory.endswith(".pt2")
    name = None if is_program else parse_name(factory)
    if name is None:
        if not is_program:
            check_reference(factory)
        if not arguments:
            raise missing_input(factory)
    # What a factory or an exporter prints is no data.
    with contextlib.redirect_stdout(sys.stderr):
        with status("importing torch"):
            from bnexport import exporting, folding
            from bnexport.exporting.arguments import input_names as names_of_forward
            from bnexport.exporting.arguments import program_of
        program = program_of(factory)
        if program is not None:
            model = program.module()
        else:
            model, arguments = (build(factory), arguments) if name is None else build_named(name, arguments)
        input_names, args = example_inputs(arguments, seed)
        given_names = names_of_forward(model, len(args)) if kind == "onnx" else input_names
        if checkpoint is not None:
            load_weights(model, checkpoint, key, allow_unexpected)
        elif name is not None:
            say(
                f"note: the weights of {factory} are random; --checkpoint loads trained ones, of which fewer or more may fold"
            )
        with status(f"exporting {factory}"), calm(), explained(factory, exporter):
            result = exporting.export(
                program or model.train(train),
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
    report = result.report
    if report is not None:
        report = dataclasses.replace(
            report, source=report.source or factory, target=str(target), verification=result.verification
        )
    if html is not None:
        if report is None:
            say(f"note: nothing was folded, so that there is no report for {html}")
        else:
            write_html(report, html)
    if checkpoint is None and name is None and program is None:
        say(
            f"note: the weights are those that {factory} made; --checkpoint loads others, of which fewer or more may fold"
        )
    renamed = [f"{new!r} is forward's {old!r}" for new, old in zip(result.inputs, given_names) if new != old]
    if renamed:
        say(f"note: input {', '.join(renamed)}")
    for note in (*result.notes, *(() if report is None else report.notes)):
        say(f"note: {note}")
    if report is not None and report.uncertified:
        detail(f"note: {report.uncertified}")
    if report is None:
        say(f"{target} written")
    else:
        output.note_growth(report)
        output.explain_site(report, explain)
        say(f"{report.summary()}; {target} written")
    say(verdict(result.verification, wanted=verify))
    ratio = _compared_latency(model, args, target, result) if bench and report.changed else None
    data = result.to_dict() | (output.latency_json(ratio) if bench else {})
    emit(data, json_target, [] if report is None else folding.render(report, everything=is_verbose()))
    if bench:
        say(output.result_line(report, result.verification, ratio))


def _compared_latency(model: Any, args: tuple[Any, ...], target: Path, result: Any) -> Any:
    """Return the latency of the exported file over that of the same export without folding, on the example's inputs."""
    from bnexport import exporting
    from bnexport.cli.factory import calm

    with tempfile.TemporaryDirectory() as folder, status("timing against an export without folding"):
        unfolded = Path(folder, "unfolded.onnx")
        options: Any = {"exporter": result.exporter, "input_names": list(result.inputs), "dynamic": False}
        with calm():
            exporting.export(model.eval(), args, unfolded, fold=False, verify=False, **options)
        return output.compared_latency(unfolded, target, dict(zip(result.inputs, (each.numpy() for each in args))))
