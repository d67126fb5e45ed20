"""Small verified cases without torch, for tools that slow a program down a hundredfold.

    python -m benchmarks.gpu.bare sanitize      nine cases, each checked against float64
    python -m benchmarks.gpu.bare profile       five shapes, one call of each direction

Memory comes from the driver's API, or from the host on the emulated device.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import sys
from typing import Any

import numpy as np

from benchmarks.gpu import closed_forms, libraries
from bnexport import tolerances
from bnexport.native import capi, cuda

TYPES = {"float32": np.float32, "float16": np.float16, "float64": np.float64}


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int]  # N, C, S
    dtype: str = "float32"
    layout: str = "NCS"


CASES = [
    Case((5, 8, 81)),
    Case((3, 3, 49), "float16"),
    Case((2, 2, 20000), "float16"),
    Case((4, 6, 256), "float32"),
    Case((5, 24, 49), "float16", "NSC"),
    Case((4, 24, 3000), "float16", "NSC"),
    Case((5, 7, 49), "float32", "NSC"),
    Case((5, 7, 49), "float64"),
    Case((65, 3, 1), "float32"),
]
PROFILED = [
    Case((32, 256, 3136), "float16"),
    Case((256, 64, 3136), "float32"),
    Case((8, 2048, 512), "float16"),
    Case((32, 256, 3136), "float16", "NSC"),
    Case((256, 64, 3136), "float16", "NSC"),
]
PROFILED_EMULATED = [Case((4, 6, 256), "float16"), Case((2, 3, 100), "float32", "NSC")]


class Host:
    """The emulated device: its memory is the host's, aligned as a device's."""

    def __init__(self) -> None:
        self.kept: list[np.ndarray] = []

    def upload(self, values: np.ndarray) -> int:
        memory = np.empty(values.nbytes + 256, np.uint8)
        start = -memory.ctypes.data % 256
        memory[start : start + values.nbytes] = np.ascontiguousarray(values).view(np.uint8).ravel()
        self.kept.append(memory)
        return memory.ctypes.data + start

    def download(self, address: int, like: np.ndarray) -> np.ndarray:
        memory = (ctypes.c_char * like.nbytes).from_address(address)
        return np.frombuffer(memory, like.dtype).reshape(like.shape).copy()


class Driver:
    """Memory of device 0 through the driver's API, in the context that the CUDA runtime uses."""

    def __init__(self) -> None:
        self.api = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.api, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name}: error {code} of the CUDA driver")

    def upload(self, values: np.ndarray) -> int:
        address, data = ctypes.c_uint64(), np.ascontiguousarray(values)
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(data.nbytes, 1)))
        self.call("cuMemcpyHtoD_v2", address, ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes))
        return address.value

    def download(self, address: int, like: np.ndarray) -> np.ndarray:
        values = np.empty_like(like)
        self.call("cuCtxSynchronize")
        self.call(
            "cuMemcpyDtoH_v2", ctypes.c_void_p(values.ctypes.data), ctypes.c_uint64(address), ctypes.c_size_t(values.nbytes)
        )  # fmt: skip
        return values


def run_case(case: Case, device: Host | Driver, *, check: bool) -> None:
    """Both directions of a case; AssertionError when a result is wrong."""
    N, C, S = case.shape
    rng = np.random.default_rng(sum(case.shape))
    shape = (N, C, S) if case.layout == "NCS" else (N, S, C)
    x, dy = (rng.normal(0.5, 1, shape).astype(TYPES[case.dtype]) for _ in range(2))
    vectors = rng.uniform(0.5, 1.5, (4, C)).astype(np.float64 if case.dtype == "float64" else np.float32)
    blank, narrow, wide = np.full_like(x, np.nan), np.full_like(vectors[0], np.nan), np.full(C, np.nan)
    at = {name: device.upload(values) for name, values in (("x", x), ("dy", dy), ("y", blank), ("dx", blank))}
    at |= {name: device.upload(wide) for name in ("saved_mean", "saved_invstd")}
    at |= {name: device.upload(vectors[i]) for i, name in enumerate(("weight", "bias", "running_mean", "running_var"))}
    at |= {name: device.upload(narrow) for name in ("running_mean_out", "running_var_out", "dweight", "dbias")}
    common = {
        "dtype": capi.DTYPES[case.dtype], "stats_dtype": capi.DTYPES[str(vectors.dtype)], "layout": capi.LAYOUTS[case.layout],
        "N": N, "C": C, "S": S,
    }  # fmt: skip
    fields = {
        "forward": {*at} - {"dy", "dx", "dweight", "dbias"},
        "backward": {"x", "dy", "dx", "weight", "saved_mean"},
    }
    fields["backward"] |= {"saved_invstd", "dweight", "dbias"}
    size = cuda.workspace_size(capi.forward_params(**common))
    workspace = device.upload(np.full(size, 0xFF, np.uint8))
    for direction, make in (("forward", capi.forward_params), ("backward", capi.backward_params)):
        params = make(**common, **{name: at[name] for name in fields[direction]})
        cuda.run(direction, params, workspace, size, 0)
    got = {name: device.download(at[name], x) for name in ("y", "dx")}
    if not check:
        return
    if case.layout == "NSC":
        x, dy, got = x.swapaxes(1, 2), dy.swapaxes(1, 2), {name: v.swapaxes(1, 2) for name, v in got.items()}
    weight, bias = vectors[0].astype(np.float64), vectors[1].astype(np.float64)
    want, mean, invstd = closed_forms.forward(x, weight, bias)
    condition = 1 + float(np.abs(mean * invstd).max())
    gradient = closed_forms.backward(dy, x, weight, mean, invstd)[0]
    scale = float(np.abs(weight * invstd).max() * np.abs(dy).max())
    for values, expected, bound in (
        (got["y"], want, tolerances.forward(case.dtype, condition=condition, weight=float(weight.max()))),
        (got["dx"], gradient, tolerances.backward_input(case.dtype, condition=condition, scale=scale)),
    ):
        error = np.abs(values.astype(np.float64) - expected) - (bound.rtol * np.abs(expected) + bound.atol)
        if not (error <= 0).all():
            raise AssertionError(f"{case}: {int((~(error <= 0)).sum())} of {expected.size} values off")


def main() -> int:
    emulated = bool(os.environ.get(libraries.REHEARSAL))
    device = Host() if emulated else Driver()
    profiled = PROFILED_EMULATED if emulated else PROFILED
    is_profile = sys.argv[1:] == ["profile"]
    for case in profiled if is_profile else CASES:
        run_case(case, device, check=not is_profile)
        print(case, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
