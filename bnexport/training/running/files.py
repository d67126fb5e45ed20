"""The three files of a training step, and their joint replacement.

    step.onnx           one training step; this name is what a TrainingSession takes
    step.eval.onnx      loss and outputs in eval mode
    step.safetensors    the initial state

Both graphs hold no weights: all state comes in as inputs. The step's graph is renamed into place last.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from bnexport.errors import MalformedModelError

if TYPE_CHECKING:
    import onnx_ir as ir

# One entry: safetensors writes several in an order that changes from process to process.
_ENTRY = "bnexport.training.running.state"
_VERSION = 1


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


def save_state(
    state: Mapping[str, np.ndarray], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a state or checkpoint atomically; the same state and metadata give the same bytes."""
    from bnexport import model_io

    entry = json.dumps({"version": _VERSION, "metadata": dict(metadata or {})}, sort_keys=True)
    model_io.save_tensors(state, {_ENTRY: entry}, path)


def load_state(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    from bnexport import model_io

    return model_io.load_tensors(path)[0]


def load_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read the metadata given to `save_state`. Raises MalformedModelError for a file that it did not write."""
    from bnexport import model_io

    text = model_io.load_tensors(path)[1].get(_ENTRY, "{}")
    try:
        return dict(json.loads(text)["metadata"])
    except (ValueError, KeyError, TypeError) as error:
        raise MalformedModelError(
            f"{os.fspath(path)}: got a safetensors file that is no checkpoint of a training session; check the path"
        ) from error


def digest(path: str | os.PathLike[str]) -> str:
    """Compute the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()
