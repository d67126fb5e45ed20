"""Times of both directions against a device copy and PyTorch's kernels.

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

from benchmarks.gpu import steps as training_steps
from benchmarks.gpu.calls import DTYPES, Calls
from benchmarks.gpu.kit import Steps
from benchmarks.gpu.libraries import DEVICE, REHEARSES
from benchmarks.gpu.peers import PEERS

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
LAYOUTS = (False, True)  # channels last


def steps(_: str) -> Steps:
    shapes = SHAPES_EMULATED if REHEARSES else SHAPES
    cases = [("group ", shape, torch.float16, last) for shape, last in itertools.product(shapes[:2], LAYOUTS)]
    for shape, channels_last in itertools.product(shapes, LAYOUTS):
        types = [torch.float16, torch.float32, *([torch.bfloat16] if shape in shapes[:2] else [])]
        cases += [("", shape, dtype, channels_last) for dtype in types]
    made = training_steps.steps()
    for group, shape, dtype, channels_last in cases:
        name = f"{group}{'x'.join(map(str, shape))} {DTYPES[dtype]}{' NHWC' if channels_last else ''}"
        made[name] = partial(run_case, bool(group), shape, dtype, channels_last)
    return made


def run_case(group: bool, shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool) -> dict[str, Any]:
    torch.backends.cudnn.benchmark = True  # peers at their best
    bandwidth, l2 = 1e3, 0
    if not REHEARSES:
        bandwidth, l2 = copy_bandwidth(), torch.cuda.get_device_properties(0).L2_cache_size
    sets = input_sets(shape, dtype, channels_last, l2, DEVICE)
    row = measure_group(sets, DEVICE) if group else measure(sets, DEVICE)
    size = sets[0].at["x"].numel() * sets[0].at["x"].element_size()
    floors = {direction: tensors * size / bandwidth for direction, tensors in TRAFFIC.items()}
    row |= {"bytes": size, "gb_per_s": bandwidth / 1e3, "floor_us": floors}
    return row | {"right": None if REHEARSES or group else judge(row), "said": summary(row)}


def measure_group(sets: list[Calls], device: str) -> dict[str, Any]:
    """One process of a group: rows and statistics without the collective between them, as torch's sync batch norm."""
    us: dict[str, dict[str, float]] = {}
    for index, direction in enumerate(TRAFFIC):
        kept = []
        for calls in sets:
            calls.prepare(group_size=2)
            kept.append(torch.stack([calls.row(direction)] * 2))
            calls.prepare(group_size=2, gathered=kept[-1].data_ptr(), local_moments=kept[-1].data_ptr())
        us[direction] = {"ours": time_calls([partial(group_step, calls, direction) for calls in sets], device)}
        if device == "cuda":
            us[direction]["sync"] = time_calls([PEERS["sync"](calls)[index] for calls in sets], device)
    return {"us": us}


def group_step(calls: Calls, direction: str) -> torch.Tensor:
    """This process's row, then the rest over rows that were gathered before."""
    row = calls.row(direction)
    calls.run(direction)
    return row


def measure(sets: list[Calls], device: str) -> dict[str, Any]:
    times = {
        direction: {"ours": time_calls([partial(calls.run, direction) for calls in sets], device)}
        for direction in TRAFFIC
    }
    row: dict[str, Any] = {"us": times, "not_measured": {}}
    for name, peer in PEERS.items():
        try:
            pairs = [peer(calls) for calls in sets]
            for i, direction in enumerate(times):
                times[direction][name] = time_calls([pair[i] for pair in pairs], device)
        except RuntimeError as error:
            row["not_measured"][name] = str(error).splitlines()[0]
    times["forward"]["copy"] = time_calls([partial(one.at["y"].copy_, one.at["x"]) for one in sets], device)
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


def input_sets(shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool, l2: int, device: str) -> list[Calls]:
    """So many that together their inputs are three times the cache, at most 64."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    sets: list[Calls] = []
    used = 0
    while (used < 3 * l2 or len(sets) < 2) and len(sets) < 64:
        x, dy = (torch.randn(shape, device=device).to(dtype).contiguous(memory_format=layout) for _ in range(2))
        sets.append(Calls(x, dy))
        used += 2 * x.numel() * x.element_size()
    return sets


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
    """Percent of the floor and the best peer's time over ours, of each direction."""
    cells = []
    for direction, times in row["us"].items():
        ours, peer = times["ours"], min((times[name] for name in PEERS if name in times), default=float("nan"))
        cells.append(f"{ours:.1f} us, {100 * row['floor_us'][direction] / ours:.0f} %, {peer / ours:.2f}x")
    return " | ".join(cells)
