"""The C API of the CUDA library (custom_ops/include/bnexport_cuda.h) through ctypes.

Pointers are integers (`tensor.data_ptr()`), device addresses of the current device, and 0 where something
is absent; `stream` is a cudaStream_t. Parameters are those of `capi.forward_params` and `capi.backward_params`.
Calls enqueue work and return. The caller keeps the memory alive and answers for sizes and contiguity. Needs
neither torch nor a driver to be imported.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from bnexport.errors import LibraryError, UsageError
from bnexport.native import capi
from bnexport.native.capi import BackwardParams, ForwardParams
from bnexport.native.library import load

__all__ = [
    "NoKernelsError",
    "check_device",
    "device_count",
    "device_name",
    "driver_version",
    "library",
    "no_device",
    "run",
    "runtime_version",
    "workspace_size",
]

_ABI_VERSION = 4


class NoKernelsError(LibraryError):
    """A device that the library has no code for."""


@functools.cache
def library() -> ctypes.CDLL:
    """Return the loaded library with typed functions. Raise LibraryError if it is not available."""
    loaded, p, size = load("cuda"), ctypes.c_void_p, ctypes.c_size_t
    functions: dict[str, tuple[Any, ...]] = {"check_device": (ctypes.c_int32,)}
    for direction, structure in (("forward", ForwardParams), ("backward", BackwardParams)):
        params, row = ctypes.POINTER(structure), "moments" if direction == "forward" else "backward_moments"
        functions |= {
            direction: (params, p, size, p),
            row: (params, p, p, size, p),
            f"{direction}_workspace": (params, ctypes.POINTER(size)),
        }
    named = {f"bnexport_cuda_{name}": arguments for name, arguments in functions.items()}
    capi.declare(loaded, named, ("bnexport_cuda_abi_version", _ABI_VERSION))
    return loaded


def device_count() -> int:
    """Return the number of devices; 0 without a driver. Raise LibraryError if the library is not available."""
    return library().bnexport_cuda_device_count()


def check_device(index: int) -> None:
    """Raise LibraryError with the reason if the kernels cannot run on device `index`: NoKernelsError if they never will."""
    run("check_device", index)


def no_device() -> str | None:
    """Return why the library sees no device, with the CUDA version of the driver; None if it sees one.

    A driver that is older than the CUDA runtime in the library hides devices that programs built with an older one see.
    Raises LibraryError if the library is not available.
    """
    if device_count() > 0:
        return None
    try:
        check_device(0)
        reason = "the CUDA runtime sees no device"
    except LibraryError as error:
        reason = str(error)
    version, ours = driver_version(), runtime_version()
    if version is None:
        return reason
    return f"{reason} (the NVIDIA driver is for CUDA {version}{f', this library for {ours}' if ours else ''})"


def runtime_version() -> str | None:
    """Return the CUDA version that the library was built with, such as "12.9"; None if it is not available."""
    try:
        return _dotted(library().bnexport_cuda_runtime_version())
    except LibraryError:
        return None


def _dotted(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def driver_version() -> str | None:
    """Return the newest CUDA version that the driver supports, such as "12.4"; None without a driver."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return _dotted(number.value)


def device_name(index: int) -> str:
    """Return a device's name and compute capability as the driver has them; "device 0" if it does not say."""
    name, numbers = ctypes.create_string_buffer(100), [ctypes.c_int() for _ in range(3)]
    device, major, minor = numbers
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        asked = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index)
        asked = asked or driver.cuDeviceGetName(name, len(name), device)
        asked = asked or driver.cuDeviceGetAttribute(
            ctypes.byref(major), 75, device
        )  # COMPUTE_CAPABILITY_MAJOR, _MINOR
        asked = asked or driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    except (OSError, AttributeError):
        asked = -1
    return f"device {index}" if asked else f"{name.value.decode()} ({major.value}.{minor.value})"


def run(name: str, *arguments: Any) -> None:
    """Call bnexport_cuda_NAME: "forward" and "backward" with a struct, a workspace, its size and the stream; "moments" and
    "backward_moments" with the row of 2 C + 1 float64 behind the struct. Raises UsageError, and LibraryError for an error of
    the CUDA runtime.
    """
    status, text = capi.call(library(), f"bnexport_cuda_{name}", *arguments)
    if status == 0:
        return
    message = f"bnexport_cuda_{name}: {text}"
    raise {1: UsageError, 5: NoKernelsError}.get(status, LibraryError)(message)


def _direction(params: ctypes.Structure) -> str:
    return "forward" if isinstance(params, ForwardParams) else "backward"


def workspace_size(params: ctypes.Structure) -> int:
    """Return the workspace bytes that calls of these sizes need on the current device, aligned to 256 bytes."""
    size = ctypes.c_size_t()
    run(f"{_direction(params)}_workspace", params, size)
    return size.value
