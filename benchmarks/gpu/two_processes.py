"""A group of two processes that share one device, over gloo: the module, and a node in ONNX Runtime.

    python -m benchmarks.gpu.two_processes RANK STORE PROVIDER

Each process has a part of one batch and compares its results with those of the whole batch. PROVIDER: as the kit has it; "" leaves
ONNX Runtime out.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from datetime import timedelta

import numpy as np
import torch

import bnexport
from benchmarks.gpu import onnx_bytes
from benchmarks.gpu.calls import DTYPES
from benchmarks.gpu.expected import Expected, close
from benchmarks.gpu.libraries import DEVICE
from benchmarks.gpu.onnx_runtime import FORWARD, VECTORS, Sessions

SHAPE = (8, 24, 15, 13)
PARTS = (slice(0, 5), slice(5, 8))
SECONDS = 60


def run_two(provider: str) -> str:
    """Start both processes and wait for them. AssertionError with what they printed when one fails."""
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.two_processes", str(rank), f"{folder}/store", provider],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(len(PARTS))
        ]  # fmt: skip
        try:
            said = [process.communicate(timeout=SECONDS)[0] for process in started]
        finally:
            for process in started:
                process.kill()
    if any(process.returncode != 0 for process in started):
        raise AssertionError(" | ".join(text[-400:] for text in said))
    return said[0].strip()


def whole_batch(dtype: str) -> tuple[torch.Tensor, torch.Tensor, Expected]:
    """x and dy, exact in 16-bit types, and the results of the whole batch with weight 1 and bias 0."""
    rng = np.random.default_rng(5)
    x, dy = (torch.from_numpy(np.round(rng.normal(size=SHAPE) * 16).clip(-127, 127) / 16) for _ in range(2))
    ones = torch.ones(SHAPE[1], dtype=torch.float64)
    return x, dy, Expected(dtype, x, dy, ones, 0 * ones)


def check_module(rank: int, device: str, dtype: torch.dtype, layout: torch.memory_format) -> None:
    x, dy, want = whole_batch(DTYPES[dtype])
    mine = x[PARTS[rank]].to(device, dtype).contiguous(memory_format=layout).requires_grad_()
    y = bnexport.SyncBatchNorm(SHAPE[1]).to(device)(mine)
    y.backward(dy[PARTS[rank]].to(device, dtype))
    assert mine.grad is not None
    for name, got in (("y", y.detach()), ("dx", mine.grad)):
        close(got.double().cpu(), want.want[name][PARTS[rank]], want.bounds[name], f"{name} of process {rank}, {dtype}")


def check_session(rank: int, provider: str) -> None:
    bnexport.register_group("kit")
    x, _, want = whole_batch("float32")
    mine = x[PARTS[rank]].float().numpy()
    attributes = FORWARD | {"group": "kit", "group_size": len(PARTS)}
    node = onnx_bytes.node("MMCVSyncBatchNorm", ["x", *VECTORS], ["y"], attributes, "mmcv")
    ends = [onnx_bytes.value(name, "float32", mine.shape) for name in "xy"]
    vectors = [onnx_bytes.tensor(name, np.full(SHAPE[1], each, np.float32)) for name, each in VECTORS.items()]
    session = Sessions(provider).open(onnx_bytes.model([node], ends[:1], ends[1:], vectors))
    for _ in range(3):
        got = torch.from_numpy(session.run(None, {"x": mine})[0]).double()
        close(got, want.want["y"][PARTS[rank]], want.bounds["y"], f"output of process {rank}")


def main() -> int:
    rank, store, provider = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=len(PARTS), timeout=timedelta(seconds=SECONDS / 2)
    )
    if provider:
        check_session(rank, provider)
        print("a node, 3 runs")
    else:
        types, layouts = (torch.float32, torch.float16, torch.bfloat16), (torch.contiguous_format, torch.channels_last)
        for dtype, layout in itertools.product(types, layouts):
            check_module(rank, DEVICE, dtype, layout)
        print("3 types, 2 layouts")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
