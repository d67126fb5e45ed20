"""The three files of a training step, and how they appear together.

    step.onnx           one training step; this name is what a TrainingSession takes
    step.eval.onnx      loss and outputs in eval mode
    step.safetensors    the initial state

Both graphs hold no weights: all state comes in as inputs. The step's graph is renamed into place last.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir

_FORMAT = {"format": "bnexport.training.state", "version": "1"}


@dataclasses.dataclass(frozen=True)
class Paths:
    step: str
    evaluation: str
    state: str


def paths(path: str | os.PathLike[str]) -> Paths:
    step = os.fspath(path)
    stem = step.removesuffix(".onnx")
    return Paths(step, f"{stem}.eval.onnx", f"{stem}.safetensors")


def write(names: Paths, step: ir.Model, evaluation: ir.Model, state: Mapping[str, np.ndarray]) -> None:
    from bnexport import model_io

    staged = []
    try:
        for model, name in ((evaluation, names.evaluation), (step, names.step)):
            staged.append(model_io.stage(model, name))
        save_state(state, names.state)
        for file in staged:
            file.commit()
    finally:
        for file in staged:
            file.discard()


def save_state(state: Mapping[str, np.ndarray], path: str | os.PathLike[str]) -> None:
    """Writes a state or checkpoint atomically."""
    from bnexport import model_io

    model_io.save_tensors(state, _FORMAT, path)


def load_state(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    from bnexport import model_io

    return model_io.load_tensors(path)[0]
