"""A group of two processes that share one device, over gloo: the module, and a node in ONNX Runtime.

    python -m benchmarks.gpu.two_processes RANK STORE DEVICE PROVIDER

Each process has a part of one batch and compares its results with the closed forms of the whole batch in float64. PROVIDER: as
the kit's option; "" leaves ONNX Runtime out.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from datetime import timedelta

import numpy as np
import torch

import bnexport
from benchmarks.gpu import closed_forms, onnx_bytes
from benchmarks.gpu.onnx_runtime import FORWARD, Sessions, close
from benchmarks.gpu.section import Options
from bnexport import tolerances

SHAPE = (8, 24, 15, 13)
PARTS = (slice(0, 5), slice(5, 8))
SECONDS = 60


def run_two(options: Options, provider: str) -> str:
    """Start both processes and wait for them. AssertionError with what they printed when one fails."""
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.two_processes", str(rank), f"{folder}/store", options.device, provider],
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


def check_module(rank: int, device: str, dtype: torch.dtype, layout: torch.memory_format) -> None:
    x, dy, weight, bias, want, gradient = whole_batch()
    module = bnexport.SyncBatchNorm(SHAPE[1]).to(device)
    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(weight))
        module.bias.copy_(torch.from_numpy(bias))
    mine = torch.from_numpy(x[PARTS[rank]]).to(device, dtype).contiguous(memory_format=layout).requires_grad_()
    y = module(mine)
    y.backward(torch.from_numpy(dy[PARTS[rank]]).to(device, dtype))
    name = str(dtype).removeprefix("torch.")
    largest = float(np.abs(weight).max())
    forward = tolerances.forward(name, condition=2, weight=largest)
    backward = tolerances.backward_input(name, condition=2, scale=2 * largest * float(np.abs(dy).max()))
    close(y.detach().float().cpu().numpy(), want[PARTS[rank]], forward, f"y of process {rank}, {name}")
    assert mine.grad is not None
    close(mine.grad.float().cpu().numpy(), gradient[PARTS[rank]], backward, f"dx of process {rank}, {name}")


def whole_batch() -> tuple[np.ndarray, ...]:
    """x, dy, weight, bias; y and dx of the whole batch. Inputs are exact in 16-bit types."""
    rng = np.random.default_rng(5)
    x, dy = (np.round(rng.normal(size=SHAPE) * 16).clip(-127, 127).astype(np.float32) / 16 for _ in range(2))
    weight, bias = rng.uniform(0.5, 1.5, (2, SHAPE[1])).astype(np.float32)
    y, mean, invstd = closed_forms.forward(x, weight.astype(np.float64), bias.astype(np.float64))
    return x, dy, weight, bias, y, closed_forms.backward(dy, x, weight.astype(np.float64), mean, invstd)[0]


def check_session(rank: int, options: Options) -> None:
    bnexport.register_group("kit")
    x, _, weight, bias, want, _ = whole_batch()
    mine = x[PARTS[rank]]
    vectors = {"mean": np.zeros_like(weight), "var": np.ones_like(weight), "weight": weight, "bias": bias}
    node = onnx_bytes.node(
        "MMCVSyncBatchNorm", ["x", *vectors], ["y"], FORWARD | {"group": "kit", "group_size": len(PARTS)}, "mmcv"
    )
    ends = [onnx_bytes.value(name, "float32", mine.shape) for name in "xy"]
    initializers = [onnx_bytes.tensor(name, values) for name, values in vectors.items()]
    session = Sessions(options).open(onnx_bytes.model([node], ends[:1], ends[1:], initializers))
    bound = tolerances.forward("float32", condition=2, weight=float(weight.max()))
    for _ in range(3):
        close(session.run(None, {"x": mine})[0], want[PARTS[rank]], bound, f"output of process {rank}")


def main() -> int:
    rank, store, device, provider = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=len(PARTS), timeout=timedelta(seconds=SECONDS / 2)
    )
    if provider:
        check_session(rank, Options(device == "cpu", provider, ""))
        print("a node, 3 runs")
    else:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for layout in (torch.contiguous_format, torch.channels_last):
                check_module(rank, device, dtype, layout)
        print("3 types, 2 layouts")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
