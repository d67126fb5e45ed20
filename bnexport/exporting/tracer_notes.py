"""Notes out of the warnings of torch's tracer.

A trace keeps what the model's code makes of the example: the branch of an `if` on a size, a number from int(). The tracer
warns, loosely and with lines of torch's own; a note says where in the model's code, and goes with the result.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from bnexport.exporting.notes import Note

_WARNING: type[Warning] = torch.jit.TracerWarning  # type: ignore[attr-defined]
# Every line of a large model would bury the other notes.
_MOST = 8
_OWN = tuple(str(Path(module.__file__).parent) for module in (torch, sys.modules["bnexport"]) if module.__file__)
# Files of Python, torch and this package that pass calls of the model's code on.
_PASSING = (
    *("/warnings.py", "/torch/_tensor.py", "/torch/overrides.py", "/exporting/tracer_notes.py"),
    *("/substitutes/symbolic_int.py", "/substitutes/adaptive_pooling.py", "/substitutes/weight_norm.py"),
)


class TracerNotes:
    """Context that turns the tracer's warnings into notes, each place of the model's code once; other warnings are
    dropped.

    Warnings about torch's own lines are dropped, too, as torch does by default: comparisons at other sizes find what is
    wrong there.
    """

    def __init__(self) -> None:
        self._places: dict[str, str] = {}
        self._catch = warnings.catch_warnings()

    def __enter__(self) -> TracerNotes:
        self._catch.__enter__()
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", _WARNING)
        warnings.showwarning = self._note  # type: ignore[assignment]
        return self

    def __exit__(self, *details: Any) -> None:
        self._catch.__exit__(*details)

    @property
    def notes(self) -> list[Note]:
        listed = [f"{what} at {place}" for place, what in self._places.items()]
        if len(listed) > _MOST:
            listed[_MOST:] = [f"at {len(listed) - _MOST} more places"]
        return [Note("traced", f"the trace keeps what it found for the example: {each}") for each in listed]

    def _note(self, message: Warning | str, category: type[Warning], *_: Any) -> None:
        place = _place_in_the_model(sys._getframe(1)) if issubclass(category, _WARNING) else ""
        if place:
            self._places.setdefault(place, _kind(str(message)))


def _place_in_the_model(frame: FrameType | None) -> str:
    """Return the line that did it, if it is none of torch's or ours; both have files that only pass a call on."""
    while frame is not None and frame.f_code.co_filename.endswith(_PASSING):
        frame = frame.f_back
    path = "" if frame is None else frame.f_code.co_filename
    if frame is None or path.startswith((*_OWN, "<")):
        return ""
    return f"{'/'.join(Path(path).parts[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}"


def _kind(message: str) -> str:
    """Say what the code did, from the tracer's sentence."""
    for words, kind in (
        ("Python boolean", "a condition"),
        ("Python integer", "an integer"),
        ("Python float", "a float"),
        ("Python number", "a number"),
        ("Python index", "an index"),
        ("Python list", "a list"),
        ("NumPy array", "a NumPy array"),
        ("Iterating over", "a loop over a tensor"),
        ("torch.tensor results", "a tensor out of numbers"),
    ):
        if words in message:
            return kind
    return message.partition(". ")[0].splitlines()[0][:120]
