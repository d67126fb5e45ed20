"""Section `verify`: every strategy, type and layout against float64 (cases.py), groups, CUDA graphs."""

from __future__ import annotations

import itertools
from functools import partial

import torch

from benchmarks.gpu import cases, more_cases
from benchmarks.gpu.groups import verify_group
from benchmarks.gpu.layer import DTYPES
from benchmarks.gpu.report import NotRun, Report
from benchmarks.gpu.section import Options
from bnexport.native import capi

# Shapes whose automatic plan takes each way: on a GPU of 132 multiprocessors and 50 MB of L2, and on the emulated one.
LARGE = [(32, 256, 56, 56), (8, 2048, 16, 32), (256, 64, 56, 56)]
LARGE_EMULATED = [(5, 8, 30, 30), (2, 3, 60, 60)]  # whose L2 is smaller than its clusters' memory: never persistent
SHAPES_EMULATED = [(65, 3), (7, 3, 7, 7), (5, 8, 9, 9), (2, 3, 30, 30)]
STRATEGIES = {"split", "cluster", "persistent", "persistent NHWC"}


def run(report: Report, options: Options) -> None:
    torch.manual_seed(1)
    device = options.device
    automatic(report, LARGE_EMULATED if options.rehearse else LARGE, device)
    shapes = SHAPES_EMULATED if options.rehearse else cases.SHAPES
    for shape, dtype in itertools.product(shapes, DTYPES):
        for channels_last in (False, True) if len(shape) == 4 else (False,):
            name = name_of(shape, dtype, channels_last)
            if not report.wanted(name):
                continue
            with report.step(name) as row:
                used: dict[str, int] = {}
                for case in cases.cases_of(shape, dtype, channels_last):
                    for strategy in cases.verify(case, device):
                        if strategy is not None:
                            used[strategy] = used.get(strategy, 0) + 1
                row.value, row.data = f"{sum(used.values())} results: {used}", {"used": used}
    for dtype, channels_last in itertools.product(DTYPES, (False, True)):
        where = f"{DTYPES[dtype]}, {'NHWC' if channels_last else 'NCHW'}"
        for name, check in {
            **{f"group on streams, {mode}": partial(verify_group, mode=mode) for mode in capi.STATS_MODES},
            "fixed statistics": more_cases.verify_fixed,
            "absent vectors": more_cases.verify_absent,
            "a refused launch": more_cases.verify_refusal,
        }.items():
            if report.wanted(f"{name}, {where}"):
                with report.step(f"{name}, {where}") as row:
                    row.value = check(dtype, channels_last, device) or ""
    for name, check in {
        "threads with different shared memory": more_cases.verify_threads,
        "more than 2^31 elements, NCHW": partial(more_cases.verify_huge, False),
        "more than 2^31 elements, NHWC": partial(more_cases.verify_huge, True),
    }.items():
        if report.wanted(name, 20):
            with report.step(name) as row:
                if options.rehearse:
                    raise NotRun("an emulated device has one thread and little memory")
                row.value = check()
    for strategy, cluster, channels_last in [*((*wish, False) for wish in cases.WISHES), ("persistent", 0, True)]:
        name = f"CUDA graph, {strategy} {cluster or ''}".strip() + (" NHWC" if channels_last else "")
        if report.wanted(name):
            with report.step(name):
                if options.rehearse:
                    raise NotRun("an emulated device has no graphs")
                if not cases.verify_graph(strategy, cluster, channels_last):
                    raise NotRun("the device does not allow it")


def name_of(shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool) -> str:
    return f"{'x'.join(map(str, shape))} {DTYPES[dtype]}{' NHWC' if channels_last else ''}"


def automatic(report: Report, shapes: list[tuple[int, ...]], device: str) -> None:
    """Large tensors with the plan's own choice; together they take every way."""
    seen: set[str] = set()
    for shape, dtype, channels_last in itertools.product(shapes, (torch.float16, torch.float32), (False, True)):
        name = f"automatic {name_of(shape, dtype, channels_last)}"
        with report.step(name) as row:  # again in each call: the last row needs them all
            used = cases.verify(cases.Case(shape, dtype, channels_last), device)
            seen.update(f"{strategy}{' NHWC' if channels_last else ''}" for strategy in used)
            row.value = " / ".join(map(str, used))
    with report.step("automatic split") as row:
        used = cases.verify(cases.Case((4, 8, 9, 9), torch.float64, False), device)
        seen.update(map(str, used))
        row.value = " / ".join(map(str, used))
    with report.step("the plan chose every strategy") as row:
        row.ok = seen >= ({"split", "cluster"} if device == "cpu" else STRATEGIES)
        row.value = ", ".join(sorted(seen))
