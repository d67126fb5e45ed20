"""What a device is tried with first, and what compute-sanitizer and ncu run: small cases without torch.

    python -m benchmarks.gpu.bare sanitize      nine cases, each checked against float64
    python -m benchmarks.gpu.bare profile       five shapes, one call of each direction

Memory comes from the driver's API, or from the host on the emulated device.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import sys
from typing import Any

import numpy as np

from benchmarks.gpu import libraries
from benchmarks.gpu.expected import Expected
from bnexport.native import capi, cuda

TYPES = {"float32": np.float32, "float16": np.float16, "float64": np.float64}
STRUCTURES = {"forward": capi.ForwardParams, "backward": capi.BackwardParams}
MAKERS = {"forward": capi.forward_params, "backward": capi.backward_params}


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int]  # N, C, S
    dtype: str = "float32"
    layout: str = "NCS"


CASES = [
    Case((5, 8, 81)), Case((3, 3, 49), "float16"), Case((2, 2, 20000), "float16"), Case((4, 6, 256)),
    Case((5, 24, 49), "float16", "NSC"), Case((4, 24, 3000), "float16", "NSC"), Case((5, 7, 49), "float32", "NSC"),
    Case((5, 7, 49), "float64"), Case((65, 3, 1)),
]  # fmt: skip
PROFILED = [
    Case((32, 256, 3136), "float16"), Case((256, 64, 3136)), Case((8, 2048, 512), "float16"),
    Case((32, 256, 3136), "float16", "NSC"), Case((256, 64, 3136), "float16", "NSC"),
]  # fmt: skip
PROFILED_EMULATED = [Case((4, 6, 256), "float16"), Case((2, 3, 100), "float32", "NSC")]


def parameters(fields: dict[str, Any]) -> dict[str, ctypes.Structure]:
    """The struct of each direction from one set of fields, of which each takes its own."""
    names = {direction: {name for name, _ in made._fields_} for direction, made in STRUCTURES.items()}
    return {
        direction: make(**{name: value for name, value in fields.items() if name in names[direction]})
        for direction, make in MAKERS.items()
    }


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
    inputs = {"x": x, "dy": dy, **dict(zip(("weight", "bias", "running_mean", "running_var"), vectors, strict=True))}
    outputs = {"y": x, "dx": x} | dict.fromkeys(("saved_mean", "saved_invstd"), np.zeros(C))
    outputs |= dict.fromkeys(("running_mean_out", "running_var_out", "dweight", "dbias"), vectors[0])
    at = {name: device.upload(values) for name, values in inputs.items()}
    at |= {name: device.upload(np.full_like(like, np.nan)) for name, like in outputs.items()}
    sizes = {"N": N, "C": C, "S": S, "layout": capi.LAYOUTS[case.layout]}
    types = {"dtype": capi.DTYPES[case.dtype], "stats_dtype": capi.DTYPES[str(vectors.dtype)]}
    made = parameters(sizes | types | at)
    size = cuda.workspace_size(made["forward"])
    workspace = device.upload(np.full(size, 0xFF, np.uint8))
    for direction, params in made.items():
        cuda.run(direction, params, workspace, size, 0)
    got = {name: device.download(at[name], like).astype(np.float64) for name, like in outputs.items()}
    if not check:
        return
    wide = {name: values.astype(np.float64) for name, values in inputs.items()}
    if case.layout == "NSC":
        for arrays, names in ((got, ("y", "dx")), (wide, ("x", "dy"))):
            arrays |= {name: np.ascontiguousarray(arrays[name].swapaxes(1, 2)) for name in names}
    running = (wide["running_mean"], wide["running_var"])
    want = Expected(case.dtype, wide["x"], wide["dy"], wide["weight"], wide["bias"], running=running)
    want.check(case, **got)


def steps(_: str) -> dict[str, Any]:
    return {str(case): functools.partial(try_case, case) for case in CASES}


def try_case(case: Case) -> None:
    run_case(case, Host() if libraries.REHEARSES else Driver(), check=True)


def main() -> int:
    emulated = libraries.REHEARSES
    device = Host() if emulated else Driver()
    is_profile = sys.argv[1:] == ["profile"]
    for case in (PROFILED_EMULATED if emulated else PROFILED) if is_profile else CASES:
        run_case(case, device, check=not is_profile)
        print(case, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
