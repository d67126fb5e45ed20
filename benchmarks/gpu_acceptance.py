"""Acceptance on a machine with a GPU, which may have no network: builds, tests, measures, prints one table.

    python benchmarks/gpu_acceptance.py --provider PATH/cuda_provider.so     beside a CPU onnxruntime of its version
    python benchmarks/gpu_acceptance.py --provider installed                 with onnxruntime-gpu
    python benchmarks/gpu_acceptance.py --rehearse                           the same steps on the CPU, to check the script

What it does: builds both libraries (unless --library names built ones); runs the operator tests on the
CUDA provider and the PyTorch tests on the device; two processes on one GPU through a gloo callback, and
NCCL with one rank; ONNX Runtime's own training BatchNormalization beside ours; the node's overhead in a
session over the bare kernel, and whether it waits for the device; a segmentation model, exported with the
node kept, against torch. Writes benchmarks/results/gpu_acceptance-<gpu>.json. Exit code 1 when a row fails,
4 without a CUDA device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/custom_ops")]

OVERHEAD_AT_MOST_US = 15.0
CHAIN = 64  # nodes, to see what one more costs


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    passed: bool | None  # None: nothing to pass, or not run
    value: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", default="", help="'installed', or the library of the CUDA provider")
    parser.add_argument("--library", type=Path, help="folder with both libraries, built before")
    parser.add_argument("--architecture", default="90a", help="what to compile for")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU; writes nothing")
    arguments = parser.parse_args()

    import torch

    if not arguments.rehearse and not torch.cuda.is_available():
        print(
            "no CUDA device: torch.cuda.is_available() is False; --rehearse runs the steps on the CPU", file=sys.stderr
        )
        return 4
    if not arguments.rehearse and not arguments.provider:
        parser.error("--provider: expected 'installed' or a path")
    if not arguments.rehearse:
        os.environ["BNEXPORT_TEST_PROVIDER"] = arguments.provider
        folder = arguments.library or build(arguments.architecture)
        os.environ["BNEXPORT_LIBRARY"] = str(folder / "libbnexport_ops.so")
    device = "cpu" if arguments.rehearse else torch.cuda.get_device_name()

    rows = [Row("device", None, device)]
    for section in (
        operator_tests,
        torch_tests,
        two_processes_on_one_device,
        nccl_with_one_rank,
        own_training_batch_norm,
        overhead,
        cuda_graph,
        segmentation,
    ):
        print(f"{section.__name__} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        try:
            rows += section(arguments.rehearse)
        except Exception as error:
            traceback.print_exc()
            rows.append(Row(section.__name__.replace("_", " "), False, f"{type(error).__name__}: {str(error)[:300]}"))
        print(f"  {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)

    if not arguments.rehearse:
        name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        arguments.output.mkdir(parents=True, exist_ok=True)
        target = arguments.output / f"gpu_acceptance-{name}.json"
        target.write_text(
            json.dumps({"schema_version": 1, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1) + "\n"
        )
    width = max(len(row.name) for row in rows)
    for row in rows:
        print(f"{ {True: 'ok', False: 'FAILED', None: '--'}[row.passed]:7}{row.name:{width}}  {row.value}")
    return 1 if any(row.passed is False for row in rows) else 0


def build(architecture: str) -> Path:
    """Both libraries from this checkout, for one architecture."""
    folder = ROOT / "build/gpu"
    configure = [f"-DBNEXPORT_CUDA_ARCHITECTURES={architecture}", "-DBNEXPORT_CUDA=ON", "-DCMAKE_BUILD_TYPE=Release"]
    subprocess.run(["cmake", "-S", str(ROOT), "-B", str(folder), *configure], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(folder), "-j"], check=True, stdout=subprocess.DEVNULL)
    return folder


def pytest_row(name: str, *arguments: str) -> Row:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)
    last = [
        line for line in done.stdout.splitlines() if "passed" in line or "failed" in line or "error" in line.lower()
    ]
    return Row(name, done.returncode == 0, last[-1].strip("= ") if last else f"exit code {done.returncode}")


def operator_tests(rehearse: bool) -> list[Row]:
    files = [f"tests/custom_ops/test_{name}.py" for name in ("forward", "backward", "bad_input")]
    extra = ["-k", "5"] if rehearse else []
    return [pytest_row("operators in ONNX Runtime, against float64", *files, *extra, "-o", "addopts=")]


def torch_tests(rehearse: bool) -> list[Row]:
    if rehearse:
        return [Row("PyTorch operators, against float64", None, "needs a device")]
    return [
        pytest_row(
            "PyTorch operators, against float64", "tests/sync_bn/test_cuda.py", "-o", "addopts=--import-mode=importlib"
        )
    ]


def two_processes_on_one_device(rehearse: bool) -> list[Row]:
    choice = "2 and exact" if rehearse else "joint_batch or channels"
    arguments = ["tests/runtime/test_communicator.py", "-k", choice, "-o", "addopts=--import-mode=importlib"]
    return [pytest_row("two processes through a gloo callback, against the joint batch", *arguments)]


def nccl_with_one_rank(rehearse: bool) -> list[Row]:
    name = "NCCL with one rank"
    if rehearse:
        return [Row(name, None, "needs a device")]
    import ctypes

    import torch
    import torch.distributed as dist

    import bnexport
    from bnexport.runtime import nccl

    store = f"file://{ROOT}/build/gpu_acceptance_store_{os.getpid()}"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    joined = nccl.join("world", 1, 0)
    row = torch.randn(4211, dtype=torch.float64, device="cuda")
    gathered = torch.full_like(row, float("nan"))
    error = ctypes.create_string_buffer(512)
    gather = nccl.library().bnexport_nccl_all_gather
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    call = (ctypes.c_void_p(joined.context), ctypes.c_void_p(row.data_ptr()), ctypes.c_void_p(gathered.data_ptr()))
    code = gather(*call, ctypes.c_int64(row.numel()), stream, error, ctypes.c_size_t(512))
    torch.cuda.synchronize()
    same = code == 0 and torch.equal(row, gathered)
    joined.leave()

    module = bnexport.SyncBatchNorm(8).cuda()
    plain = torch.nn.BatchNorm2d(8).cuda()
    x = torch.randn(4, 8, 9, 9, device="cuda")
    difference = float((module(x) - plain(x)).abs().max())
    dist.destroy_process_group()
    return [
        Row(f"{name}: all-gather", same, f"NCCL {nccl.version()} {error.value.decode()}".strip()),
        Row(f"{name}: SyncBatchNorm, difference from BatchNorm2d", difference < 1e-5, f"{difference:.2g}"),
    ]


def batch_norm_model(nodes: int, shape: tuple[int, ...], *, ours: bool = True) -> bytes:
    """`nodes` training batch norms in a row, or ONNX's own BatchNormalization with training_mode."""
    from onnx import TensorProto, helper

    from bnexport import schema

    C = shape[1]
    made = []
    for i in range(nodes):
        x, y = f"x{i}", f"x{i + 1}"
        if ours:
            attributes = {
                "momentum": 0.1,
                "eps": 1e-5,
                "group": "",
                "group_size": 1,
                "training_mode": 1,
                "stats_mode": "exact",
            }
            inputs = [x, "mean", "var", "weight", "bias"]
            made.append(
                helper.make_node("MMCVSyncBatchNorm", inputs, [y], f"bn{i}", domain=schema.DOMAIN, **attributes)
            )
        else:
            inputs, outputs = [x, "weight", "bias", "mean", "var"], [y, f"mean{i}", f"var{i}"]
            made.append(helper.make_node("BatchNormalization", inputs, outputs, f"bn{i}", training_mode=1))
    initializers = [
        helper.make_tensor(name, TensorProto.FLOAT, [C], [value] * C)
        for name, value in (("mean", 0.0), ("var", 1.0), ("weight", 1.0), ("bias", 0.0))
    ]
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x0", f"x{nodes}")]
    graph = helper.make_graph(made, "chain", info[:1], info[1:], initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(schema.DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


def session(model: bytes, cuda: dict[str, str] | None = None) -> Any:
    import onnxruntime as ort
    from providers import open_session

    from bnexport.runtime.library import register

    options = ort.SessionOptions()
    options.log_severity_level = 3
    register(options)
    return open_session(model, options, cuda)


def own_training_batch_norm(rehearse: bool) -> list[Row]:
    import numpy as np

    shape = (4, 8, 16, 16)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    rows = []
    want = (x - x.mean((0, 2, 3), keepdims=True)) / np.sqrt(x.var((0, 2, 3), keepdims=True) + 1e-5)
    for ours, name in ((True, "training batch norm: our node"), (False, "training batch norm: ONNX's, opset 17")):
        try:
            y = session(batch_norm_model(1, shape, ours=ours)).run(None, {"x0": x})[0]
            difference = float(np.abs(y - want).max())
            rows.append(Row(name, difference < 1e-4 if ours else None, f"runs, largest difference {difference:.2g}"))
        except Exception as error:
            rows.append(Row(name, False if ours else None, "refused: " + str(error).strip().splitlines()[0][:160]))
    return rows


def median_us(run: Callable[[], Any], repeats: int = 200) -> float:
    for _ in range(20):
        run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def overhead(rehearse: bool) -> list[Row]:
    """What one more node costs in a session, against one more call of the kernel; and what the host waits for."""
    import numpy as np
    import torch

    from bnexport.sync_bn import operators

    shape = (2, 8, 4, 4)  # the kernel itself takes next to nothing
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    short, long = session(batch_norm_model(1, shape)), session(batch_norm_model(1 + CHAIN, shape))
    in_session = (median_us(lambda: long.run(None, {"x0": x})) - median_us(lambda: short.run(None, {"x0": x}))) / CHAIN

    device = torch.device("cpu" if rehearse else "cuda")
    start = torch.from_numpy(x).to(device)
    vectors = [torch.full((8,), value, device=device) for value in (0.0, 1.0, 1.0, 0.0)]

    def chain(nodes: int) -> None:
        y = start
        for _ in range(nodes):
            y = operators.sync_batch_norm(y, *vectors, True, 0.1, 1e-5, "", 1, "exact", "local", 0)[0]

    if rehearse:
        bare = (median_us(lambda: chain(1 + CHAIN)) - median_us(lambda: chain(1))) / CHAIN
    else:
        graph = torch.cuda.CUDAGraph()
        chain(1)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            chain(CHAIN)

        def replay() -> None:
            graph.replay()
            torch.cuda.synchronize()

        bare = median_us(replay) / CHAIN
    difference = in_session - bare
    rows = [
        Row(
            "overhead of a node in a session over the bare kernel",
            None if rehearse else difference < OVERHEAD_AT_MOST_US,
            f"{difference:.1f} us ({in_session:.1f} in a session, {bare:.1f} in a CUDA graph; at most {OVERHEAD_AT_MOST_US:.0f})",
        )
    ]
    if rehearse:
        return rows
    waits = [host_waits(lambda s=s: s.run(None, {"x0": x})) for s in (short, long)]
    rows.append(
        Row(
            "a node waits for the device",
            waits[0] == waits[1],
            f"{waits[0]} waits with 1 node, {waits[1]} with {1 + CHAIN}",
        )
    )
    return rows


def host_waits(run: Callable[[], Any]) -> int:
    """Calls of the CUDA runtime that wait for the device, in one run."""
    import torch

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        run()
    return sum(event.count for event in profile.key_averages() if re.search(r"[Ss]ynchronize", event.key))


def cuda_graph(rehearse: bool) -> list[Row]:
    """ONNX Runtime captures a session with our node, and replays it on new input."""
    name = "ONNX Runtime's CUDA graph mode"
    if rehearse:
        return [Row(name, None, "needs a device")]
    import numpy as np
    import torch

    shape = (4, 8, 16, 16)
    try:
        opened = session(batch_norm_model(2, shape), {"enable_cuda_graph": "1"})
        x, y = torch.randn(shape, device="cuda"), torch.empty(shape, device="cuda")
        binding = opened.io_binding()
        binding.bind_input("x0", "cuda", 0, np.float32, shape, x.data_ptr())
        binding.bind_output("x2", "cuda", 0, np.float32, shape, y.data_ptr())
    except Exception as error:
        return [
            Row(
                name, None, "not run, this build cannot bind device memory: " + str(error).strip().splitlines()[0][:160]
            )
        ]
    worst = 0.0
    for _ in range(4):
        x.copy_(torch.randn(shape) * 3 + 1)
        torch.cuda.synchronize()
        opened.run_with_iobinding(binding)
        torch.cuda.synchronize()
        want = torch.nn.functional.batch_norm(x, None, None, training=True)
        worst = max(worst, float((y - torch.nn.functional.batch_norm(want, None, None, training=True)).abs().max()))
    return [Row(name, worst < 1e-4, f"largest difference {worst:.2g} over 4 inputs, bound without copies")]


def segmentation(rehearse: bool) -> list[Row]:
    """A model with the node kept, in ONNX Runtime and in torch, on the same device."""
    import tempfile

    import numpy as np
    import torch

    import bnexport
    from models.segmentation import Segmenter

    device = "cpu" if rehearse else "cuda"
    torch.manual_seed(0)
    model = Segmenter(width=16 if rehearse else 64)
    images = torch.randn(2, 3, 64, 64) if rehearse else torch.randn(8, 3, 256, 256)
    for _ in range(3):
        model(torch.randn(4, 3, 64, 64) * 2 + 1)  # running statistics that are not 0 and 1
    model.eval()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kept.onnx"
        bnexport.export(model, images[:1], path, mode="custom_op", verify=False)
        opened = session(path.read_bytes())
    feeds = {opened.get_inputs()[0].name: images.numpy()}
    outputs = opened.run(None, feeds)
    model, on_device = model.to(device), images.to(device)
    # TF32 and other short cuts are off in both, or the difference is theirs.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with torch.no_grad():
        expected = [value.cpu().numpy() for value in model(on_device).values()]
    from bnexport import tolerances

    rows = []
    for name, got, want in zip(("out", "aux"), outputs, expected):
        bound = tolerances.model("float32", want)
        difference = float(np.abs(got - want).max())
        rows.append(
            Row(
                f"segmentation model, {name}: ONNX Runtime against torch",
                difference <= bound.atol,
                f"{difference:.2g}, allowed {bound.atol:.2g}",
            )
        )

    def in_torch() -> None:
        with torch.no_grad():
            for value in model(images.to(device)).values():
                value.cpu()

    ours, theirs = median_us(lambda: opened.run(None, feeds), 20), median_us(in_torch, 20)
    rows.append(
        Row(
            "segmentation model, from and to the host",
            None,
            f"ONNX Runtime {ours / 1e3:.2f} ms, torch {theirs / 1e3:.2f} ms",
        )
    )
    return rows


if __name__ == "__main__":
    sys.exit(main())
