"""The CUDA library against float64: every type and layout, odd sizes, large means, groups, CUDA graphs.

Inputs are random and new for every case; outputs are filled with NaN before, and lie between guards that must not change; each
result must come out with the same bits a second time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.gpu.calls import DTYPES, Calls
from benchmarks.gpu.expected import EPS, Expected, along, moments
from benchmarks.gpu.kit import NotRun, Steps
from benchmarks.gpu.libraries import DEVICE, REHEARSES
from bnexport.native import capi

GUARD = 64  # elements
SHAPES = [
    (65, 3), (256, 1024), (3, 65, 1, 1), (7, 3, 7, 7), (32, 65, 7, 7), (2, 3, 100, 100), (5, 8, 9, 9), (2, 1, 3, 3),
    (16, 64, 56, 56), (4, 3, 512, 512), (1, 2, 5, 4001), (300, 2, 2, 2), (64, 16, 14, 14), (8, 24, 33, 31),
]  # fmt: skip
SHAPES_EMULATED = [(65, 3), (7, 3, 7, 7), (5, 8, 9, 9), (2, 3, 60, 60)]
SMALL = (4, 24, 15, 13)
THREADS, SIDES = 4, (14, 28, 56, 80, 112)
HUGE = (1024, 64, 182, 182)  # 2.17e9 elements
HUGE_BYTES = 30_000_000_000  # free memory that it needs in float16
RESULTS = ("saved_mean", "saved_invstd", "running_mean_out", "running_var_out", "y", "dx", "dweight", "dbias")


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool
    mean: float = 0.5
    offset: int = 0  # elements behind an aligned address
    in_place: bool = False


def steps(_: str) -> Steps:
    made: Steps = {}
    for shape, dtype in itertools.product(SHAPES_EMULATED if REHEARSES else SHAPES, DTYPES):
        made[f"{'x'.join(map(str, shape))} {DTYPES[dtype]}"] = functools.partial(verify_shape, shape, dtype)
    made |= {f"groups, fixed and absent {DTYPES[dtype]}": functools.partial(verify_ways, dtype) for dtype in DTYPES}
    on_device: Steps = {
        "two streams at the same time": verify_streams,
        "threads on streams of their own": verify_threads,
    }
    for channels_last, where in ((False, "NCHW"), (True, "NHWC")):
        on_device[f"more than 2^31 elements, {where}"] = functools.partial(verify_huge, channels_last)
        on_device[f"CUDA graph, {where}"] = functools.partial(verify_graph, channels_last)
    return made | {name: emulated if REHEARSES else step for name, step in on_device.items()}


def emulated() -> None:
    raise NotRun("an emulated device has one thread, little memory and no graphs")


def verify_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for channels_last in (False, True) if len(shape) == 4 else (False,):
        verify_all(cases_of(shape, dtype, channels_last), DEVICE)


def verify_ways(dtype: torch.dtype) -> None:
    for channels_last in (False, True):
        for mode in capi.STATS_MODES:
            verify_group(mode, dtype, channels_last, DEVICE)
        verify_fixed(dtype, channels_last, DEVICE)
        verify_absent(dtype, channels_last, DEVICE)


def cases_of(shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool) -> Iterator[Case]:
    """Aligned, unaligned, in place, and large means: 30 and 1000 standard deviations, 10,000 in float32."""
    yield Case(shape, dtype, channels_last)
    yield Case(shape, dtype, channels_last, offset=1)
    yield Case(shape, dtype, channels_last, in_place=True)
    for mean in (30.0, -1000.0) if dtype != torch.float32 else (1e4, -1e4):
        yield Case(shape, dtype, channels_last, mean=mean)


def verify_all(cases: Iterator[Case], device: str) -> None:
    for case in cases:
        verify(case, device)


def guarded(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A NaN tensor of the case's shape and layout, and the memory around it."""
    count = math.prod(case.shape)
    memory = torch.full((count + 2 * GUARD + case.offset,), torch.nan, dtype=case.dtype, device=device)
    inside = memory[GUARD + case.offset : GUARD + case.offset + count]
    if case.channels_last:
        N, C, H, W = case.shape
        return inside.view(N, H, W, C).permute(0, 3, 1, 2), memory
    return inside.view(case.shape), memory


def check_guards(memory: torch.Tensor, case: Case, what: str) -> None:
    for part in (memory[: GUARD + case.offset], memory[memory.numel() - GUARD :]):
        if not bool(part.isnan().all()):
            raise AssertionError(f"{what}: written outside of the tensor: {case}")


def random(case: Case, device: str) -> torch.Tensor:
    return guarded(case, device)[0].copy_(torch.randn(case.shape, device=device, dtype=torch.float64) + case.mean)


def expected(calls: Calls, x: torch.Tensor | None = None, dy: torch.Tensor | None = None, **known: Any) -> Expected:
    """From the inputs of calls, or from those that were in place of them."""
    at = {name: tensor.double() for name, tensor in (calls.at | ({"x": x, "dy": dy} if x is not None else {})).items()}
    known = {"running": (at["running_mean"], at["running_var"])} | known
    return Expected(DTYPES[calls.at["x"].dtype], at["x"], at["dy"], at["weight"], at["bias"], **known)


def check(calls: Calls, want: Expected, what: object, names: Sequence[str] = RESULTS) -> None:
    want.check(what, **{name: calls.at[name].double() for name in names})


def verify(case: Case, device: str) -> None:
    """Runs both directions of a case twice. Raises AssertionError when a result is wrong."""
    x, dy = random(case, device), random(dataclasses.replace(case, mean=0.25), device)
    (y, y_memory), (dx, dx_memory) = guarded(case, device), guarded(case, device)
    calls = Calls(x, dy, y, dx)
    if case.in_place:
        calls.prepare(x=y.copy_(x).data_ptr())
    calls.forward()
    if case.in_place:  # the backward needs its input back
        calls.prepare(dy=dx.copy_(dy).data_ptr())
    calls.backward()
    check_guards(y_memory, case, "y")
    check_guards(dx_memory, case, "dx")
    check(calls, expected(calls), case)
    if case.in_place:
        return
    first = [tensor.clone() for tensor in (x, dy, y, dx)]
    for output in (y, dx):
        output.fill_(torch.nan)
    calls.forward()
    calls.backward()
    if not all(torch.equal(a, b) for a, b in zip(first, (x, dy, y, dx), strict=True)):
        raise AssertionError(f"a second run gives other bits, or an input was changed: {case}")


def verify_fixed(dtype: torch.dtype, channels_last: bool, device: str) -> None:
    """Inference and its gradient: statistics are the running ones, which stay."""
    case = Case(SMALL, dtype, channels_last)
    calls = Calls(random(case, device), random(case, device))
    calls.prepare(training=0)
    calls.forward()
    calls.backward()
    mean, var, weight, dy = (calls.at[name].double() for name in ("running_mean", "running_var", "weight", "dy"))
    dx = along(weight / (var + EPS).sqrt(), dy) * dy
    check(calls, expected(calls, running=(mean, var), statistics=(mean, var, 1), dx=dx), case)


def verify_absent(dtype: torch.dtype, channels_last: bool, device: str) -> None:
    """No weight, bias, running statistics or gradients of vectors."""
    case = Case(SMALL, dtype, channels_last)
    calls = Calls(random(case, device), random(case, device))
    outputs = ("running_mean_out", "running_var_out", "dweight", "dbias")
    calls.prepare(**dict.fromkeys((*outputs, "weight", "bias", "running_mean", "running_var"), 0))
    calls.forward()
    calls.backward()
    calls.at["weight"].fill_(1)
    calls.at["bias"].fill_(0)
    check(calls, expected(calls), case, ("y", "dx", "saved_mean", "saved_invstd"))
    if not all(bool(calls.at[name].isnan().all()) for name in outputs):
        raise AssertionError("an absent vector was written")


def on_streams(calls: list[Callable[[], Any]], device: str) -> list[Any]:
    """Runs each call on a stream of its own, all at the same time."""
    if device == "cpu":
        return [call() for call in calls]
    current, results = torch.cuda.current_stream(), []
    for call in calls:
        stream = torch.cuda.Stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            results.append(call())
        current.wait_stream(stream)
    return results


def of_group(xs: Sequence[torch.Tensor], mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of a group, of float64 parts; MMCV's modes weigh processes, not values."""
    weights = {"exact": lambda x: x.numel() // x.shape[1], "default": lambda x: 1, "N": len}
    parts = [(weights[mode](x), *moments(x)) for x in xs if x.numel() > 0]
    total = len(xs) if mode == "default" else sum(weight for weight, _, _ in parts)
    mean = torch.stack([weight * mean for weight, mean, _ in parts]).sum(0) / total
    return mean, torch.stack([weight * (var + (one - mean) ** 2) for weight, one, var in parts]).sum(0) / total


def verify_group(mode: str, dtype: torch.dtype, channels_last: bool, device: str) -> None:
    """Three uneven processes on one device, each on a stream of its own, one of them without data."""
    batches = (5, 0, 2)
    case = Case((sum(batches), *SMALL[1:]), dtype, channels_last)
    whole = Calls(random(case, device), random(dataclasses.replace(case, mean=0.0), device))
    S = math.prod(case.shape[2:])
    wide = whole.at["x"].double().requires_grad_()
    mean, var = of_group(wide.split(batches), mode)
    y = (wide - along(mean, wide)) / along((var + EPS).sqrt(), wide) * along(whole.at["weight"].double(), wide)
    (dx,) = torch.autograd.grad(y, wide, whole.at["dy"].double())
    # MMCV counts a process's own values times the number of processes; the last one's running statistics stay.
    count = sum(batches) * S if mode == "exact" else len(batches) * batches[-1] * S
    want = expected(whole, statistics=(mean.detach(), var.detach(), count), dx=dx)
    parts = zip(*(whole.at[name].split(batches) for name in ("x", "dy", "y", "dx")), strict=True)
    ranks = [Calls(*tensors) for tensors in parts]
    settings = {"group_size": len(batches), "stats_mode": capi.STATS_MODES[mode], "grad_reduction": 2}
    for rank in ranks:  # the vectors are those of all; a part without data has no layout of its own
        rank.at = whole.at | {name: rank.at[name] for name in ("x", "dy", "y", "dx")}
        rank.sizes |= {"layout": whole.sizes["layout"], "S": S} | settings
    for direction in ("forward", "backward"):
        for rank in ranks:
            rank.prepare()
        rows = on_streams([functools.partial(rank.row, direction) for rank in ranks], device)
        gathered = torch.stack(rows)
        for rank, row in zip(ranks, rows, strict=True):
            rank.prepare(gathered=gathered.data_ptr(), local_moments=row.data_ptr())
        on_streams([functools.partial(rank.run, direction) for rank in ranks[:-1]], device)
        on_streams([functools.partial(ranks[-1].run, direction)], device)
    check(whole, want, case)


def verify_graph(channels_last: bool) -> None:
    """Captures both directions into a CUDA graph and replays it over new input."""
    case = Case((16, 64, 56, 56), torch.float16, channels_last)
    calls = Calls(random(case, "cuda"), random(case, "cuda"))
    calls.forward()
    calls.backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.forward()
        calls.backward()
    for _ in range(2):
        for name in ("x", "dy"):
            calls.at[name].normal_()
        for name in ("y", "dx"):
            calls.at[name].fill_(torch.nan)
        graph.replay()
        check(calls, expected(calls), case)


def verify_streams() -> str:
    """Calls on two streams that each fill the device, at the same time: backward NCHW and forward NHWC."""
    shape, streams, kept = (256, 64, 56, 56), [torch.cuda.Stream() for _ in range(2)], []
    for stream, layout in zip(streams, (torch.contiguous_format, torch.channels_last), strict=True):
        x, dy = (torch.randn(shape, device="cuda").contiguous(memory_format=layout) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            kept.append(Calls(x, dy))
            kept[-1].forward()
    torch.cuda.synchronize()
    for _ in range(200):
        for calls, stream, call in zip(kept, streams, (Calls.backward, Calls.forward), strict=True):
            with torch.cuda.stream(stream):
                call(calls)
    torch.cuda.synchronize()
    check(kept[0], expected(kept[0]), "backward NCHW", ("dx", "dweight", "dbias"))
    check(kept[1], expected(kept[1]), "forward NHWC", ("y", "saved_mean", "running_var_out"))
    return f"{len(streams)} x 200 calls"


def verify_threads() -> str:
    """Threads, each with a stream, at the same time."""
    errors: list[BaseException] = []
    start = threading.Barrier(THREADS)

    def work(index: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                start.wait(60)
                for turn in range(2 * len(SIDES)):
                    side = SIDES[(turn + index) % len(SIDES)]
                    verify(Case((8, 16, side, side), torch.float32, bool(turn % 2)), "cuda")
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return f"{THREADS} threads, {2 * len(SIDES)} cases each"


def verify_huge(channels_last: bool) -> str:
    """Offsets beyond 32 bits: the first, a middle and the last channel against float64."""
    free = torch.cuda.mem_get_info()[0]
    if free < HUGE_BYTES:
        raise NotRun(f"{free / 1e9:.0f} GB are free, it needs {HUGE_BYTES / 1e9:.0f}")
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x, dy = (
        torch.empty(HUGE, dtype=torch.float16, device="cuda", memory_format=layout).normal_(mean)
        for mean in (0.5, 0.25)
    )
    calls = Calls(x, dy, torch.empty_like(x), torch.empty_like(x))
    calls.forward()
    calls.backward()
    whole = calls.at
    for c in (0, HUGE[1] // 2, HUGE[1] - 1):
        calls.at = {
            name: tensor[c : c + 1] if tensor.dim() == 1 else tensor[:, c : c + 1].contiguous()
            for name, tensor in whole.items()
        }
        check(calls, expected(calls), f"channel {c}")
    return f"{x.numel()} elements"
