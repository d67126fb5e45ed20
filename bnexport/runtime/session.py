"""ONNX Runtime sessions with the custom operators registered."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bnexport import model_io
from bnexport.errors import UnsupportedModelError
from bnexport.native import library
from bnexport.runtime import injection

__all__ = ["InferenceSession"]

if TYPE_CHECKING:
    _Base: Any = object
else:
    try:
        from onnxruntime import InferenceSession as _Base
    except ImportError:  # The constructor says what to install.
        _Base = object


class InferenceSession(_Base):
    """An `onnxruntime.InferenceSession` with the custom operators and the same signature.

    The model is checked as every model file is (docs/security.md), and ONNX Runtime is given what was checked:
    it opens no file.

    Args:
        path_or_bytes: the model file, or the serialised model, which then holds its weights.
        sess_options: options to extend; a new set when None.
        providers: execution providers in order of preference; None for the devices that `sess_options` hold
            (`add_provider_for_devices`), or CPU.
        provider_options: a dict for each of the providers.
        kwargs: what else `onnxruntime.InferenceSession` takes.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
        LibraryError: the compiled library is missing or cannot be loaded.
        MissingFileError: the file does not exist.
        MalformedModelError: the file is no ONNX model.
        UnsafeModelError: the file reaches outside its folder or past a limit.
        UnsupportedModelError: it holds what bnexport does not read, such as sparse initializers, or is newer than this
            ONNX Runtime.
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes,
        sess_options: Any = None,
        providers: Sequence[str | tuple[str, dict[str, Any]]] | None = None,
        provider_options: Sequence[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        onnxruntime = injection.import_onnxruntime()
        if "session_options" in kwargs:  # ONNX Runtime ignores what it does not know.
            raise TypeError("InferenceSession() takes sess_options, as onnxruntime's does, not session_options")
        options = onnxruntime.SessionOptions() if sess_options is None else sess_options
        library.register(options)
        if isinstance(path_or_bytes, bytes):
            model_io.check(path_or_bytes)
            prepared = injection.prepare(path_or_bytes, {}, options, providers)
        else:
            model = model_io.load(path_or_bytes)
            prepared = injection.prepare_model(model, options, providers, keep_options=sess_options is not None)
        chosen = {**prepared.arguments, **kwargs}
        if provider_options is not None:
            chosen["provider_options"] = provider_options
        try:
            super().__init__(prepared.data, options, **chosen)
        except Exception as error:  # ONNX Runtime raises one class for each status code
            reason = injection.too_new(error)
            if "Domain already set in registry" in str(error):
                reason = (
                    "sess_options have the custom-op library twice; leave out register_custom_ops_library, or register it "
                    "with bnexport.register(sess_options)"
                )
            if not reason:
                raise
            where = "" if isinstance(path_or_bytes, bytes) else f"{os.fspath(path_or_bytes)}: "
            raise UnsupportedModelError(f"{where}{reason}") from error
        self.bnexport_weights = prepared.values  # ONNX Runtime holds addresses, not arrays.
