"""The command that trains an exported step in ONNX Runtime, in one process or in those that torchrun starts."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bnexport import choices
from bnexport.cli.common import Json, app
from bnexport.cli.console import is_verbose, progress, say, set_level
from bnexport.cli.output import check_exists, check_new, check_targets, emit, table
from bnexport.errors import UsageError

if TYPE_CHECKING:
    from bnexport.training.running.data import Rows
    from bnexport.training.running.trainer import Trainer

_DATA = "FILE.npz|X.npy,Y.npy|FOLDER"


@app.command(
    place=100,
    examples=(
        "bnexport train step.onnx --data rows.npz --epochs 10 --save run.safetensors --inference model.onnx",
        "bnexport train step.onnx --data rows.npz --epochs 20 --save run.safetensors --resume",
    ),
)
def train(
    step: Annotated[Path, typer.Argument(metavar="STEP", help="The graph that `bnexport train-export` wrote.")],
    data: Annotated[
        str,
        typer.Option(
            metavar=_DATA,
            help="Rows to train on: arrays by input name, or in the order of the inputs; a folder of images has a "
            "subfolder a class.",
        ),
    ],
    epochs: Annotated[int, typer.Option(metavar="INT", min=1, help="Times to go through the rows.")] = 1,
    batch_size: Annotated[
        int, typer.Option(metavar="INT", min=1, help="Rows of one step, of all processes together.")
    ] = 32,
    validation: Annotated[
        str | None, typer.Option(metavar=_DATA, help="Rows for loss and accuracy after each epoch.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", metavar="FLOAT", min=0.0, help="Instead of the exported one.")
    ] = None,
    schedule: Annotated[
        str, typer.Option(metavar="NAME", help="constant; cosine: falls to 0; step: falls at --milestones.")
    ] = "constant",
    milestones: Annotated[
        str, typer.Option(metavar="EPOCH,EPOCH", help="For --schedule step: numbers of epochs after which it falls.")
    ] = "",
    gamma: Annotated[float, typer.Option(metavar="FLOAT", min=0.0, help="Its factor at each of them.")] = 0.1,
    warm_up_steps: Annotated[
        int, typer.Option(metavar="INT", min=0, help="Steps in which the learning rate rises from 0.")
    ] = 0,
    ema_decay: Annotated[
        float | None,
        typer.Option(
            metavar="FLOAT",
            help="Moving average of the weights, such as 0.999; validation and --inference use it.",
        ),
    ] = None,
    flip: Annotated[
        bool, typer.Option("--flip", help="Mirror images left to right, each with probability 1/2.")
    ] = False,
    mean: Annotated[str, typer.Option(metavar="R,G,B", help="Subtracted from images, whose range is 0 to 1.")] = "0",
    std: Annotated[str, typer.Option(metavar="R,G,B", help="Images are divided by it.")] = "1",
    drop_last: Annotated[bool, typer.Option("--drop-last", help="Leave out an epoch's last, smaller batch.")] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--save", metavar="PATH", help="Checkpoint to write: replaced after each epoch."),
    ] = None,
    save_every: Annotated[
        int, typer.Option(metavar="INT", min=0, help="Replace it after so many steps, too; 0: epochs only.")
    ] = 0,
    best: Annotated[
        Path | None,
        typer.Option(
            "--save-best", metavar="PATH", help="Checkpoint of the best epoch, which --inference then writes."
        ),
    ] = None,
    best_by: Annotated[
        str, typer.Option(metavar="NAME", help="Of which the best: validation_loss, accuracy or loss.")
    ] = "validation_loss",
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume from the file of --save if it exists (bit-exact); --epochs may grow."),
    ] = False,
    inference: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write the trained model, folded and verified.")
    ] = None,
    loss_reduction: Annotated[
        str, typer.Option(metavar="NAME", help="mean or sum: how the loss joins rows, for several processes.")
    ] = "mean",
    threads: Annotated[
        int, typer.Option(metavar="INT", min=0, help="Threads of ONNX Runtime; 0: its choice, or an equal share.")
    ] = 0,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1.0, help="How long a process waits for the others.")
    ] = 300.0,
    seed: Annotated[int, typer.Option(metavar="INT", min=0, help="Seed of the order of rows and of dropout.")] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file of --inference where it exists, as a whole.")
    ] = False,
    json_target: Json = None,
) -> None:
    """Trains an exported step in ONNX Runtime. On several processes: torchrun --nproc-per-node N -m bnexport train ..."""
    check_targets(save=checkpoint, save_best=best, inference=inference, json=json_target)
    check_exists(step, "STEP")
    if inference is not None:
        choices.check_onnx_suffix(inference, "--inference")
        check_new(inference, overwrite, "--inference")
    if checkpoint is None and (resume or save_every):
        raise UsageError(f"{'--resume' if resume else '--save-every'}: got no --save, expected the file that it is for")
    if checkpoint is not None and checkpoint.exists() and not resume:
        raise UsageError(f"--save: {str(checkpoint)!r} exists; go on from it with --resume, or remove it")

    if best is not None and best.exists() and not resume:
        raise UsageError(f"--save-best: {str(best)!r} exists; go on with --resume, or remove it")

    from bnexport.training.running.data import load_rows
    from bnexport.training.running.session import TrainingSession
    from bnexport.training.running.settings import Settings
    from bnexport.training.running.trainer import Trainer

    group = _join_group(timeout)
    session = TrainingSession(
        step,
        session_options=_session_options(threads, group),
        group=group,
        loss_reduction=loss_reduction,  # type: ignore[arg-type]
        ema_decay=ema_decay,
    )
    if session.rank:
        set_level(quiet=True, verbose=False)
    settings = Settings(
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=session.learning_rate if learning_rate is None else learning_rate,
        seed=seed,
        schedule=schedule,  # type: ignore[arg-type]
        milestones=_numbers("--milestones", milestones, int),
        gamma=gamma,
        warm_up=warm_up_steps,
        drop_last=drop_last,
        flip=flip,
        ema_decay=ema_decay,
    )
    scale = {"mean": _numbers("--mean", mean, float), "std": _numbers("--std", std, float)}

    def rows(source: str, option: str) -> Rows:
        return load_rows(source, session.input_names, option, shapes=session.input_shapes, **scale)

    trainer = Trainer(
        session,
        rows(data, "--data"),
        settings,
        validation=None if validation is None else rows(validation, "--validation"),
        checkpoint=checkpoint,
        save_every=save_every,
        best=best,
        best_by=best_by,
    )
    if resume and checkpoint is not None and checkpoint.exists():
        trainer.resume(checkpoint)
        say(f"going on after step {trainer.steps_done} of {trainer.steps}")
        if trainer.grown:
            say(f"note: {trainer.grown}")
    begun, start = trainer.steps_done, time.perf_counter()
    try:
        with progress("training", trainer.steps) as advance:
            trainer.run(advance, lambda record: say(_line(record, epochs)))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_stopped(trainer, checkpoint)) from None
    seconds = time.perf_counter() - start
    if group is not None:
        from bnexport.sync_bn import distributed

        distributed.leave()
    if session.rank == 0:
        _report(trainer, step, begun, seconds, checkpoint, inference, json_target)


def _numbers(option: str, text: str, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(",") if text)
    except ValueError as error:
        raise UsageError(f"{option}: got {text!r}, expected numbers with commas between") from error


def _join_group(timeout: float) -> Any:
    """Join the group that torchrun's environment describes; None for one process."""
    if os.environ.get("WORLD_SIZE", "1") in {"", "1"}:
        return None
    from bnexport.sync_bn import distributed

    return distributed.join(timeout)


def _session_options(threads: int, group: Any) -> Any:
    from bnexport.runtime.engine import session_options

    if threads == 0 and group is not None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        threads = max(1, (os.cpu_count() or 1) // local)
    return session_options(quiet=not is_verbose(), threads=threads)  # what fails is in the error


def _line(record: dict[str, float], epochs: int) -> str:
    parts = [f"loss {record['loss']:.4g}"]
    if "validation_loss" in record:
        parts.append(f"validation loss {record['validation_loss']:.4g}")
    if "accuracy" in record:
        parts.append(f"accuracy {record['accuracy']:.2%}")
    return f"epoch {record['epoch']:.0f} of {epochs}: {', '.join(parts)}"


def _stopped(trainer: Trainer, checkpoint: Path | None) -> str:
    """Say how far an interrupted training is, what is kept of it, and how to resume."""
    done, within = trainer.progress.epoch, trainer.progress.step
    place = f"stopped after epoch {done}" if not within else f"stopped in epoch {done + 1}, after {within} steps of it"
    if checkpoint is None:
        return f"{place}; nothing was kept, since there is no --save"
    if trainer.saved_steps is None:
        return f"{place}; {checkpoint} was not written yet"
    missing = trainer.steps_done - trainer.saved_steps
    kept = f"{checkpoint} has it" if not missing else f"{checkpoint} has all but the last {missing} steps"
    return f"{place}; {kept}; --resume goes on"


def _report(
    trainer: Trainer,
    step: Path,
    begun: int,
    seconds: float,
    checkpoint: Path | None,
    inference: Path | None,
    json_target: str | None,
) -> None:
    history, averaged = trainer.progress.history, trainer.settings.ema_decay is not None
    folded = None
    if inference is not None:
        if trainer.best is not None and trainer.progress.best:
            trainer.session.load_checkpoint(trainer.best)
        folded = trainer.session.export_inference(inference, averaged=averaged)
    names = {name: None for record in history for name in record}
    rows = [[f"{record[name]:.6g}" if name in record else "" for name in names] for record in history]
    columns = [name.replace("_", " ") for name in names]
    if checkpoint is not None:
        say(f"{checkpoint} written")
    if trainer.best is not None:
        best = trainer.progress.best
        found = f"{trainer.best} written: epoch {best} is the best"
        say(f"{found if best else 'no epoch has a number'} by {trainer.best_by}")
    if folded is not None:
        say(
            f"{inference} written, {folded.report.before.batch_norm - folded.report.after.batch_norm} batch norms folded"
        )
    emit(
        {
            "step": str(step),
            "processes": trainer.session.processes,
            "rows": len(trainer.data),
            "steps": trainer.steps,
            "resumed_after_step": begun or None,
            "seconds": seconds,
            "epochs": history,
            "best_epoch": trainer.progress.best or None,
            "best": None if trainer.best is None else str(trainer.best),
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "inference": None if inference is None else str(inference),
        },
        json_target,
        [table(f"{step}: {trainer.steps} steps", columns, rows, right=columns)],
    )
