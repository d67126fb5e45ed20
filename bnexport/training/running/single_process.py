"""Steps of a session in one process; `parallel` runs those of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bnexport.training.building.description import GRADIENT_SUFFIX, LEARNING_RATE, LOSS, Description
from bnexport.training.running import divergence
from bnexport.training.running.state import State, changing

Array = np.ndarray[Any, Any]


class SingleProcess:
    """A step's graph and its state."""

    takes_no_rows = False
    size, rank = 1, 0

    def __init__(self, session: Any, description: Description, initial: Mapping[str, Array]) -> None:
        self.session = session
        self.inputs = {value.name: value for value in session.get_inputs()}
        self.state = State(initial, changing(session, initial))
        self._stage = self.state.bind(session)
        self._description = description
        self._names = description.gradients if description.mode == "gradients" else ()
        self._gradients: dict[str, Array] = {}

    def run(
        self, feeds: Mapping[str, Array], rows: int, weight: float | None, learning_rate: float, outputs: Sequence[str]
    ) -> tuple[float, list[Array]]:
        """Run one step. Return the loss and the outputs. Raises DivergedError, which lists what is NaN."""
        del rows, weight  # one process has all of the loss
        if LEARNING_RATE in self.inputs:
            feeds = {**feeds, LEARNING_RATE: np.array(learning_rate, np.float64)}
        wanted = [LOSS, *outputs, *(name + GRADIENT_SUFFIX for name in self._names)]
        loss, *arrays = self._stage.run(feeds, wanted)
        divergence.check(float(loss), self.state, self._description)
        self.state.advance()
        self._gradients = dict(zip(self._names, arrays[len(outputs) :]))
        return float(loss), arrays[: len(outputs)]

    def gradients(self) -> dict[str, Array]:
        """Return the gradients of the last step, by parameter name, of a graph in mode "gradients"."""
        return self._gradients

    def gather(self, row: Sequence[float]) -> Array:
        """Return the row as that of the only process."""
        return np.array([row], np.float64)

    def invalidate(self) -> None:
        """Ignore that the state was set from outside."""

    def refuse(self) -> None:
        """Ignore that a batch was refused before the step."""
