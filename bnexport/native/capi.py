"""The C API of the compiled library (custom_ops/include/bnexport.h) through ctypes.

Pointers are integers (`tensor.data_ptr()`, `array.ctypes.data`), 0 where something is absent. The
caller keeps the memory alive and answers for sizes and contiguity. ctypes releases the GIL during
calls. Needs neither torch nor onnxruntime.
"""

from __future__ import annotations

import ctypes
import functools
import json
import threading
from collections.abc import Mapping
from typing import Any

from bnexport.errors import LibraryError, UsageError
from bnexport.native.library import load

# Calls of C functions that return a status and write a message into a buffer of the calling thread.

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


__all__ = [
    "ALL_GATHER",
    "DTYPES",
    "GRAD_REDUCTIONS",
    "LAYOUTS",
    "STATS_MODES",
    "BackwardParams",
    "ForwardParams",
    "backward_params",
    "describe",
    "forward_params",
    "instruction_set",
    "lend_openmp",
    "library",
    "register_group",
    "run",
    "unregister_group",
]

# The values of the header's enums.
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "float64": 3}
LAYOUTS = {"NCS": 0, "NSC": 1}
STATS_MODES = {"exact": 0, "default": 1, "N": 2}
GRAD_REDUCTIONS = {"local": 0, "mean": 1, "sum": 2}

_ABI_VERSION = 1

# int all_gather(context, send, receive, count, error, capacity)
ALL_GATHER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_size_t
)

_i32, _i64, _pointer, _double = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_double

# The only place that knows the order of the header's fields; a test compares it with the header and with a C compiler.
_SIZES = (
    ("struct_size", ctypes.c_uint32),
    ("dtype", _i32),
    ("stats_dtype", _i32),
    ("layout", _i32),
    ("N", _i64),
    ("C", _i64),
    ("S", _i64),
)


class ForwardParams(ctypes.Structure):
    """The struct bnexport_forward; its fields are attributes."""

    __slots__ = ()
    _fields_ = (
        *_SIZES,
        ("x", _pointer),
        ("y", _pointer),
        ("weight", _pointer),
        ("bias", _pointer),
        ("running_mean", _pointer),
        ("running_var", _pointer),
        ("running_mean_out", _pointer),
        ("running_var_out", _pointer),
        ("saved_mean", _pointer),
        ("saved_invstd", _pointer),
        ("momentum", _double),
        ("eps", _double),
        ("training", _i32),
        ("stats_mode", _i32),
        ("group_size", _i64),
        ("gathered", _pointer),
        ("threads", _i32),
        ("saved_as_statistics", _i32),
    )


class BackwardParams(ctypes.Structure):
    """The struct bnexport_backward; its fields are attributes."""

    __slots__ = ()
    _fields_ = (
        *_SIZES,
        ("dy", _pointer),
        ("x", _pointer),
        ("dx", _pointer),
        ("weight", _pointer),
        ("saved_mean", _pointer),
        ("saved_invstd", _pointer),
        ("dweight", _pointer),
        ("dbias", _pointer),
        ("training", _i32),
        ("stats_mode", _i32),
        ("grad_reduction", _i32),
        ("group_size", _i64),
        ("gathered", _pointer),
        ("local_moments", _pointer),
        ("threads", _i32),
        ("saved_as_statistics", _i32),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """Return the loaded library with typed functions. Raise LibraryError if it is not available."""
    loaded, forward, backward = load("ops"), ctypes.POINTER(ForwardParams), ctypes.POINTER(BackwardParams)
    functions = {
        "bnexport_cpu_moments": (forward, _pointer),
        "bnexport_cpu_forward": (forward,),
        "bnexport_cpu_backward_moments": (backward, _pointer),
        "bnexport_cpu_backward": (backward,),
        "bnexport_register_group": (ctypes.c_char_p, _i64, _i64, ALL_GATHER, _pointer),
        "bnexport_unregister_group": (ctypes.c_char_p,),
    }
    declare(loaded, functions, ("bnexport_abi_version", _ABI_VERSION))
    loaded.bnexport_lend_openmp.argtypes = (_pointer,)
    loaded.bnexport_lend_openmp.restype = None
    for name in ("bnexport_describe", "bnexport_instruction_set"):
        getattr(loaded, name).restype = ctypes.c_char_p
    return loaded


@functools.cache
def _function(prefix: str, name: str) -> Any:
    return getattr(library(), prefix + name)


def run(name: str, *arguments: Any, prefix: str = "bnexport_cpu_") -> None:
    """Call a kernel ("forward", "moments", ...) with its struct and, for moments, where to write 2 C + 1 float64. Raises
    UsageError.
    """
    buffer = errors.buffer
    if _function(prefix, name)(*arguments, buffer, CAPACITY) != 0:
        raise UsageError(f"{prefix}{name}: {text(buffer)}")


def _filled(structure: type[ctypes.Structure], values: dict[str, Any]) -> Any:
    """Fill a struct of the C API. Missing fields are 0; training, group_size and threads are 1."""
    names = [name for name, _ in structure._fields_[1:]]  # type: ignore[misc]
    unknown = sorted(values.keys() - set(names))
    if unknown:
        name = structure.__name__.removesuffix("Params").lower()
        raise UsageError(f"{name}: got {unknown}, expected fields of bnexport.h: {names}")
    params = structure(ctypes.sizeof(structure))
    for name, value in {"training": 1, "group_size": 1, "threads": 1, **values}.items():
        setattr(params, name, value)
    return params


def forward_params(**values: Any) -> ctypes.Structure:
    """Build a bnexport_forward from named fields; momentum defaults to 0.1 and eps to 1e-5.

    Raises UsageError for a name that is no field.
    """
    return _filled(ForwardParams, {"momentum": 0.1, "eps": 1e-5, **values})


def backward_params(**values: Any) -> ctypes.Structure:
    """Build a bnexport_backward from named fields. Raises UsageError for an unknown name."""
    return _filled(BackwardParams, values)


def lend_openmp(gomp_parallel: int) -> None:
    """Call bnexport_lend_openmp: pass the address of the program's GOMP_parallel, or 0 for none: kernels then run in
    the caller's thread.
    """
    library().bnexport_lend_openmp(gomp_parallel or None)


def register_group(name: str, size: int, rank: int, all_gather: Any) -> None:
    """Call bnexport_register_group. `all_gather`: an ALL_GATHER object that the caller keeps alive. Raises UsageError."""
    run("register_group", name.encode(), size, rank, all_gather, None, prefix="bnexport_")


def unregister_group(name: str) -> None:
    """Call bnexport_unregister_group. Raises UsageError if the group does not exist."""
    run("unregister_group", name.encode(), prefix="bnexport_")


def describe() -> dict[str, Any]:
    """Return the operators as the library implements them; tests compare them with bnexport.schema."""
    return json.loads(library().bnexport_describe())


def instruction_set() -> str:
    """Return the instruction set that the kernels use: baseline, avx2 or avx512."""
    return library().bnexport_instruction_set().decode()
