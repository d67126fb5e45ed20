"""Exponential moving average of the weights: e = d e + (1 - d) p after each update, e = p after the first.

As torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(d) and use_buffers=True: parameters and
statistics are averaged, whole numbers copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from bnexport.errors import UsageError

Array = np.ndarray[Any, Any]

# Names of averages in a checkpoint; a name of the state has no colon.
PREFIX = "average:"


class Averages:
    """Averages by name, empty before the first update. decay: d, within [0, 1)."""

    def __init__(self, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise UsageError(f"ema_decay: got {decay}, expected a number within [0, 1)")
        self.decay = decay
        self.values: dict[str, Array] = {}

    def update(self, values: Iterable[tuple[str, Array]]) -> None:
        """Take in the weights after an update; they are read only."""
        for name, value in values:
            average = self.values.get(name)
            if average is None or value.dtype.kind != "f":
                self.values[name] = np.array(value)
            else:
                average += (value - average) * value.dtype.type(1.0 - self.decay)
