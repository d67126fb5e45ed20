"""The C API of the CUDA library (custom_ops/include/bnexport_cuda.h) through ctypes.

Pointers are integers (`tensor.data_ptr()`), device addresses of the current device, and 0 where something
is absent; `stream` is a cudaStream_t. Parameters are those of `capi.forward_params` and `capi.backward_params`.
Calls enqueue work and return. The caller keeps the memory alive and answers for sizes and contiguity. Needs
neither torch nor a driver to be imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from bnexport.errors import LibraryError, UsageError
from bnexport.native import calls
from bnexport.native.capi import DTYPES, LAYOUTS, BackwardParams, ForwardParams, backward_params, forward_params
from bnexport.native.library import load

__all__ = [
    "STRATEGIES",
    "LaunchPlan",
    "backward",
    "backward_moments",
    "check_device",
    "device_count",
    "device_name",
    "driver_version",
    "forward",
    "library",
    "moments",
    "no_device",
    "plan",
    "prefer",
    "ran",
    "runtime_version",
    "ways",
    "workspace_size",
]

STRATEGIES = {"automatic": 0, "cluster": 1, "persistent": 2, "split": 3, "refused": 4}

_ABI_VERSION = 2


class _Plan(ctypes.Structure):
    _fields_ = (
        ("strategy", ctypes.c_int32),
        ("cluster", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("shared", ctypes.c_int32),
        ("blocks", ctypes.c_int64),
    )


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """Launch plan of a call: strategy, blocks per cluster, threads and bytes of shared memory per block, blocks.

    refused: the device refused to launch what was planned, and this ran instead.
    """

    strategy: str
    cluster: int
    threads: int
    shared: int
    blocks: int
    refused: bool = False

    @classmethod
    def _of(cls, made: _Plan, refused: bool = False) -> LaunchPlan:
        names = {value: name for name, value in STRATEGIES.items()}
        return cls(names[made.strategy], made.cluster, made.threads, made.shared, made.blocks, refused)


@functools.cache
def library() -> ctypes.CDLL:
    """Return the loaded library with typed functions. Raise LibraryError if it is not available."""
    loaded, p, size = load("cuda"), ctypes.c_void_p, ctypes.c_size_t
    functions: dict[str, tuple[Any, ...]] = {
        "prefer": (ctypes.c_int32, ctypes.c_int32),
        "check_device": (ctypes.c_int32,),
        "set_device": (ctypes.c_int32, ctypes.POINTER(ctypes.c_int32)),
        "ran": (ctypes.POINTER(_Plan), ctypes.POINTER(ctypes.c_int32)),
    }
    for direction, structure in (("forward", ForwardParams), ("backward", BackwardParams)):
        params, row = ctypes.POINTER(structure), "moments" if direction == "forward" else "backward_moments"
        functions |= {
            direction: (params, p, size, p),
            row: (params, p, p, size, p),
            f"{direction}_workspace": (params, ctypes.POINTER(size)),
            f"plan_{direction}": (params, ctypes.POINTER(_Plan)),
        }
    named = {f"bnexport_cuda_{name}": arguments for name, arguments in functions.items()}
    calls.declare(loaded, named, ("bnexport_cuda_abi_version", _ABI_VERSION))
    return loaded


def device_count() -> int:
    """Return the number of devices; 0 without a driver. Raise LibraryError if the library is not available."""
    return library().bnexport_cuda_device_count()


def check_device(index: int) -> None:
    """Raise LibraryError with the reason if the kernels cannot run on device `index`."""
    _call("check_device", index)


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


def ways(index: int) -> dict[str, tuple[str, str]]:
    """Return the strategies, forward and backward, by layout, of training on 32 x 256 x 56 x 56 float16 on device `index`."""
    before, _ignored = ctypes.c_int32(), ctypes.c_int32()
    _call("set_device", index, before)
    try:
        sizes = {"dtype": DTYPES["float16"], "N": 32, "C": 256, "S": 56 * 56}
        found = {}
        for layout, names in (("NCS", "NCHW"), ("NSC", "NHWC")):
            common = {**sizes, "layout": LAYOUTS[layout]}
            # An address that nothing is read from: the plan asks whether there is an output, and how it is aligned.
            forward, backward = forward_params(**common, y=256), backward_params(**common, dx=256)
            found[names] = (plan(forward).strategy, plan(backward).strategy)
        return found
    finally:
        _call("set_device", before.value, _ignored)


def _call(name: str, *arguments: Any) -> None:
    status, text = calls.call(library(), f"bnexport_cuda_{name}", *arguments)
    if status == 0:
        return
    message = f"bnexport_cuda_{name}: {text}"
    raise UsageError(message) if status == 1 else LibraryError(message)


def _direction(params: ctypes.Structure) -> str:
    return "forward" if isinstance(params, ForwardParams) else "backward"


def workspace_size(params: ctypes.Structure) -> int:
    """Return the workspace bytes that calls with these parameters need, aligned to 256 bytes; may be 0."""
    size = ctypes.c_size_t()
    _call(f"{_direction(params)}_workspace", params, size)
    return size.value


def plan(params: ctypes.Structure) -> LaunchPlan:
    """Return the launch plan of a call with these parameters on the current device."""
    result = _Plan()
    _call(f"plan_{_direction(params)}", params, result)
    return LaunchPlan._of(result)


def ran() -> LaunchPlan:
    """Return what the last forward or backward of this thread did."""
    result, refused = _Plan(), ctypes.c_int32()
    _call("ran", result, refused)
    return LaunchPlan._of(result, refused.value != 0)


def forward(params: ctypes.Structure, workspace: int, size: int, stream: int = 0) -> None:
    """Call bnexport_cuda_forward. Raises UsageError, and LibraryError for an error of the CUDA runtime."""
    _call("forward", params, workspace, size, stream)


def backward(params: ctypes.Structure, workspace: int, size: int, stream: int = 0) -> None:
    """Call bnexport_cuda_backward. Raises UsageError, and LibraryError for an error of the CUDA runtime."""
    _call("backward", params, workspace, size, stream)


def moments(params: ctypes.Structure, row: int, workspace: int, size: int, stream: int = 0) -> None:
    """Compute this process's row of 2 C + 1 float64 with bnexport_cuda_moments."""
    _call("moments", params, row, workspace, size, stream)


def backward_moments(params: ctypes.Structure, row: int, workspace: int, size: int, stream: int = 0) -> None:
    """Compute this process's row of 2 C + 1 float64 with bnexport_cuda_backward_moments."""
    _call("backward_moments", params, row, workspace, size, stream)


@contextlib.contextmanager
def prefer(strategy: str, cluster: int = 0) -> Iterator[None]:
    """Force `strategy` with `cluster` blocks per cluster (0: automatic) for this thread's calls; for measurements.

    "refused" is the automatic choice on a device that refuses launches of blocks that wait for each other.
    """
    _call("prefer", STRATEGIES[strategy], cluster)
    try:
        yield
    finally:
        _call("prefer", 0, 0)
