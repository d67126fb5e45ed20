"""Warnings of torch's tracer become notes that name the line of the model's code."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch import nn

import bnexport
from bnexport.exporting import tracer_notes
from bnexport.exporting.tracer_notes import TracerNotes
from tests.exporting.traces import is_tracer_note


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1e6:
            x = x + 1
        return self.body(x) * float(x.shape[1])


def line_of(words: str) -> int:
    lines, first = inspect.getsourcelines(Asks)
    return first + next(index for index, line in enumerate(lines) if words in line)


@pytest.mark.parametrize("suffix", ["onnx", "pt"])
def test_places_in_the_model(suffix, tmp_path) -> None:
    """No warning gets out, and torch's own lines are in no note."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="scripting fails")
        model = Asks() if suffix == "onnx" else Unscriptable()
        result = bnexport.export(
            model.eval(), torch.randn(2, 3, 6, 6), tmp_path / f"m.{suffix}", exporter="torchscript"
        )
    assert result.verification.passed
    assert [note for note in result.notes if is_tracer_note(note)] == [
        "the trace keeps what it found for the example:"
        f" {what} at exporting/test_tracer_notes.py:{line_of(words)} in forward"
        for what, words in (("a condition", "if x.sum()"), ("a float", "float(x.shape[1])"))
    ]


class Unscriptable(Asks):
    """The compiler knows no set comprehensions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * max({value + 1 for value in (0, 0)})


def test_many_places_are_one_note() -> None:
    with TracerNotes() as tracer:
        for number in range(20):
            code = compile("warnings.warn('Python index', torch.jit.TracerWarning)", f"/code/net_{number}.py", "exec")
            exec(code, {"warnings": warnings, "torch": torch})
        warnings.warn("of another kind", UserWarning)
    assert len(tracer.notes) == tracer_notes._MOST + 1
    assert str(tracer.notes[0]).endswith("an index at code/net_0.py:1 in <module>")
    assert str(tracer.notes[-1]).endswith("at 12 more places")
