"""Training in epochs over rows: shuffling, learning rates, validation, checkpoints, resuming.

Everything that decides a step is a function of the settings and of the step's place: the order of the rows is a
permutation drawn from (seed, epoch), as is which images are mirrored, the learning rate a function of the step's
number, dropout's masks one of the session's seed. So a training that was killed and goes on from a checkpoint, which
has the averages of the weights, too, ends with the same bits.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from bnexport.errors import BnexportError, DivergedError, MalformedModelError, UsageError
from bnexport.model_io import check_space
from bnexport.training.running import files
from bnexport.training.running.data import Rows
from bnexport.training.running.session import TrainingSession
from bnexport.training.running.settings import METRICS, Settings

_PROGRESS = "bnexport.training.progress"


@dataclasses.dataclass
class Progress:
    """Progress of a training. epoch: that of the next step; step: its number in the epoch; loss, rows: the sums over
    the epoch's steps so far; history: a record for each finished epoch; best: the epoch of the best, from 1, 0 for none.
    """

    epoch: int = 0
    step: int = 0
    loss: float = 0.0
    rows: int = 0
    history: list[dict[str, float]] = dataclasses.field(default_factory=list)
    best: int = 0


class Trainer:
    """Training of a session on rows.

    Args:
        session: in one process, or one of a group; in a group every process makes the same trainer.
        data: the rows to train on.
        settings: see there.
        validation: rows on which loss and accuracy are taken after each epoch; None for none.
        checkpoint: file that is replaced after each epoch, and after every `save_every` steps; by rank 0.
        best: file that is replaced after each epoch whose metric `best_by` is better than that of all before; by rank 0.
        best_by: "validation_loss", "accuracy" or "loss", a key of an epoch's record.

    Raises UsageError for settings out of range, rows that the graph does not take, and too few of them.
    """

    def __init__(
        self,
        session: TrainingSession,
        data: Rows,
        settings: Settings,
        *,
        validation: Rows | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        save_every: int = 0,
        best: str | os.PathLike[str] | None = None,
        best_by: str = "validation_loss",
    ) -> None:
        settings.check()
        _check_best(best, best_by, validation)
        if validation is not None and data.classes and validation.classes not in {(), data.classes}:
            raise UsageError(
                f"validation: got the classes {', '.join(validation.classes)}, expected those of the data: "
                + ", ".join(data.classes)
            )
        if settings.flip and not data.can_flip():
            raise UsageError("flip: got no folder of images with one number each as its targets, expected one")
        if save_every < 0:
            raise UsageError(f"save_every: got {save_every}, expected a number of steps >= 0")
        self.session, self.data, self.settings, self.validation = session, data, settings, validation
        self.checkpoint, self.save_every = checkpoint, save_every
        self.best, self.best_by = best, best_by
        self.progress = Progress()
        # Steps in the checkpoint file, None before it has been written or read.
        self.saved_steps: int | None = None
        # What changes where a resumed training has more epochs than its schedule had; empty where nothing does.
        self.grown = ""
        self.steps_per_epoch = settings.steps_per_epoch(len(data))
        if self.steps_per_epoch == 0:
            raise UsageError(
                f"data: got {len(data)} rows, fewer than one batch of {settings.batch_size}, and the last one is dropped"
            )
        for rows in (data, validation):
            if rows is not None:
                session.check(rows.read(self._mine(np.arange(min(len(rows), settings.batch_size)))))
        if best is not None and best_by == "accuracy" and validation is not None:
            batch = validation.read(np.arange(min(len(validation), settings.batch_size)))
            if _right(next(iter(session.evaluate(batch).outputs.values())), batch[-1]) is None:
                raise UsageError(
                    "best_by: got 'accuracy', which needs scores (n, classes) and class numbers as targets"
                )
        if settings.warm_up > self.steps:
            raise UsageError(
                f"warm_up: got {settings.warm_up} steps, and the training has {self.steps}; expected no more"
            )
        session.seed = settings.seed
        for path in (checkpoint, best):
            if path is not None and session.rank == 0:
                check_space(path, session.state_bytes)

    @property
    def steps(self) -> int:
        """Number of steps of the whole training."""
        return self.settings.epochs * self.steps_per_epoch

    @property
    def steps_done(self) -> int:
        return self.progress.epoch * self.steps_per_epoch + self.progress.step

    def resume(self, path: str | os.PathLike[str]) -> None:
        """Resume from a checkpoint of a training with the same graph, data and settings; epochs may be more.

        Raises UsageError that lists what differs, MalformedModelError for a damaged file.
        """
        text = files.load_metadata(path).get(_PROGRESS)
        if text is None:
            raise UsageError(
                f"{os.fspath(path)}: got a checkpoint without a trainer's progress, expected one to go on from"
            )
        try:
            kept = json.loads(text)
            progress = Progress(**kept["progress"])
            different = {
                name: (kept["training"].get(name), value)
                for name, value in self._identity().items()
                if kept["training"].get(name) != value
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MalformedModelError(f"{os.fspath(path)}: its progress is damaged: {error}") from error
        old = different.get("epochs", (self.settings.epochs, 0))[0]
        if set(different) == {"epochs"} and isinstance(old, int) and old < self.settings.epochs:
            self.grown = (
                f"the schedule {self.settings.schedule!r} was for {old} epochs, it is for {self.settings.epochs} now"
            )
            different = {}
        if different:
            listed = "; ".join(f"{name}: it has {old}, this one {new}" for name, (old, new) in different.items())
            raise UsageError(f"{os.fspath(path)}: the checkpoint of another training: {listed}")
        if progress.best and self.best is not None and self.session.rank == 0 and not os.path.exists(self.best):
            raise UsageError(
                f"{os.fspath(self.best)}: does not exist, expected the checkpoint of epoch {progress.best}"
            )
        self.session.load_checkpoint(path)
        self.progress = progress
        self.saved_steps = self.steps_done

    def run(
        self,
        on_step: Callable[[int], None] = lambda done: None,
        on_epoch: Callable[[dict[str, float]], None] = lambda record: None,
    ) -> list[dict[str, float]]:
        """Train to the end. on_step gets the number of steps done, on_epoch the record of the finished epoch.

        Returns the records: epoch (from 1), loss (mean over the rows, of the steps as they were made), learning_rate
        of its last step, and with validation rows validation_loss and, for class numbers, accuracy.

        Where a step cannot be made - an image that cannot be read, a label out of range, NaN - the checkpoint gets the
        state before it, and the error says where that was: UsageError, DivergedError, or in a group GroupError.
        """
        while self.progress.epoch < self.settings.epochs:
            try:
                record = self._run_epoch(on_step)
            except BnexportError as error:
                self._save()
                raise self._explained(error) from error
            history, best = [*self.progress.history, record], self.progress.best
            is_best = self.best is not None and _is_better(record, history[best - 1] if best else {}, self.best_by)
            self.progress = Progress(self.progress.epoch + 1, history=history, best=len(history) if is_best else best)
            if is_best:
                self._write(self.best)
            self._save()
            on_epoch(record)
        return self.progress.history

    def _run_epoch(self, on_step: Callable[[int], None]) -> dict[str, float]:
        progress, size = self.progress, self.settings.batch_size
        drawn = np.random.default_rng([self.settings.seed, progress.epoch])
        order = drawn.permutation(len(self.data))
        flipped = drawn.random(len(self.data)) < 0.5 if self.settings.flip else None
        while progress.step < self.steps_per_epoch:
            self.session.learning_rate = self.settings.learning_rate_at(self.steps_done, self.steps_per_epoch)
            joint = order[progress.step * size : (progress.step + 1) * size]
            progress.loss += self._step(self._mine(joint), flipped) * len(joint)
            progress.rows += len(joint)
            progress.step += 1
            if self.save_every and self.steps_done % self.save_every == 0 and progress.step < self.steps_per_epoch:
                self._save()
            on_step(self.steps_done)
        return {
            "epoch": progress.epoch + 1,
            "loss": progress.loss / progress.rows,
            "learning_rate": self.settings.learning_rate_at(self.steps_done - 1, self.steps_per_epoch),
            **self._validate(),
        }

    def _step(self, mine: np.ndarray[Any, Any], flipped: np.ndarray[Any, Any] | None) -> float:
        try:
            batch = self.data.read(mine, None if flipped is None else flipped[mine])
        except UsageError:
            self.session.refuse()
            raise
        return self.session.step(batch)

    def _explained(self, error: BnexportError) -> BnexportError:
        """Return the error with its place, and what was kept."""
        if type(error) not in (UsageError, DivergedError):
            return error
        kept = "" if self.checkpoint is None else f"; {os.fspath(self.checkpoint)} has the state before it"
        step = self.progress.step + 1
        place = f"step {step} of {self.steps_per_epoch}" if step <= self.steps_per_epoch else "validation"
        return type(error)(f"epoch {self.progress.epoch + 1}, {place}: {error}{kept}")

    def _validate(self) -> dict[str, float]:
        if self.validation is None:
            return {}
        mine = self._mine(np.arange(len(self.validation)))
        loss = correct = counted = 0.0
        for start in range(0, len(mine), self.settings.batch_size):
            batch = self.validation.read(mine[start : start + self.settings.batch_size])
            result = self.session.evaluate(batch, averaged=self.settings.ema_decay is not None)
            loss += result.loss * len(batch[-1])
            right = _right(next(iter(result.outputs.values())), batch[-1])
            correct, counted = correct + (right or 0), counted + (0 if right is None else len(batch[-1]))
        loss, correct, counted = self.session.gather([loss, correct, counted]).sum(0).tolist()
        record = {"validation_loss": loss / len(self.validation)}
        return {**record, "accuracy": correct / counted} if counted else record

    def _mine(self, indices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return this process's share of the rows."""
        return np.array_split(indices, self.session.processes)[self.session.rank]

    def _save(self) -> None:
        if self.checkpoint is not None and self.session.rank == 0:
            self._write(self.checkpoint)
            self.saved_steps = self.steps_done

    def _write(self, path: str | os.PathLike[str] | None) -> None:
        if path is not None and self.session.rank == 0:
            kept = {"training": self._identity(), "progress": dataclasses.asdict(self.progress)}
            self.session.save_checkpoint(path, {_PROGRESS: json.dumps(kept)})

    def _identity(self) -> dict[str, Any]:
        """Return the settings that must not change for the same result; epochs matter to a cosine only."""
        made = {**dataclasses.asdict(self.settings), "graph": self.session.digest, "data": self.data.shapes()}
        if self.settings.schedule != "cosine":
            del made["epochs"]
        if self.validation is not None:
            made["validation"] = self.validation.shapes()
        if self.best is not None:
            made["best_by"] = self.best_by
        return dict(json.loads(json.dumps(made)))  # as a checkpoint has them


def _check_best(best: str | os.PathLike[str] | None, best_by: str, validation: Rows | None) -> None:
    if best_by not in METRICS:
        raise UsageError(f"best_by: got {best_by!r}, expected one of {', '.join(METRICS)}")
    if best is not None and best_by != "loss" and validation is None:
        raise UsageError(f"best_by: got {best_by!r} without validation rows, expected some, or 'loss'")


def _is_better(record: dict[str, float], best: dict[str, float], metric: str) -> bool:
    """Whether an epoch is better than the best so far; the first of equal ones stays, and NaN is never better."""
    sign = 1.0 if METRICS[metric] else -1.0
    return sign * record[metric] > (sign * best[metric] if best else float("-inf"))


def _right(output: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> int | None:
    """Count the rows of scores (n, classes) that are highest at their class (n,); None for other outputs."""
    if output.ndim != 2 or target.shape != output.shape[:1] or target.dtype.kind not in "iu":
        return None
    return int((output.argmax(1) == target).sum())
