"""Settings of a training, and its learning rates.

    constant    r
    cosine      r (1 + cos(pi k / n)) / 2       step k of n: torch's CosineAnnealingLR(T_max=n), by steps
    step        r gamma^m                       m milestones (epochs) are behind: torch's MultiStepLR

Warm-up multiplies the first w steps by (k + 1) / w, as LinearLR does.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from typing import Literal

from bnexport.errors import UsageError

SCHEDULES = ("constant", "cosine", "step")
# Metrics of an epoch, and whether more of it is better.
METRICS = {"loss": False, "validation_loss": False, "accuracy": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that determine the steps, together with the graph and the data.

    batch_size: rows of one step, of all processes together. drop_last: leave out an epoch's last batch where it
    is smaller. learning_rate: the highest. schedule: "constant"; "cosine", which falls from it to zero over
    all steps; "step", which is multiplied by gamma after each number of epochs in milestones. warm_up: number of
    steps in which it rises from zero. flip: mirror each image of a folder left to right with probability 1/2, drawn
    anew in each epoch. ema_decay: the session's; validation then uses the averages.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    seed: int = 0
    schedule: Literal["constant", "cosine", "step"] = "constant"
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    warm_up: int = 0
    drop_last: bool = False
    flip: bool = False
    ema_decay: float | None = None

    def check(self) -> None:
        """Raise UsageError for an invalid setting."""
        for name, least in (("epochs", 1), ("batch_size", 1), ("seed", 0), ("warm_up", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}: got {getattr(self, name)}, expected a whole number >= {least}")
        for name in ("learning_rate", "gamma"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}: got {getattr(self, name)}, expected a finite number >= 0")
        if self.schedule not in SCHEDULES:
            raise UsageError(f"schedule: got {self.schedule!r}, expected one of {', '.join(SCHEDULES)}")
        if bool(self.milestones) is not (self.schedule == "step"):
            raise UsageError(
                f"milestones: got {_listed(self.milestones) or 'none'} with the schedule {self.schedule!r}, expected epochs"
                " with 'step' alone"
            )
        if list(self.milestones) != sorted({each for each in self.milestones if each > 0}):
            raise UsageError(f"milestones: got {_listed(self.milestones)}, expected rising numbers of epochs >= 1")
        if self.milestones and self.milestones[-1] >= self.epochs:
            raise UsageError(
                f"milestones: got {self.milestones[-1]}, where a training of {self.epochs} epochs has ended; expected less"
            )

    def steps_per_epoch(self, rows: int) -> int:
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def learning_rate_at(self, step: int, steps_per_epoch: int) -> float:
        """Return the learning rate of step `step` of the training, the first being 0.

        Raises UsageError for a step behind the end.
        """
        steps = self.epochs * steps_per_epoch
        if not 0 <= step < steps:
            raise UsageError(f"step: got {step}, expected one of the schedule's {steps} steps, from 0 on")
        rate = self.learning_rate
        if self.schedule == "cosine":
            rate *= 0.5 * (1.0 + math.cos(math.pi * step / steps))
        elif self.schedule == "step":
            rate *= self.gamma ** bisect.bisect_right(self.milestones, step // steps_per_epoch)
        return rate * min(1.0, (step + 1) / self.warm_up) if self.warm_up else rate


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
