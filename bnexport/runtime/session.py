"""An ONNX Runtime session with our operators in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from bnexport.errors import MalformedModelError, MissingDependencyError
from bnexport.runtime import library

__all__ = ["InferenceSession"]


def import_onnxruntime() -> Any:
    """The module, or MissingDependencyError that says what to install."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(
            "onnxruntime is not installed; install bnexport[cpu] or bnexport[gpu] (one of them, not both)"
        ) from error
    return onnxruntime


def InferenceSession(
    path: str | os.PathLike[str] | bytes,
    providers: Sequence[str | tuple[str, dict[str, Any]]] | None = None,
    *,
    session_options: Any = None,
) -> Any:
    """An `onnxruntime.InferenceSession` of the model at `path` (or of its bytes), with our operators.

    Args:
        path: the model file, or the serialised model.
        providers: execution providers in order of preference; None for CPU.
        session_options: options to extend; a new set when None.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
        LibraryError: the compiled library is missing or cannot be loaded.
        MalformedModelError: the file does not exist.
    """
    onnxruntime = import_onnxruntime()
    options = session_options if session_options is not None else onnxruntime.SessionOptions()
    library.register(options)
    if not isinstance(path, bytes):
        path = os.fspath(path)
        if not os.path.isfile(path):
            raise MalformedModelError(f"{path}: got no such file, expected an ONNX model; check the path")
    return onnxruntime.InferenceSession(
        path, options, providers=list(providers) if providers else ["CPUExecutionProvider"]
    )
