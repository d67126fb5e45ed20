"""Communicators between GPUs over NCCL.

The CUDA library (custom_ops/include/bnexport_nccl.h) opens libnccl at run time: the one that PyTorch
loaded, or that of the package nvidia-nccl. All-gathers run on ONNX Runtime's stream, and end in an error
after the timeout where a member is gone.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.metadata
from typing import Any

from bnexport.errors import GroupError
from bnexport.native import calls, cuda

__all__ = ["Communicator", "join", "library", "unique_id", "version"]

_ID_BYTES = 128
_SONAME = "libnccl.so.2"
_DISTRIBUTIONS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


@functools.cache
def library() -> ctypes.CDLL:
    """Return the CUDA library with typed NCCL functions. Raise LibraryError if it is not available."""
    loaded, text = cuda.library(), ctypes.c_char_p
    functions = {
        "bnexport_nccl_version": (text, ctypes.POINTER(ctypes.c_int)),
        "bnexport_nccl_unique_id": (text, text),
        "bnexport_nccl_join": (
            text,
            ctypes.c_int64,
            ctypes.c_int64,
            text,
            ctypes.c_double,
            ctypes.POINTER(ctypes.c_void_p),
        ),
        "bnexport_nccl_status": (ctypes.c_void_p,),
    }
    calls.declare(loaded, functions)
    loaded.bnexport_nccl_leave.argtypes, loaded.bnexport_nccl_leave.restype = (ctypes.c_void_p,), None
    return loaded


def _call(name: str, *arguments: Any) -> None:
    status, message = calls.call(library(), name, *arguments)
    if status != 0:
        raise GroupError(message)


@functools.cache
def _nccl() -> bytes | None:
    """Return the path of libnccl, or None if the loader finds it by name, as when PyTorch has loaded it."""
    try:
        ctypes.CDLL(_SONAME)
        return None
    except OSError:
        pass
    for distribution in _DISTRIBUTIONS:
        try:
            files = importlib.metadata.distribution(distribution).files or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == _SONAME:
                return str(file.locate()).encode()
    return None


def version() -> str:
    """Return NCCL's version, such as "2.27.3". Raise GroupError without NCCL, LibraryError without the CUDA library."""
    number = ctypes.c_int()
    _call("bnexport_nccl_version", _nccl(), ctypes.byref(number))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


class Communicator:
    """Membership of one process in a group. `context` and `all_gather` are arguments of bnexport_register_device_group."""

    def __init__(self, handle: int) -> None:
        self.context = handle
        self.all_gather: int = ctypes.cast(library().bnexport_nccl_all_gather, ctypes.c_void_p).value or 0
        # NCCL must not be running when the process takes the CUDA runtime down.
        atexit.register(self.leave)

    def check(self) -> None:
        """Raise GroupError if a gather has failed; after the stream has ended, this covers every gather on it."""
        if self.context:
            _call("bnexport_nccl_status", self.context)

    def leave(self) -> None:
        """Free the communicator when pending work has ended; abort it after five seconds."""
        atexit.unregister(self.leave)
        handle, self.context = self.context, 0
        if handle:
            library().bnexport_nccl_leave(handle)


def unique_id() -> bytes:
    """Return the id of a new communicator, made by one member for all. Raise the errors of `version`."""
    made = ctypes.create_string_buffer(_ID_BYTES)
    _call("bnexport_nccl_unique_id", _nccl(), made)
    return made.raw


def join(identifier: bytes, size: int, rank: int, seconds: float) -> Communicator:
    """Join a communicator of `size` members on the current CUDA device, which has a context; return when all have
    joined.

    identifier: what `unique_id` gave one of them. seconds: how long to wait for the others.
    Raises GroupError when NCCL is missing or fails or a member does not come, LibraryError without the CUDA library.
    """
    handle = ctypes.c_void_p()
    _call("bnexport_nccl_join", _nccl(), size, rank, identifier, seconds, ctypes.byref(handle))
    return Communicator(handle.value or 0)
