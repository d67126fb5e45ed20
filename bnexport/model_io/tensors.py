"""Named tensors in safetensors files: initial values and checkpoints of a training graph."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from bnexport import extras
from bnexport.errors import MalformedModelError, MissingFileError
from bnexport.model_io import staging

Tensors = dict[str, np.ndarray]


def save_tensors(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str], path: str | os.PathLike[str]) -> None:
    """Write a safetensors file atomically; the same tensors give the same bytes."""
    numpy_format = _safetensors()
    import safetensors

    contiguous = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    try:
        with staging.whole_file(path) as staged:
            numpy_format.save_file(contiguous, staged, dict(metadata))
    except (OSError, safetensors.SafetensorError) as error:
        raise staging.write_error(path, error) from error


def load_tensors(path: str | os.PathLike[str]) -> tuple[Tensors, dict[str, str]]:
    """Read the tensors and the metadata of a safetensors file completely.

    Raises MissingFileError, or MalformedModelError: the file is truncated, or no safetensors file.
    """
    _safetensors()
    import safetensors

    name = os.fspath(path)
    if not os.path.isfile(name):
        raise MissingFileError(f"{name}: got no such file, expected a safetensors file; check the path")
    try:
        with safetensors.safe_open(name, framework="numpy") as file:
            names = file.keys()
            return {key: file.get_tensor(key) for key in names}, dict(file.metadata() or {})
    except (safetensors.SafetensorError, OSError, TypeError, KeyError) as error:
        raise MalformedModelError(f"{name}: not a whole safetensors file: {error}") from error


def _safetensors():  # type: ignore[no-untyped-def]
    try:
        import safetensors.numpy
    except ImportError as error:
        raise extras.missing("safetensors", "training graphs keep their state in its format") from error
    return safetensors.numpy
