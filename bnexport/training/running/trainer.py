"""Training in epochs over rows: shuffling, learning rates, validation, checkpoints, resuming.

Everything that decides a step is a function of the settings and of the step's place: the order of the rows is a
permutation drawn from (seed, epoch), the learning rate a function of the step's number, dropout's masks one of
the session's seed. So a training that was killed and goes on from a checkpoint ends with the same bits.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from bnexport.errors import MalformedModelError, UsageError
from bnexport.model_io import check_space
from bnexport.training.running import files
from bnexport.training.running.data import Rows
from bnexport.training.running.session import TrainingSession

SCHEDULES = ("constant", "cosine")
_PROGRESS = "bnexport.training.progress"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that determine the steps, together with the graph and the data.

    batch_size: rows of one step, of all processes together. drop_last: leave out an epoch's last batch where it
    is smaller. learning_rate: the highest. schedule: "constant", or "cosine", which falls from it to zero over
    all steps. warm_up: number of steps in which it rises from zero.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    seed: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    warm_up: int = 0
    drop_last: bool = False

    def check(self) -> None:
        """Raise UsageError for an invalid setting."""
        for name, least in (("epochs", 1), ("batch_size", 1), ("seed", 0), ("warm_up", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}: got {getattr(self, name)}, expected a whole number >= {least}")
        if not 0.0 <= self.learning_rate < math.inf:
            raise UsageError(f"learning_rate: got {self.learning_rate}, expected a finite number >= 0")
        if self.schedule not in SCHEDULES:
            raise UsageError(f"schedule: got {self.schedule!r}, expected one of {', '.join(SCHEDULES)}")

    def steps_per_epoch(self, rows: int) -> int:
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate of step `step` of `steps`, the first being 0."""
        rate = self.learning_rate
        if self.schedule == "cosine":
            rate *= 0.5 * (1.0 + math.cos(math.pi * step / steps))
        return rate * min(1.0, (step + 1) / self.warm_up) if self.warm_up else rate


@dataclasses.dataclass
class Progress:
    """Progress of a training. epoch: that of the next step; step: its number in the epoch; loss, rows: the sums over
    the epoch's steps so far; history: a record for each finished epoch.
    """

    epoch: int = 0
    step: int = 0
    loss: float = 0.0
    rows: int = 0
    history: list[dict[str, float]] = dataclasses.field(default_factory=list)


class Trainer:
    """Training of a session on rows.

    Args:
        session: in one process, or one of a group; in a group every process makes the same trainer.
        data: the rows to train on.
        settings: see there.
        validation: rows on which loss and accuracy are taken after each epoch; None for none.
        checkpoint: file that is replaced after each epoch, and after every `save_every` steps; by rank 0.

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
    ) -> None:
        settings.check()
        if save_every < 0:
            raise UsageError(f"save_every: got {save_every}, expected a number of steps >= 0")
        self.session, self.data, self.settings, self.validation = session, data, settings, validation
        self.checkpoint, self.save_every = checkpoint, save_every
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
                session.check(rows[self._mine(np.arange(min(len(rows), settings.batch_size)))])
        session.seed = settings.seed
        if checkpoint is not None and session.rank == 0:
            check_space(checkpoint, session.state_bytes)

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
        """
        while self.progress.epoch < self.settings.epochs:
            record = self._run_epoch(on_step)
            self.progress = Progress(self.progress.epoch + 1, history=[*self.progress.history, record])
            self._save()
            on_epoch(record)
        return self.progress.history

    def _run_epoch(self, on_step: Callable[[int], None]) -> dict[str, float]:
        progress, size = self.progress, self.settings.batch_size
        order = np.random.default_rng([self.settings.seed, progress.epoch]).permutation(len(self.data))
        while progress.step < self.steps_per_epoch:
            self.session.learning_rate = self.settings.learning_rate_at(self.steps_done, self.steps)
            joint = order[progress.step * size : (progress.step + 1) * size]
            progress.loss += self.session.step(self.data[self._mine(joint)]) * len(joint)
            progress.rows += len(joint)
            progress.step += 1
            if self.save_every and self.steps_done % self.save_every == 0 and progress.step < self.steps_per_epoch:
                self._save()
            on_step(self.steps_done)
        return {
            "epoch": progress.epoch + 1,
            "loss": progress.loss / progress.rows,
            "learning_rate": self.session.learning_rate,
            **self._validate(),
        }

    def _validate(self) -> dict[str, float]:
        if self.validation is None:
            return {}
        mine = self._mine(np.arange(len(self.validation)))
        loss = correct = counted = 0.0
        for start in range(0, len(mine), self.settings.batch_size):
            batch = self.validation[mine[start : start + self.settings.batch_size]]
            result = self.session.evaluate(batch)
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
            kept = {"training": self._identity(), "progress": dataclasses.asdict(self.progress)}
            self.session.save_checkpoint(self.checkpoint, {_PROGRESS: json.dumps(kept)})
            self.saved_steps = self.steps_done

    def _identity(self) -> dict[str, Any]:
        """Return the settings that must not change for the same result; epochs matter to a schedule only."""
        made = {**dataclasses.asdict(self.settings), "graph": self.session.digest, "data": self.data.shapes()}
        if self.settings.schedule == "constant":
            del made["epochs"]
        if self.validation is not None:
            made["validation"] = self.validation.shapes()
        return made


def _right(output: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> int | None:
    """Count the rows of scores (n, classes) that are highest at their class (n,); None for other outputs."""
    if output.ndim != 2 or target.shape != output.shape[:1] or target.dtype.kind not in "iu":
        return None
    return int((output.argmax(1) == target).sum())
