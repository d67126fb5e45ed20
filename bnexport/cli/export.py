"""The command that exports torch modules."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from bnexport.cli.common import Json, Seed, app, emit, err, status
from bnexport.cli.inputs import example_inputs
from bnexport.errors import UsageError


@app.command()
def export(
    factory: Annotated[
        str, typer.Argument(metavar="MODULE:FACTORY", help="A function, or class, that builds the torch module.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.")],
    inputs: Annotated[
        list[str],
        typer.Option("--input", "-i", metavar="NAME:1,3,224,224", help="Shape (or .npy file) of each input, in order."),
    ],
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Weights as torch, MMCV, mmengine, timm, Lightning or detectron2 save them, or safetensors."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Where the weights are in the checkpoint, such as state_dict_ema or ema.module.")
    ] = None,
    allow_unexpected: Annotated[
        bool, typer.Option("--allow-unexpected", help="Ignore names of the checkpoint that the module does not have.")
    ] = False,
    mode: Annotated[str, typer.Option(help="deploy: folded inference. custom_op: the node is kept.")] = "deploy",
    exporter: Annotated[str, typer.Option(help="For ONNX: dynamo or torchscript.")] = "dynamo",
    file_format: Annotated[str, typer.Option("--format", help="onnx, torchscript or pt2.")] = "onnx",
    fold: Annotated[bool, typer.Option("--fold/--no-fold", help="Fold batch norms, in mode deploy.")] = True,
    train: Annotated[
        bool, typer.Option("--train/--eval", help="The mode of the module; training graphs return new statistics.")
    ] = False,
    dynamic: Annotated[bool, typer.Option("--dynamic/--static", help="Dynamic batch and spatial sizes.")] = True,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare with torch.")] = True,
    seed: Seed = 0,
    json_target: Json = None,
) -> None:
    """Exports a torch module, for example: bnexport export models.resnet:digits_resnet out.onnx --input x:1,1,8,8"""
    from bnexport import exporting, folding
    from bnexport.exporting.checkpoint import load_checkpoint

    model = _build(factory)
    if checkpoint is not None:
        loaded = load_checkpoint(model, checkpoint, key=key, allow_unexpected=allow_unexpected)
        for what, names in (("objects that were not built", loaded.ignored_objects), ("unexpected", loaded.unexpected)):
            if names:
                err.print(f"note: {checkpoint}: {what}: {', '.join(names)}", soft_wrap=True)
    input_names, args = example_inputs(inputs, seed)
    with status(f"exporting {factory}"):
        result = exporting.export(
            model.train(train),
            args,
            target,
            mode=mode,  # type: ignore[arg-type]
            exporter=exporter,  # type: ignore[arg-type]
            format=file_format,  # type: ignore[arg-type]
            fold=fold,
            dynamic=dynamic,
            verify=verify,
            input_names=input_names if file_format == "onnx" else None,
        )
    tables = [] if result.report is None else folding.render(result.report)
    emit({"schema_version": 1, **result.to_dict()}, json_target, tables)
    for note in result.notes:
        err.print(f"note: {note}", soft_wrap=True)
    err.print(
        f"{target} written; {'verified: ' if result.verification.passed else ''}{result.verification.summary()}",
        soft_wrap=True,
    )


def _build(factory: str) -> Any:
    import torch

    module_name, separator, attribute = factory.partition(":")
    if not separator:
        raise UsageError(f"got {factory!r}, expected MODULE:FACTORY, such as models.resnet:digits_resnet")
    sys.path.insert(0, os.getcwd())
    try:
        target = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{factory}: cannot be imported: {error}") from error
    model = target if isinstance(target, torch.nn.Module) else target()
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{factory}: got a {type(model).__name__}, expected a torch.nn.Module")
    return model
