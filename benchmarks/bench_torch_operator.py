"""bnexport.SyncBatchNorm against torch.nn.BatchNorm2d on CPU: verified first, then timed in turn.

    python -m benchmarks.bench_torch_operator [--json PATH] [--rounds N] [--threads N] [--isa avx2]

One process: forward and backward in training, ratios torch / ours of medians (above 1: ours is
faster). The JSON also has our module with torch's operations in place of the kernels. Two processes (gloo on
127.0.0.1, one thread each): a training step of our module on half the batch each, as a ratio to
torch's own on the whole batch with the same number of threads in all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks import machine, records
from bnexport import SyncBatchNorm, tolerances
from bnexport.sync_bn import kernels
from tests.support import kernel_reference

# The shapes of the performance notes that fit a CPU, and smaller ones.
SHAPES = [
    (8, 64, 112, 112),
    (16, 64, 112, 112),
    (2, 512, 128, 256),
    (8, 2048, 16, 32),
    (32, 256, 56, 56),
    (32, 64, 32, 32),
    (8, 64, 56, 56),
    (8, 64, 28, 28),
    (4, 32, 14, 14),
    (2, 4, 2, 2),  # what a call costs
]

BLOCKS = 3
WARM_UP = 3


def verify(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> float:
    """Largest error of output and gradient over its bound; raises when one exceeds it. At most 2 MB are checked."""
    N = max(1, min(shape[0], (1 << 19) // int(np.prod(shape[1:]))))
    C = min(shape[1], 64)
    x = arranged(torch.randn(N, C, *shape[2:]).add_(1).to(dtype), layout)
    dy = torch.randn_like(x)
    module = SyncBatchNorm(C)
    x.requires_grad_()
    y = module(x)
    y.backward(dy)
    assert x.grad is not None
    expected = kernel_reference.forward(x.detach())
    gradient = kernel_reference.backward(dy, x.detach(), None, expected.mean, expected.invstd)
    name = str(dtype).removeprefix("torch.")
    condition = tolerances.condition(expected.mean, np.sqrt(expected.var))
    scale = float(expected.invstd.max() * dy.abs().max())
    worst = 0.0
    for got, truth, bound in (
        (y.detach(), expected.output, tolerances.forward(name, condition=condition)),
        (x.grad, gradient.grad_input, tolerances.backward_input(name, condition=condition, scale=scale)),
    ):
        assert truth is not None
        excess = np.abs(got.double().numpy() - truth) / (bound.atol + bound.rtol * np.abs(truth))
        worst = max(worst, float(excess.max()))
    if not worst <= 1.0:
        raise SystemExit(f"{shape} {name} {layout}: {worst:.2f} times the bound; nothing was timed")
    return worst


def arranged(x: torch.Tensor, layout: str) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else x.contiguous()


def time_one(shape: tuple[int, ...], dtype: torch.dtype, layout: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds of (forward, backward) of each engine."""
    x = arranged(torch.randn(shape).to(dtype), layout)
    dy = torch.randn_like(x)
    engines = {
        "ours": SyncBatchNorm(shape[1]),
        "torch": nn.BatchNorm2d(shape[1]),
        "ours, torch operations": SyncBatchNorm(shape[1]),
    }
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in engines}
    # Blocks in turn: within a block the allocator and the caches are in the state that training in
    # that engine leaves them in, and slow spells of the machine hit all engines.
    for _ in range(BLOCKS):
        for name, module in engines.items():
            kernels.backend = "torch" if name.endswith("operations") else ""
            for step in range(WARM_UP + rounds):
                leaf = x.detach().requires_grad_()
                start = time.perf_counter()
                y = module(leaf)
                middle = time.perf_counter()
                y.backward(dy)
                end = time.perf_counter()
                if step >= WARM_UP:
                    times[name][0].append(middle - start)
                    times[name][1].append(end - middle)
    kernels.backend = ""
    return {
        name: (statistics.median(forward), statistics.median(backward)) for name, (forward, backward) in times.items()
    }


def _group_work(rank: int, processes: int, port: int, shape: tuple[int, ...], rounds: int, queue: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    x = torch.randn(shape[0] // processes, *shape[1:], requires_grad=True)
    dy = torch.randn_like(x)
    module = SyncBatchNorm(shape[1])
    seconds = []
    for round_ in range(rounds + 2):
        dist.barrier()
        start = time.perf_counter()
        module(x).backward(dy)
        if round_ >= 2:
            seconds.append(time.perf_counter() - start)
    if rank == 0:
        queue.put(statistics.median(seconds))
    dist.barrier()
    dist.destroy_process_group()


def time_group(shape: tuple[int, ...], rounds: int, processes: int = 2) -> float:
    """Median seconds of one training step of two processes that share the batch."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_group_work, (processes, store.port, shape, rounds, queue), nprocs=processes)
    return queue.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--json", type=Path, help="instead of benchmarks/results/torch_operator_cpu.json, ..._avx2.json"
    )
    machine.add_isa_option(parser)
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of a block")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    arguments = parser.parse_args()
    machine.limit(arguments.isa)
    if arguments.json is None:
        arguments.json = machine.result_of(Path("benchmarks/results/torch_operator_cpu.json"), arguments.isa)
    print(machine.sentence({"machine": machine.describe()}) + f", {arguments.threads} threads")
    torch.set_num_threads(arguments.threads)
    console = Console(highlight=False, width=120)
    table = Table(
        title=f"training step, {arguments.threads} threads, medians of {BLOCKS} x {arguments.rounds}; ratio = torch / ours"
    )
    for column in (
        "shape",
        "type",
        "layout",
        "MB",
        "fwd ms",
        "fwd ratio",
        "bwd ms",
        "bwd ratio",
        "fwd+bwd ratio",
        "2 processes",
    ):
        table.add_column(column, justify="right" if column not in ("shape", "type", "layout") else "left", no_wrap=True)
    rows = []
    cases = [(shape, torch.float32, "contiguous") for shape in SHAPES]
    cases += [
        *((shape, torch.float32, "channels_last") for shape in (SHAPES[5], SHAPES[7], SHAPES[3])),
        (SHAPES[0], torch.float32, "channels_last"),
        (SHAPES[0], torch.bfloat16, "contiguous"),
        (SHAPES[0], torch.float16, "contiguous"),
    ]
    for shape, dtype, layout in cases:
        error = verify(shape, dtype, layout)
        engines = time_one(shape, dtype, layout, arguments.rounds)
        ours, theirs, fallback = engines["ours"], engines["torch"], engines["ours, torch operations"]
        group = time_group(shape, arguments.rounds) if dtype == torch.float32 and layout == "contiguous" else None
        megabytes = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size() / 1e6
        row = {
            "shape": shape, "dtype": str(dtype).removeprefix("torch."), "layout": layout, "megabytes": megabytes,
            "error_over_bound": error, "forward_ms": ours[0] * 1e3, "backward_ms": ours[1] * 1e3,
            "torch_forward_ms": theirs[0] * 1e3, "torch_backward_ms": theirs[1] * 1e3,
            "fallback_forward_ms": fallback[0] * 1e3, "fallback_backward_ms": fallback[1] * 1e3,
            "forward_ratio": theirs[0] / ours[0], "backward_ratio": theirs[1] / ours[1], "step_ratio": sum(theirs) / sum(ours),
            "two_processes_ratio": None if group is None else sum(theirs) / group,
        }  # fmt: skip
        rows.append(row)
        table.add_row(
            "x".join(map(str, shape)),
            row["dtype"],
            layout,
            f"{megabytes:.1f}",
            *(
                f"{row[key]:.2f}"
                for key in ("forward_ms", "forward_ratio", "backward_ms", "backward_ratio", "step_ratio")
            ),
            "" if group is None else f"{row['two_processes_ratio']:.2f}",
        )
    console.print(table)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": machine.describe(),
        "threads": arguments.threads,
        "rows": rows,
    }
    records.write(arguments.json, result)


if __name__ == "__main__":
    main()
