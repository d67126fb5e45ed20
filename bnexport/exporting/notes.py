"""Notes of an export: deviations from what was asked for, as records; their text is made where it is shown."""

from __future__ import annotations

import dataclasses
from typing import Literal

Kind = Literal[
    "constant",
    "static",
    "limited",
    "traced",
    "values",
    "scripting",
    "unfolded",
    "buffer",
    "argument",
    "unwrapped",
    "mode",
    "exporter",
    "quantised",
]


@dataclasses.dataclass(frozen=True)
class Note:
    """One thing to know about an exported file.

    kind: "constant" and "static" for a dimension that is not dynamic, since the model fixes it or for a reason; "limited" for
    one whose sizes the model limits; the others are about the whole file, and `reason` is their text. name, size: of the
    dimension. operator: what most likely is the cause.
    """

    kind: Kind
    reason: str = ""
    input: str = ""
    dimension: int = 0
    name: str = ""
    size: int = 0
    operator: str = ""

    def __str__(self) -> str:
        if not self.input:
            return self.reason
        where = f"input {self.input!r}: dimension {self.dimension} ({self.name})"
        if self.kind == "limited":
            return f"{where} has to be {self.reason}"
        why = ", the model fixes it" if self.kind == "constant" else f": {self.reason}"
        return f"{where} stays {self.size}{why}{self.operator and f' ({self.operator})'}"
