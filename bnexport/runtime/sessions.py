"""Sessions of ONNX Runtime with the library registered, and models prepared for them."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bnexport import interface, model_io
from bnexport.errors import MissingPackageError, UnsupportedModelError, UsageError
from bnexport.interface import suggestion
from bnexport.native import library

if TYPE_CHECKING:
    import onnx_ir as ir


# Inputs of an ONNX Runtime session: a serialised graph and separate weights, without a file name.

_OF_NVIDIA = ("cuda", "tensorrt", "nvtensorrtrtx")
# What ONNX Runtime says of files newer than itself.
_NEWER_IR = re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)")
_NEWER_OPSET = re.compile(r"Opset (\d+) is under development .*is till opset (\d+)", re.DOTALL)
# Bytes of tensors that go into one message; protobuf ends at twice as many, the graph included.
_LARGEST_MESSAGE = 2**30

Providers = Sequence[str | tuple[str, dict[str, Any]]] | None


def import_onnxruntime() -> Any:
    """Import onnxruntime. Raise MissingPackageError with what to install."""
    try:
        import onnxruntime
    except ImportError as error:
        raise interface.missing("onnxruntime") from error
    if not hasattr(onnxruntime, "SessionOptions"):  # a folder without files that were another distribution's, too
        raise MissingPackageError(
            "onnxruntime is broken: a second onnxruntime package was installed over it and removed; pip uninstall "
            "onnxruntime onnxruntime-gpu, then install one of them",
            name="onnxruntime",
        )
    return onnxruntime


def check_providers(names: Sequence[str]) -> list[str]:
    """Return the providers' full names: `cuda` is CUDAExecutionProvider. Raise UsageError for one that is not
    available.
    """
    if not names:
        return []
    available = import_onnxruntime().get_available_providers()
    by_name = {name.removesuffix("ExecutionProvider").lower(): name for name in available}
    full = [by_name.get(name.removesuffix("ExecutionProvider").lower(), name) for name in names]
    for given, name in zip(names, full):
        if name not in available:
            near = suggestion(given.lower(), by_name)
            if name.removesuffix("ExecutionProvider").lower() in _OF_NVIDIA:
                near = "; for NVIDIA GPUs: pip uninstall onnxruntime, then pip install onnxruntime-gpu (extra [gpu])"
            raise UsageError(
                f"provider: got {given!r}, expected one of {', '.join(by_name)}, which this onnxruntime has{near}"
            )
    return full


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Arguments of `onnxruntime.InferenceSession` next to the options, and values to keep alive with the session."""

    data: bytes
    arguments: dict[str, Any]
    values: list[Any]


def prepare(data: bytes, weights: Mapping[str, np.ndarray], options: Any, providers: Providers = None) -> Prepared:
    """Return a serialised model for a session with `options`, to which the weights are added.

    weights: initializers that `data` declares as external, by name; ONNX Runtime uses an array in place if it is in C
    order. With any, `options` serve this session only: ONNX Runtime keeps the names in them.
    providers: None for the devices that `options` hold (add_provider_for_devices), or CPU.
    """
    onnxruntime = import_onnxruntime()
    # ONNX Runtime copies a transposed view into a buffer of its own, and takes none of those for an initializer.
    arrays = [np.asarray(array, order="C") for array in weights.values()]
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in arrays]
    if values:
        options.add_external_initializers(list(weights), values)
    if providers or _holds_devices(options):
        # ONNX Runtime drops the devices when it is given a list of names, too.
        return Prepared(data, {"providers": list(providers)} if providers else {}, values)
    # Its second try on the CPU, which it announces on stdout, is of use to other providers only.
    return Prepared(data, {"providers": ["CPUExecutionProvider"], "enable_fallback": 0}, values)


def too_new(error: BaseException) -> str:
    """Return one line about a file that is newer than this ONNX Runtime; empty for other errors of a session."""
    text = str(error)
    found = _NEWER_IR.search(text) or _NEWER_OPSET.search(text)
    if found is None:
        return ""
    kind, engine = "IR version" if found.re is _NEWER_IR else "opset", f"onnxruntime {import_onnxruntime().__version__}"
    return (
        f"the file has {kind} {found[1]}, and {engine} reads up to {found[2]}; install a newer onnxruntime, or write the"
        " file for an older opset (18 loads in onnxruntime 1.17 and newer)"
    )


def _holds_devices(options: Any) -> bool:
    """Whether providers were added to the options; ONNX Runtime before 1.22 does not support that."""
    return hasattr(options, "has_providers") and bool(options.has_providers())


def prepare_model(
    model: ir.Model, options: Any, providers: Providers = None, *, keep_options: bool = False, mapped: bool = False
) -> Prepared:
    """`prepare` for a model that `model_io` has checked; its weights are read here.

    keep_options: other sessions are made with the same options, so weights go inside the message where it holds
    them. mapped: weights in files are mapped, not read; the files must stay as they are. Raises what reading a model
    raises.
    """
    from bnexport import model_io
    from bnexport.model_io.write import tensor_total

    if keep_options and tensor_total(model) <= _LARGEST_MESSAGE:
        return prepare(model_io.to_bytes(model), {}, options, providers)
    parts = model_io.to_parts(model)
    weights = {
        name: tensor.mapped() if mapped and isinstance(tensor, model_io.ContainedTensor) else tensor.numpy()
        for name, tensor in parts.weights.items()
    }
    return prepare(parts.data, weights, options, providers)


# ONNX Runtime sessions with the custom operators registered.

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
        onnxruntime = import_onnxruntime()
        if "session_options" in kwargs:  # ONNX Runtime ignores what it does not know.
            raise TypeError("InferenceSession() takes sess_options, as onnxruntime's does, not session_options")
        options = onnxruntime.SessionOptions() if sess_options is None else sess_options
        library.register(options)
        if isinstance(path_or_bytes, bytes):
            model_io.check(path_or_bytes)
            prepared = prepare(path_or_bytes, {}, options, providers)
        else:
            model = model_io.load(path_or_bytes)
            prepared = prepare_model(model, options, providers, keep_options=sess_options is not None)
        chosen = {**prepared.arguments, **kwargs}
        if provider_options is not None:
            chosen["provider_options"] = provider_options
        try:
            super().__init__(prepared.data, options, **chosen)
        except Exception as error:  # ONNX Runtime raises one class for each status code
            reason = too_new(error)
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
