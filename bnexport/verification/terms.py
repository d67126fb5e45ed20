"""Settings of a comparison of two models, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

Inputs = Mapping[str, np.ndarray] | Sequence[Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Terms:
    """Settings of a comparison: the inputs or how to draw them, the caller's bounds, and a time limit.

    timeout: seconds for all of it. patience: seconds for the float64 run that an ill-conditioned model needs. providers: of
    the candidate's session.
    """

    inputs: Inputs | None = None
    seed: int = 0
    samples: int = 2
    atol: float | None = None
    rtol: float | None = None
    timeout: float | None = None
    patience: float = 30.0
    providers: tuple[str, ...] = ()
