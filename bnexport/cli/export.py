"""The commands that export torch modules and their training steps."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from bnexport import interface
from bnexport.cli import output
from bnexport.cli.common import AllowUnexpected, Certificate, Html, Json, Key, Overwrite, Seed, VerifyWithTorch, app
from bnexport.cli.fold import verdict, write_html
from bnexport.cli.output import (
    Bench,
    Explain,
    check_exists,
    check_new,
    check_targets,
    detail,
    emit,
    is_verbose,
    say,
    status,
)
from bnexport.errors import UsageError
from bnexport.pages import table


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
    key: Key = None,
    allow_unexpected: AllowUnexpected = False,
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
    verify: VerifyWithTorch = True,
    certificate: Certificate = True,
    explain: Explain = None,
    bench: Bench = False,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    html: Html = None,
    json_target: Json = None,
) -> None:
    """Exports a torch module, folded and verified."""
    from bnexport.cli.input_options import (
        build,
        build_named,
        calm,
        check_reference,
        chosen_dimensions,
        example_inputs,
        load_weights,
        missing_input,
        parse,
        parse_name,
    )

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
        with status(f"exporting {factory}"), calm():
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
    from bnexport.cli import latency
    from bnexport.cli.input_options import calm

    with tempfile.TemporaryDirectory() as folder, status("timing against an export without folding"):
        unfolded = Path(folder, "unfolded.onnx")
        options: Any = {"exporter": result.exporter, "input_names": list(result.inputs), "dynamic": False}
        with calm():
            exporting.export(model.eval(), args, unfolded, fold=False, verify=False, **options)
        return latency.compare(unfolded, target, dict(zip(result.inputs, (each.numpy() for each in args))))


# The command that exports a training step.


@app.command(
    "train-export",
    place=90,
    examples=("bnexport train-export package:network step.onnx -i x:8,3,32,32 --optimizer adamw --option lr=1e-3",),
)
def train_export(
    factory: Annotated[
        str, typer.Argument(metavar="MODULE:FACTORY", help="A function, or class, that builds the torch module.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write, such as step.onnx.")],
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input",
            "-i",
            metavar="NAME:8,3,224,224|NAME:FILE.npy",
            help="An input: a shape for random numbers, or a NumPy file. Repeatable, in the order of forward.",
        ),
    ],
    loss: Annotated[
        str, typer.Option(metavar="NAME|MODULE:FUNCTION", help="A loss of torch.nn.functional, or your own function.")
    ] = "cross_entropy",
    example: Annotated[
        Path | None,
        typer.Option("--target", metavar="FILE.npy", help="An example target; needed for a loss of your own."),
    ] = None,
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="sgd, adam or adamw.")] = "sgd",
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="NAME=VALUE",
            help="Of the optimizer, as lr=1e-3, betas=0.9,0.99 or decay_norms_and_biases=false. Repeatable.",
        ),
    ] = None,
    groups: Annotated[
        list[str] | None,
        typer.Option(
            "--group",
            metavar="PARAMETERS:NAME=VALUE",
            help="Parameters with an lr or weight_decay of their own, as 'head.*:lr=1e-2,weight_decay=0'. Repeatable.",
        ),
    ] = None,
    clip_grad_norm: Annotated[
        float | None, typer.Option(metavar="FLOAT", help="Largest 2-norm of all gradients together.")
    ] = None,
    accumulate: Annotated[int, typer.Option(metavar="INT", min=1, help="Batches for one update.")] = 1,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weights to start from, as `bnexport export` reads them.")
    ] = None,
    key: Key = None,
    allow_unexpected: AllowUnexpected = False,
    standard_ops_only: Annotated[
        bool, typer.Option("--standard-ops-only", help="Batch norm in standard operators, for one process.")
    ] = False,
    dynamic: Annotated[bool, typer.Option("--dynamic/--static", help="Dynamic batch size.")] = True,
    dynamic_dims: Annotated[
        list[str] | None,
        typer.Option(
            "--dynamic-dims",
            metavar="NAME:0=rows",
            help="An array of the batch whose dimension 0 is dynamic; the others are fixed. Repeatable.",
        ),
    ] = None,
    verify: VerifyWithTorch = True,
    seed: Annotated[
        int, typer.Option(metavar="INT", min=0, help="Seed of the module's weights and random inputs.")
    ] = 0,
    overwrite: Overwrite = False,
    json_target: Json = None,
) -> None:
    """Exports a training step of a torch module. Forward, loss, gradients and optimizer become one graph."""
    from bnexport.cli.input_options import (
        build,
        calm,
        check_reference,
        chosen_dimensions,
        example_inputs,
        load_weights,
        parse,
    )
    from bnexport.training import state

    check_targets(OUT=target, json=json_target)
    for path in dataclasses.astuple(state.step_paths(target)):
        check_new(path, overwrite)
    interface.check_onnx_suffix(target, "OUT")
    interface.check_choice("--optimizer", optimizer, interface.OPTIMIZERS)
    arguments, settings = parse(inputs), _parse_options(options or [])
    if groups:
        settings["groups"] = [_parse_group(text) for text in groups]
    chosen = chosen_dimensions(dynamic_dims, dynamic, [*(argument.name for argument in arguments), "target"])
    if ":" in loss:
        check_reference(loss, "--loss")
        if example is None:
            raise UsageError("--target: missing, expected an example target for a loss of your own")
    else:
        interface.check_choice("--loss", loss, (*interface.LOSSES, "MODULE:FUNCTION"))
    check_exists(example, "--target")
    check_exists(checkpoint, "--checkpoint")
    check_reference(factory)
    with contextlib.redirect_stdout(sys.stderr):
        with status("importing torch"):
            import torch

            from bnexport.exporting import wrapper
            from bnexport.training import step
            from bnexport.training.api import export_training_step
        torch.manual_seed(seed)
        names, args = example_inputs(arguments, seed)
        model = build(factory)
        function = _load_function(loss) if ":" in loss else step.named_loss(loss)
        if checkpoint is not None:
            load_weights(model, checkpoint, key, allow_unexpected)
        output = wrapper.run(model, model.eval(), args)
        drawn = torch.Generator().manual_seed(seed)
        wanted = step.example_target(loss, output, drawn) if example is None else _load_target(example)
        with status(f"exporting a training step of {factory}"), calm():
            result = export_training_step(
                model.train(),
                function,
                (*args, wanted),
                target,
                optimizer=optimizer,  # type: ignore[arg-type]
                optimizer_options=settings,
                clip_grad_norm=clip_grad_norm,
                accumulate=accumulate,
                standard_ops_only=standard_ops_only,
                dynamic=chosen,
                verify=verify,
                input_names=[*names, "target"],
                overwrite=overwrite,
            )
    say(f"{target}, {result.evaluation_path} and {result.state_path} written")
    say(verdict(result.verification, wanted=verify, folds=False))
    for note in result.notes:
        say(f"note: {note}")
    outputs = result.outputs[: len(result.outputs) - len(result.state)]
    rows = (
        ("inputs", ", ".join(result.inputs)),
        ("outputs", ", ".join(outputs)),
        ("state", f"{len(result.state)} tensors"),
    )
    emit(result.to_dict(), json_target, [table("training step", ("", ""), rows)])


def _load_function(text: str) -> Any:
    from bnexport.cli.input_options import imported

    function = imported(text, f"--loss {text}")
    if not callable(function):
        raise UsageError(f"--loss {text}: got a {type(function).__name__}, expected a function of (output, target)")
    return function


def _load_target(path: Path) -> Any:
    import numpy as np
    import torch

    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except (OSError, ValueError, EOFError, TypeError) as error:
        raise UsageError(f"--target: cannot read {str(path)!r}, expected a file that numpy.save wrote") from error


def _parse_group(text: str) -> dict[str, Any]:
    parameters, separator, values = text.partition(":")
    try:
        options = {name: float(value) for name, _, value in (part.partition("=") for part in values.split(","))}
    except ValueError:
        options = {}
    if not separator or not options:
        raise UsageError(
            f"--group: got {text!r}, expected PARAMETERS:NAME=VALUE such as 'head.*:lr=1e-2,weight_decay=0'"
        )
    return {"params": parameters, **options}


def _parse_options(texts: list[str]) -> dict[str, Any]:
    """NAME=VALUE with a number, true, false, or numbers with commas between; the optimizer checks the rest."""
    options: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        try:
            parsed = json.loads(f"[{value}]")
        except ValueError:
            parsed = []
        if not separator or not parsed or not all(isinstance(part, (bool, int, float)) for part in parsed):
            raise UsageError(
                f"--option: got {text!r}, expected NAME=VALUE such as lr=1e-3, betas=0.9,0.99 or nesterov=true"
            )
        options[name] = parsed[0] if len(parsed) == 1 else tuple(parsed)
    return options
