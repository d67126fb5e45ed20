"""An ONNX Runtime session with our operators in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from bnexport import model_io
from bnexport.native import library
from bnexport.runtime import injection

__all__ = ["InferenceSession"]


def InferenceSession(
    path: str | os.PathLike[str] | bytes,
    providers: Sequence[str | tuple[str, dict[str, Any]]] | None = None,
    *,
    session_options: Any = None,
) -> Any:
    """An `onnxruntime.InferenceSession` of the model at `path` (or of its bytes), with our operators.

    The model is checked as every model file is (docs/security.md), and ONNX Runtime is given what was checked:
    it opens no file.

    Args:
        path: the model file, or the serialised model, which then holds its weights.
        providers: execution providers in order of preference; None for the devices that `session_options` hold
            (`add_provider_for_devices`), or CPU.
        session_options: options to extend; a new set when None.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
        LibraryError: the compiled library is missing or cannot be loaded.
        MalformedModelError: the file does not exist, or is no ONNX model.
        UnsafeModelError: the file reaches outside its folder or past a limit.
        UnsupportedModelError: it holds what bnexport does not read, such as sparse initializers.
    """
    onnxruntime = injection.import_onnxruntime()
    options = session_options if session_options is not None else onnxruntime.SessionOptions()
    library.register(options)
    if isinstance(path, bytes):
        model_io.check(path)
        return injection.session(path, {}, options, providers)
    return injection.open_model(model_io.load(path), options, providers, keep_options=session_options is not None)
