"""The result of a builder."""

from __future__ import annotations

import dataclasses

from torch import nn


@dataclasses.dataclass(frozen=True)
class BuiltModel:
    """A model that a library built.

    shape: of one example input, as the library or the configuration states it; None where neither does.
    notes: what was left out.
    """

    module: nn.Module
    shape: tuple[int, ...] | None
    notes: tuple[str, ...] = ()
