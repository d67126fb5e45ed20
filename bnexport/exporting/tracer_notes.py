"""Notes out of the warnings of torch's tracer.

A trace keeps what the model's code makes of the example: the branch of an `if` on a size, a number from int(). The tracer
warns, loosely and with lines of torch's own; a note says where in the model's code, and goes with the result. Sizes are compared
at others afterwards. What the code reads out of the inputs' values (`if x.mean() > 0`, `range(int(x.sum()))`) no comparison finds
for certain, so such a file is not verified. These reads are found in a run without the tracer, where sizes are numbers, by
following the inputs: every result of an operator that takes one is one, too.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from bnexport.exporting.dimensions import Note
from bnexport.modules.copies import copy_model
from bnexport.torch_versions import DispatchMode, pytree

_WARNING: type[Warning] = torch.jit.TracerWarning  # type: ignore[attr-defined]
# Every line of a large model would bury the other notes.
_MOST = 8
OWN = tuple(str(Path(module.__file__).parent) for module in (torch, sys.modules["bnexport"]) if module.__file__)
_READ = "aten::_local_scalar_dense"  # of bool(), int(), float() and item()
# Read without an operator.
_ARRAYS: dict[Any, str] = {torch.Tensor.tolist: "a list", torch.Tensor.numpy: "a NumPy array"}
# Files of Python, torch and this package that pass calls of the model's code on.
_PASSING = (
    *("/warnings.py", "/torch/_tensor.py", "/torch/overrides.py", "/exporting/tracer_notes.py"),
    *("/torch/_dynamo/eval_frame.py", "/torch/_compile.py"),
    "/exporting/substitutes.py",
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

    def notes(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[Note]:
        """Return the notes on a trace of `module`; it runs once more if the trace keeps anything."""
        values = _values_read(module, inputs) if self._places else {}
        listed = [f"{what} at {place}" for place, what in self._places.items() if place not in values]
        if len(listed) > _MOST:
            listed[_MOST:] = [f"at {len(listed) - _MOST} more places"]
        kept = [Note("traced", f"the trace keeps what it found for the example: {each}") for each in listed]
        read = ", ".join(f"{self._places.get(place, what)} at {place}" for place, what in list(values.items())[:_MOST])
        text = f"the trace keeps what the code made of the example's values: {read}; other values give wrong results"
        return [*kept, Note("values", text)] if values else kept

    def _note(self, message: Warning | str, category: type[Warning], *_: Any) -> None:
        place = _place_in_the_model(sys._getframe(1)) if issubclass(category, _WARNING) else ""
        if place:
            self._places.setdefault(place, _kind(str(message)))


def _values_read(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, str]:
    """Return the places of the model's code that read values of the inputs, and what they make of them."""
    own = tuple(value.clone() for value in inputs)
    found = _Values(own)
    # What the code raises here, it raised in the trace.
    with torch.no_grad(), contextlib.suppress(Exception), warnings.catch_warnings(), _Arrays(found), found:
        warnings.simplefilter("ignore")
        copy_model(module, share_parameters=True)(*own)
    return found.places


class _Values(DispatchMode):
    """Mode that notes where code outside torch reads values of the inputs, or of what is computed from them.

    Those tensors are kept alive, as another one may get the number of one that is gone.
    """

    def __init__(self, inputs: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.places: dict[str, str] = {}
        self._followed = {id(value): value for value in inputs}

    def _follow(self, values: Any) -> None:
        self._followed.update((id(leaf), leaf) for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))

    def read(self, values: Any, what: str) -> None:
        """Note the place where Python reads one of these."""
        place = _place_in_the_model(sys._getframe(2)) if self._has(values) else ""
        if place:
            self.places.setdefault(place, what)

    def _has(self, values: Any) -> bool:
        return any(id(leaf) in self._followed for leaf in pytree.tree_leaves(values))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name() == _READ:
            self.read(args, "a number")
        result = func(*args, **(kwargs or {}))
        if self._has((args, kwargs)):
            self._follow(result)
        return result


class _Arrays(TorchFunctionMode):
    """Mode that notes what leaves tensors without an operator."""

    def __init__(self, values: _Values) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ARRAYS:
            self._values.read(args, _ARRAYS[func])
        return func(*args, **(kwargs or {}))


def _place_in_the_model(frame: FrameType | None) -> str:
    """Return the line that did it, if it is none of torch's or ours; both have files that only pass a call on."""
    while frame is not None and frame.f_code.co_filename.endswith(_PASSING):
        frame = frame.f_back
    path = "" if frame is None else frame.f_code.co_filename
    if frame is None or path.startswith((*OWN, "<")):
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
