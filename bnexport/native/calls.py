"""Calls of C functions that return a status and write a message into a buffer of the calling thread."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from typing import Any

from bnexport.errors import LibraryError

__all__ = ["CAPACITY", "call", "declare", "errors", "text"]

CAPACITY = 1024


class _Errors(threading.local):
    """The message buffers of a library: one for each thread, since a new one is zeroed for each call."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(CAPACITY)


errors = _Errors()


def declare(loaded: ctypes.CDLL, functions: Mapping[str, tuple[Any, ...]], abi: tuple[str, int] | None = None) -> None:
    """Declare the types of functions by the arguments before the message; check what the function `abi[0]` returns.

    Raises LibraryError for a library of another ABI version or without one of the functions.
    """
    try:
        if abi is not None and (found := getattr(loaded, abi[0])()) != abi[1]:
            raise LibraryError(f"{loaded._name}: got ABI version {found}, expected {abi[1]}; build it again")
        for name, arguments in functions.items():
            function = getattr(loaded, name)
            function.argtypes = (*arguments, ctypes.c_char_p, ctypes.c_size_t)
            function.restype = ctypes.c_int
    except AttributeError as error:
        raise LibraryError(f"{loaded._name}: lacks a function: {error}; reinstall bnexport") from error


def call(loaded: ctypes.CDLL, name: str, *arguments: Any) -> tuple[int, str]:
    """Call a function; return its status, and its message if that is not 0."""
    buffer = errors.buffer
    status = getattr(loaded, name)(*arguments, buffer, CAPACITY)
    return (0, "") if status == 0 else (status, text(buffer))


def text(buffer: Any) -> str:
    """Return the message in a buffer."""
    return buffer.value.decode("utf-8", "replace")
