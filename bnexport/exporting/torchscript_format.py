"""TorchScript files: scripted if the code allows it, else traced, then frozen.

torch.jit is deprecated: it works in torch 2.13 with a warning, which is not shown here, and is not
supported on Python 3.14. Freezing is asked for no arithmetic: it would fold a Linear on (N, C, L)
into a BatchNorm1d along the wrong axis where L equals C. `bnexport.fold_module` has folded before.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bnexport.errors import UnsupportedModelError, first_line
from bnexport.exporting.notes import Note
from bnexport.exporting.tracer_notes import TracerNotes

NAMESPACES = ("aten", "prim")
_FORBIDDEN = ("prim::PythonOp", "prim::CallMethod", "prim::CallFunction")


def build(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.jit.ScriptModule, str, list[Note]]:
    """Return the frozen module, how it was made ("script" or "trace") and notes. `model` is in eval mode.

    Raises UnsupportedModelError where neither way works, or where operators of other libraries remain.
    """
    notes: list[Note] = []
    with _quiet(), torch.no_grad():
        method = "script"
        try:
            frozen = _freeze(torch.jit.script(model))
        except Exception as error:  # the compiler raises what it likes
            method, reason = "trace", first_line(error)[:200].rstrip(":")
            text = (
                f"scripting fails ({reason}); traced instead: control flow and Python numbers stay as they are for the"
            )
            notes.append(Note("scripting", f"{text} example inputs"))
            try:
                own = tuple(value.clone() for value in inputs)  # code that works in place may change them
                with TracerNotes() as tracer:
                    frozen = _freeze(torch.jit.trace(model, own, strict=False, check_trace=False))
                notes[:0] = tracer.notes(model, inputs)
            except Exception as second:
                raise UnsupportedModelError(
                    f"{type(model).__name__}: TorchScript can neither script it ({reason}) nor trace it"
                    f" ({first_line(second)[:200].rstrip(':')}); use format='onnx' or format='pt2'"
                ) from second
        _refuse_foreign_operators(frozen, type(model).__name__)
    return frozen, method, notes


def save(module: torch.jit.ScriptModule, path: Path) -> None:
    with _quiet():
        torch.jit.save(module, str(path))


def operators(module: torch.jit.ScriptModule) -> set[str]:
    """Return the kinds of all nodes, those of inner blocks included."""
    found: set[str] = set()
    graph = module.inlined_graph  # made for this call: its nodes live as long as it does
    blocks: list[Any] = [graph]
    while blocks:
        for node in blocks.pop().nodes():
            found.add(node.kind())
            blocks += node.blocks()
    return found


def _freeze(module: Any) -> torch.jit.ScriptModule:
    frozen: torch.jit.ScriptModule = torch.jit.freeze(module.eval(), optimize_numerics=False)
    return frozen


def _refuse_foreign_operators(module: torch.jit.ScriptModule, name: str) -> None:
    foreign = sorted(
        kind for kind in operators(module) if kind.partition("::")[0] not in NAMESPACES or kind in _FORBIDDEN
    )
    if foreign:
        raise UnsupportedModelError(
            f"{name}: the TorchScript graph needs {', '.join(foreign[:8])}, which torch alone cannot load;"
            " replace it by torch's own operators before export"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
