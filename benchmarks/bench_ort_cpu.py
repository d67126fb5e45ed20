"""Sync batch norm in ONNX Runtime on CPU, against what a user could pick instead and against memory.

`python benchmarks/bench_ort_cpu.py [--threads 2] [--quick] [--dtypes float32,float16,...] [--isa avx2]`

Verifies first, then times in one process, everything with the same number of threads:
  ours       our node inside ONNX Runtime: training forward, inference, gradient
  ORT        ONNX Runtime's BatchNormalization, training_mode 1 and 0
  torch      torch.nn.functional.batch_norm in training, and its backward
  floor      read passes and copies by benchmarks/bandwidth.cpp (the fastest of three ways to copy)

The figures are medians and ratios of medians of one run; on a machine that others use at the same time
--statistic min compares the undisturbed runs instead. Rounds go over all candidates in turn, so that
a change of the machine's mood meets them all; before each candidate there is a pause until the threads of
the one before have stopped spinning. Prints a table, writes JSON to benchmarks/results/ort_cpu.json.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime as ort
import torch
from onnx import TensorProto, helper

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import machine, records  # noqa: E402  (the checkout goes first)
from bnexport import tolerances  # noqa: E402
from bnexport.native import capi  # noqa: E402
from bnexport.native.library import register  # noqa: E402

LARGE = [
    (32, 256, 56, 56),
    (16, 64, 112, 112),
    (8, 64, 112, 112),
    (2, 512, 128, 256),
    (8, 2048, 16, 32),
    (256, 64, 56, 56),
    (32, 64, 32, 32),
]
SMALL = [
    (8, 64, 56, 56),
    (2, 64, 56, 56),
    (1, 64, 56, 56),
    (8, 32, 28, 28),
    (8, 64, 8, 8),
    (1, 16, 28, 28),
    (1, 3, 8, 8),
]
QUICK = [(8, 64, 112, 112), (32, 64, 32, 32), (2, 64, 56, 56)]

ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float64": TensorProto.DOUBLE,
}
NUMPY_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}
EPS = 2.0**-17  # the same number as float32 attribute and as double


def bandwidth_library() -> ctypes.CDLL:
    target = ROOT / "build" / "benchmarks" / "libbandwidth.so"
    source = ROOT / "benchmarks" / "bandwidth.cpp"
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-Wno-psabi"]
        subprocess.run(["c++", *flags, "-o", str(target), str(source)], check=True)
    return ctypes.CDLL(str(target))


def aligned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Like the allocators of ONNX Runtime and torch, 64-byte aligned."""
    kind = np.dtype(NUMPY_TYPES[dtype])
    count = int(np.prod(shape)) * kind.itemsize
    block = np.zeros(count + 64, np.uint8)
    start = -block.ctypes.data % 64
    return block[start : start + count].view(kind).reshape(shape)


def one_node(op: str, domain: str, inputs, outputs, dtype: str, rank: int, **attributes) -> bytes:
    """inputs, outputs: (name, is data). Statistics are float32, or float64 for float64 data."""
    statistic = ONNX_TYPES[tolerances.STATISTICS_TYPE[dtype]]

    def infos(values):
        return [
            helper.make_tensor_value_info(
                name, ONNX_TYPES[dtype] if data else statistic, [None] * (rank if data else 1)
            )
            for name, data in values
            if name
        ]

    node = helper.make_node(
        op, [name for name, _ in inputs], [name for name, _ in outputs], name="node", domain=domain, **attributes
    )
    graph = helper.make_graph([node], "g", infos(inputs), infos(outputs))
    imports = [helper.make_opsetid("", 15)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    return helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString()


class BoundSession:
    """A session whose inputs and outputs are bound to arrays, so that a run copies and allocates nothing."""

    def __init__(self, model: bytes, arrays: dict[str, np.ndarray], threads: int):
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        register(options)
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.binding = self.session.io_binding()
        self.keep = []
        for values, bind in (
            (self.session.get_inputs(), self.binding.bind_ortvalue_input),
            (self.session.get_outputs(), self.binding.bind_ortvalue_output),
        ):
            for value in values:
                array = arrays[value.name]
                if array.dtype == ml_dtypes.bfloat16:
                    bound = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), TensorProto.BFLOAT16)
                else:
                    bound = ort.OrtValue.ortvalue_from_numpy(array)
                self.keep.append((array, bound))
                bind(value.name, bound)

    def __call__(self) -> None:
        self.session.run_with_iobinding(self.binding)


class Case:
    """All candidates for one shape and type."""

    def __init__(self, shape, dtype: str, threads: int, floor: ctypes.CDLL):
        self.shape, self.dtype = shape, dtype
        rng = np.random.default_rng(0)
        C, S = shape[1], NUMPY_TYPES[tolerances.STATISTICS_TYPE[dtype]]
        pool = (rng.normal(size=1 << 18) + 0.5).astype(NUMPY_TYPES[dtype])
        self.arrays = a = {name: aligned(shape, dtype) for name in ("x", "dy", "y", "dx")}
        a["x"][...] = np.resize(pool, shape)
        a["dy"][...] = np.resize(pool[::-1][7:], shape)
        for name in ("mean", "var", "new_mean", "new_var", "w", "b", "saved_mean", "saved_invstd", "dw", "db"):
            a[name] = np.ones(C, S) if name in ("var",) else np.zeros(C, S)
        a["w"][:], a["b"][:] = rng.normal(size=C), rng.normal(size=C)
        rank = len(shape)
        x, statistics_in = ("x", True), [("w", False), ("b", False)]
        running = [("mean", False), ("var", False)]
        updated = [("y", True), ("new_mean", False), ("new_var", False)]
        saved = [("saved_mean", False), ("saved_invstd", False)]
        sync, batch_norm = "MMCVSyncBatchNorm", "BatchNormalization"

        def bound(*args, **kwargs):
            return BoundSession(one_node(*args, dtype, rank, **kwargs), a, threads)

        self.candidates: dict[str, Callable[[], object]] = {
            "train": bound(sync, "mmcv", [x, *running, *statistics_in], updated + saved, eps=EPS),
            "infer": bound(sync, "mmcv", [x, *running, *statistics_in], updated[:1], training_mode=0, eps=EPS),
            "grad": bound(
                f"{sync}Grad",
                "mmcv",
                [("dy", True), x, ("w", False), *saved],
                [("dx", True), ("", 0), ("", 0), ("dw", False), ("db", False)],
            ),
        }
        if dtype in ("float32", "float64"):
            arguments = (batch_norm, "", [x, *statistics_in, *running])
            self.candidates["ort_train"] = bound(*arguments, updated, training_mode=1, epsilon=EPS)
            self.candidates["ort_infer"] = bound(*arguments, updated[:1], epsilon=EPS)
        self.add_capi(threads)
        self.add_torch()
        self.add_floor(floor, threads)

    def add_capi(self, threads: int) -> None:
        a, (N, C) = self.arrays, self.shape[:2]
        saved_mean, saved_invstd = np.zeros(C), np.zeros(C)
        common = {
            "dtype": capi.DTYPES[self.dtype], "stats_dtype": capi.DTYPES[tolerances.STATISTICS_TYPE[self.dtype]], "layout": 0,
            "N": N, "C": C, "S": int(np.prod(self.shape[2:])), "x": a["x"].ctypes.data, "saved_mean": saved_mean.ctypes.data,
            "saved_invstd": saved_invstd.ctypes.data, "weight": a["w"].ctypes.data, "threads": threads,
        }  # fmt: skip
        y, b, keep = a["y"].ctypes.data, a["b"].ctypes.data, (saved_mean, saved_invstd)
        self.candidates["capi_train"] = lambda keep=keep: capi.run(
            "forward", capi.forward_params(**common, y=y, bias=b, eps=EPS)
        )

    def add_torch(self) -> None:
        def tensor(name: str) -> torch.Tensor:
            array = self.arrays[name]
            return (
                torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
                if array.dtype == ml_dtypes.bfloat16
                else torch.from_numpy(array)
            )

        x, dy = tensor("x"), tensor("dy")
        w, b = tensor("w").clone(), tensor("b").clone()
        mean, var = torch.zeros_like(w), torch.ones_like(w)
        self.torch_out = torch.native_batch_norm(x, w, b, mean, var, True, 0.1, EPS)
        saved = self.torch_out[1:]
        self.candidates["torch_train"] = lambda: torch.native_batch_norm(x, w, b, mean, var, True, 0.1, EPS)
        self.torch_grad = lambda: torch.ops.aten.native_batch_norm_backward(
            dy, x, w, mean, var, *saved, True, EPS, [True, True, True]
        )
        self.candidates["torch_grad"] = self.torch_grad

    def add_floor(self, floor: ctypes.CDLL, threads: int) -> None:
        a, pointer, size = self.arrays, ctypes.c_void_p, ctypes.c_int64
        x, y, dy, dx = (pointer(a[name].ctypes.data) for name in ("x", "y", "dy", "dx"))
        count = size(a["x"].nbytes // 64 * 64)

        def forward(way: int) -> None:
            floor.read_pass(x, count, threads)
            floor.copy(y, x, count, threads, way)

        def backward(way: int) -> None:
            floor.read_pass(x, count, threads)
            floor.read_pass(dy, count, threads)
            floor.combine(dx, x, dy, count, threads, way)

        self.candidates["read"] = lambda: floor.read_pass(x, count, threads)
        for way in (0, 1, 2):
            self.candidates[f"copy{way}"] = lambda way=way: floor.copy(y, x, count, threads, way)
            self.candidates[f"read+copy{way}"] = lambda way=way: forward(way)
            if way:
                self.candidates[f"combine{way}"] = lambda way=way: floor.combine(dx, x, dy, count, threads, way)
                self.candidates[f"2read+combine{way}"] = lambda way=way: backward(way)

    def verify(self) -> None:
        """Against torch, within the bounds of both."""
        a = self.arrays

        def compare(got: np.ndarray, expected: torch.Tensor, bound: tolerances.Tolerance, what: str) -> None:
            expected = expected.double().numpy()
            excess = np.abs(got.astype(np.float64) - expected) - (bound.rtol * np.abs(expected) + bound.atol)
            if not (excess <= 0).all():
                raise SystemExit(
                    f"{self.shape} {self.dtype}: {what} differs from torch's by {excess.max()} more than the bound {bound}"
                )

        self.candidates["train"]()
        weight = float(np.abs(a["w"]).max())
        one = tolerances.forward(self.dtype, condition=2.0, weight=weight)
        # torch sums a double channel in one go, so its own error there grows with the number of values.
        torch_factor = 8 if self.dtype == "float64" else 1
        theirs = tolerances.Tolerance(one.rtol * torch_factor, one.atol * torch_factor)
        compare(a["y"], self.torch_out[0], one + theirs, "output")
        scale = float(np.abs(a["w"] * a["saved_invstd"]).max()) * float(np.abs(a["dy"].astype(np.float32)).max())
        self.candidates["grad"]()
        one = tolerances.backward_input(self.dtype, condition=2.0, scale=scale)
        theirs = tolerances.Tolerance(one.rtol * torch_factor, one.atol * torch_factor)
        compare(a["dx"], self.torch_grad()[0], one + theirs, "grad_input")

    def measure(self, budget: float, statistic: Callable[[list[float]], float]) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in self.candidates}
        rounds = 7
        for _ in range(rounds):
            for name, call in self.candidates.items():
                machine.rest()
                call()  # wakes the threads, fills the caches as a run before it would
                start = time.perf_counter()
                call()
                first = time.perf_counter() - start
                times[name].append(first)
                repeats = int(min(30, budget / rounds / len(self.candidates) / max(first, 1e-6)))
                for _ in range(max(0, repeats - 1)):
                    start = time.perf_counter()
                    call()
                    times[name].append(time.perf_counter() - start)
        return {name: statistic(values) * 1e6 for name, values in times.items()}


def row(case: Case, us: dict[str, float]) -> dict[str, object]:
    def best(prefix: str) -> float:
        return min(value for name, value in us.items() if name.startswith(prefix) and name[len(prefix) :].isdigit())

    copy = best("copy")
    # Two floors: passes timed alone and added, or timed one after the other (a copy then finds in cache what the read left).
    forward, backward = us["read"] + copy, 2 * us["read"] + best("combine")
    result = {
        "shape": case.shape,
        "dtype": case.dtype,
        "megabytes": case.arrays["x"].nbytes / 1e6,
        "microseconds": {name: round(value, 2) for name, value in us.items()},
        "train/(read+copy)": us["train"] / forward,
        "train/(read,copy)": us["train"] / best("read+copy"),
        "train/copy": us["train"] / copy,
        "capi/(read+copy)": us["capi_train"] / forward,
        "torch/train": us["torch_train"] / us["train"],
        "infer/copy": us["infer"] / copy,
        "grad/(2read+combine)": us["grad"] / backward,
        "grad/(2read,combine)": us["grad"] / best("2read+combine"),
        "torch/grad": us["torch_grad"] / us["grad"],
    }
    if "ort_train" in us:
        result |= {"ort/train": us["ort_train"] / us["train"], "infer/ort": us["infer"] / us["ort_infer"]}
    return result


COLUMNS = [
    "train/(read+copy)", "train/(read,copy)", "train/copy", "torch/train", "ort/train", "infer/ort", "grad/(2read+combine)",
    "grad/(2read,combine)", "torch/grad", "capi/(read+copy)",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="three shapes, less time")
    parser.add_argument("--dtypes", default="float32,float16,bfloat16,float64")
    parser.add_argument("--seconds", type=float, default=6.0, help="per shape")
    parser.add_argument("--statistic", choices=["median", "min"], default="median")
    parser.add_argument("--output", type=Path, help="instead of benchmarks/results/ort_cpu.json, ort_cpu_avx2.json ...")
    machine.add_isa_option(parser)
    arguments = parser.parse_args()
    machine.limit(arguments.isa)
    if arguments.output is None:
        arguments.output = machine.result_of(ROOT / "benchmarks" / "results" / "ort_cpu.json", arguments.isa)
    torch.set_num_threads(arguments.threads)
    floor = bandwidth_library()
    rows = []
    print(machine.sentence({"machine": machine.describe()}) + f", {arguments.threads} threads")
    print(
        f"{'shape':20s} {'type':9s} {'MB':>6s} {'train us':>9s} {'infer us':>9s} {'grad us':>9s} "
        + " ".join(f"{c:>20s}" for c in COLUMNS)
    )
    for dtype in arguments.dtypes.split(","):
        shapes = QUICK if arguments.quick or dtype != "float32" else LARGE + SMALL
        for shape in shapes:
            case = Case(shape, dtype, arguments.threads, floor)
            case.verify()
            result = row(
                case,
                case.measure(
                    1.0 if arguments.quick else arguments.seconds,
                    {"median": statistics.median, "min": min}[arguments.statistic],
                ),
            )
            rows.append(result)
            us = result["microseconds"]
            cells = " ".join(f"{result[c]:20.2f}" if c in result else f"{'-':>20s}" for c in COLUMNS)
            print(
                f"{shape!s:20s} {dtype:9s} {result['megabytes']:6.1f} {us['train']:9.0f} {us['infer']:9.0f} {us['grad']:9.0f} {cells}",
                flush=True,
            )
    report = {
        "threads": arguments.threads,
        "statistic": arguments.statistic,
        "machine": machine.describe(),
        "rows": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    records.write(arguments.output, report)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
