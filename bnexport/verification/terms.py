"""Plain data: what a comparison of two models is to use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

Inputs = Mapping[str, np.ndarray] | Sequence[Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a comparison is to use: inputs or how to make them, bounds of the caller's, and how long it may take.

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
