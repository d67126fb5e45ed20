"""Section `bench`: times of both directions against a device copy and PyTorch's kernels.

Times are medians of CUDA graph replays that go round a set of inputs larger than L2, so that no run finds its input
in the cache; outputs are distinct, too. The floor is the traffic of the algorithm (forward: read x twice, write y; backward:
read x and dy twice, write dx) at the bandwidth of a large copy measured in the same run: a memcpy or an elementwise kernel,
whichever is faster. On the emulated device the host's clock stands in, and the figures mean nothing.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import steps
from benchmarks.gpu.layer import DTYPES, Calls, Layer
from benchmarks.gpu.peers import PEERS
from benchmarks.gpu.report import Report
from benchmarks.gpu.section import Options

# (N, C, H, W): the five of the performance notes, 16 MB and up in float16 but for the fourth; then small ones.
SHAPES = [
    (32, 256, 56, 56), (16, 64, 112, 112), (2, 512, 128, 256), (8, 2048, 16, 32), (256, 64, 56, 56), (8, 64, 56, 56),
    (32, 512, 7, 7), (8, 256, 14, 14), (2, 64, 28, 28), (1, 32, 16, 16),
]  # fmt: skip
SHAPES_EMULATED = [(4, 6, 16, 16)]
# Least share of the floor (see above) for tensors of this size and up, where ours is no slower than torch's, too.
JUDGED_BYTES, LEAST_SHARE = 16_000_000, 0.85
TRAFFIC = {"forward": 3, "backward": 5}  # tensors
LARGEST_BATCH = 40  # calls in one graph
ROUNDS = 15


def run(report: Report, options: Options) -> None:
    torch.backends.cudnn.benchmark = True  # peers at their best
    bandwidth, l2 = 1e3, 0
    with report.step("copy") as row:
        if not options.rehearse:
            bandwidth, l2 = copy_bandwidth(), torch.cuda.get_device_properties(0).L2_cache_size
        row.ok, row.value, row.data = None, f"{bandwidth / 1e3:.0f} GB/s", {"gb_per_s": bandwidth / 1e3, "l2_bytes": l2}
    if report.wanted("host"):
        with report.step("host") as row:
            microseconds = host_time(options.device)
            row.ok, row.value, row.data = None, f"{microseconds:.1f} us a call", {"us": microseconds}
    steps.run(report, options)
    other_ways(report, bandwidth, l2, options)
    for shape in SHAPES_EMULATED if options.rehearse else SHAPES:
        for channels_last in (False, True):
            large = options.rehearse or shape in SHAPES[:2]
            for dtype in (torch.float16, torch.float32, *([torch.bfloat16] if large else [])):
                name = f"{'x'.join(map(str, shape))} {DTYPES[dtype]}{' NHWC' if channels_last else ''}"
                if report.wanted(name, 15):
                    with report.step(name) as row:
                        row.data = measure(shape, dtype, channels_last, bandwidth, l2, options.device)
                        row.ok, row.value = (
                            None if options.rehearse else judge(row.data),
                            summary(row.data),
                        )


def other_ways(report: Report, bandwidth: float, l2: int, options: Options) -> None:
    """Inference, and one process of a group: rows and statistics without the collective between them."""
    for shape in SHAPES_EMULATED if options.rehearse else SHAPES[:2]:
        for channels_last, way in itertools.product((False, True), ("inference", "group")):
            name = f"{way} {'x'.join(map(str, shape))} float16{' NHWC' if channels_last else ''}"
            if report.wanted(name, 10):
                with report.step(name) as row:
                    row.data = measure_way(way, shape, channels_last, bandwidth, l2, options.device)
                    row.ok, row.value = (
                        None,
                        "; ".join(
                            f"{direction} {us:.1f} us, {100 * row.data['floor_us'][direction.split()[-1]] / us:.0f} %"
                            for direction, us in row.data["us"].items()
                        ),
                    )


def measure_way(
    way: str, shape: tuple[int, ...], channels_last: bool, bandwidth: float, l2: int, device: str
) -> dict[str, Any]:
    """Inference reads x once. A group has the traffic of one process; its rival is torch's sync batch norm without collectives."""
    sets = input_sets(shape, torch.float16, channels_last, l2, device)
    size = sets[0][0].numel() * sets[0][0].element_size()
    if way == "inference":
        all_calls = [Calls(*one) for one in sets]
        for calls in all_calls:
            calls.prepare(training=0)
        us = {"forward": time_calls([calls.forward for calls in all_calls], device)}
        return {"us": us, "floor_us": {"forward": 2 * size / bandwidth}}
    us, kept = {}, []
    for direction in ("forward", "backward"):
        todo = []
        for one in sets:
            calls = Calls(*one)
            calls.prepare(group_size=2)
            rows = torch.stack([calls.row(backward=direction == "backward")] * 2)
            calls.prepare(group_size=2, gathered=rows.data_ptr(), local_moments=rows.data_ptr())
            kept.append(rows)
            todo.append(partial(group_step, calls, direction))
        us[direction] = time_calls(todo, device)
        if device == "cuda":
            pairs = [PEERS["sync"](one[0], one[1], one[4]) for one in sets]
            us[f"torch {direction}"] = time_calls([pair[direction == "backward"] for pair in pairs], device)
    return {"us": us, "floor_us": {name: tensors * size / bandwidth for name, tensors in TRAFFIC.items()}}


def group_step(calls: Calls, direction: str) -> torch.Tensor:
    """This process's row, then the rest over rows that were gathered before."""
    row = calls.row(backward=direction == "backward")
    getattr(calls, direction)()
    return row


def copy_bandwidth() -> float:
    """Bytes per microsecond, read and written, of 1 GiB: the faster of a memcpy and an elementwise kernel."""
    source = torch.empty(1 << 28, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    return 2 * source.numel() * 4 / min(time_calls([way], "cuda") for way in ways)


def time_calls(calls: list[Callable[[], Any]], device: str) -> float:
    """Median microseconds of one of `calls`, which are captured in turn."""
    for call in calls[:3]:
        call()
    if device == "cpu":
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) * 1e6 / len(calls)
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    count = max(len(calls), LARGEST_BATCH // len(calls) * len(calls))
    with torch.cuda.graph(graph):
        for i in range(count):
            kept.append(calls[i % len(calls)]())  # alive, so that outputs do not share memory
            if len(kept) > len(calls):
                kept.pop(0)
    start_event, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(ROUNDS):
        start_event.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start_event.elapsed_time(stop) * 1e3 / count)
    return statistics.median(times[2:])


def input_sets(shape: tuple[int, ...], dtype: Any, channels_last: bool, l2: int, device: str) -> list[tuple[Any, ...]]:
    """x, dy, y, dx, layer; so many that together they are three times the cache, at most 64."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    sets: list[tuple[Any, ...]] = []
    used = 0
    while (used < 3 * l2 or len(sets) < 2) and len(sets) < 64:
        x, dy = (torch.randn(shape, device=device).to(dtype).contiguous(memory_format=layout) for _ in range(2))
        sets.append((x, dy, torch.empty_like(x), torch.empty_like(x), Layer.of(x)))
        used += 2 * x.numel() * x.element_size()
    return sets


def measure(
    shape: tuple[int, ...], dtype: Any, channels_last: bool, bandwidth: float, l2: int, device: str
) -> dict[str, Any]:
    sets = input_sets(shape, dtype, channels_last, l2, device)
    size = sets[0][0].numel() * sets[0][0].element_size()
    times: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    row: dict[str, Any] = {
        "bytes": size,
        "floor_us": {direction: tensors * size / bandwidth for direction, tensors in TRAFFIC.items()},
        "us": times,
        "not_measured": {},
    }
    for direction, measured in times.items():
        measured["ours"] = time_calls([getattr(Calls(*one), direction) for one in sets], device)
    for name, peer in PEERS.items():
        try:
            pairs = [peer(one[0], one[1], one[4]) for one in sets]
            for i, direction in enumerate(times):
                times[direction][name] = time_calls([pair[i] for pair in pairs], device)
        except RuntimeError as error:
            row["not_measured"][name] = str(error).splitlines()[0]
    times["forward"]["copy"] = time_calls([lambda one=one: one[2].copy_(one[0]) for one in sets], device)
    return row


def judge(row: dict[str, Any]) -> bool | None:
    """Whether both directions reach their share of the floor and the time of torch's kernels, those of its sync batch norm
    among them; None for a tensor that is too small to say.
    """
    if row["bytes"] < JUDGED_BYTES:
        return None
    return all(
        row["floor_us"][direction] / times["ours"] >= LEAST_SHARE
        and times["ours"] <= min((times[name] for name in ("torch", "sync") if name in times), default=times["ours"])
        for direction, times in row["us"].items()
    )


def summary(row: dict[str, Any]) -> str:
    """Percent of the floor and the best peer's time over ours, of both directions."""
    cells = []
    for direction, times in row["us"].items():
        ours = times["ours"]
        peer = min((times[name] for name in PEERS if name in times), default=float("nan"))
        cells.append(f"{ours:.1f} us, {100 * row['floor_us'][direction] / ours:.0f} %, {peer / ours:.2f}x")
    return " | ".join(cells)


def host_time(device: str) -> float:
    """Microseconds that a forward call takes on the host."""
    calls = Calls(
        *input_sets((2, 64, 28, 28) if device == "cuda" else (2, 4, 7, 7), torch.float16, False, 0, device)[0]
    )
    count = 500 if device == "cuda" else 3
    for _ in range(count // 5):
        calls.forward()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        calls.forward()
    return (time.perf_counter() - start) / count * 1e6
