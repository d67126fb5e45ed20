"""Section `verify`: every type and layout against float64 (cases.py), groups, CUDA graphs."""

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

SHAPES_EMULATED = [(65, 3), (7, 3, 7, 7), (5, 8, 9, 9), (2, 3, 60, 60)]


def run(report: Report, options: Options) -> None:
    torch.manual_seed(1)
    device = options.device
    shapes = SHAPES_EMULATED if options.rehearse else cases.SHAPES
    for shape, dtype in itertools.product(shapes, DTYPES):
        for channels_last in (False, True) if len(shape) == 4 else (False,):
            name = name_of(shape, dtype, channels_last)
            if not report.wanted(name):
                continue
            with report.step(name):
                for case in cases.cases_of(shape, dtype, channels_last):
                    cases.verify(case, device)
    for dtype, channels_last in itertools.product(DTYPES, (False, True)):
        where = f"{DTYPES[dtype]}, {'NHWC' if channels_last else 'NCHW'}"
        for name, check in {
            **{f"group on streams, {mode}": partial(verify_group, mode=mode) for mode in capi.STATS_MODES},
            "fixed statistics": more_cases.verify_fixed,
            "absent vectors": more_cases.verify_absent,
        }.items():
            if report.wanted(f"{name}, {where}"):
                with report.step(f"{name}, {where}"):
                    check(dtype, channels_last, device)
    for name, check in {
        "two streams at the same time": more_cases.verify_streams,
        "threads on streams of their own": more_cases.verify_threads,
        "more than 2^31 elements, NCHW": partial(more_cases.verify_huge, False),
        "more than 2^31 elements, NHWC": partial(more_cases.verify_huge, True),
    }.items():
        if report.wanted(name, 20):
            with report.step(name, 60) as row:
                if options.rehearse:
                    raise NotRun("an emulated device has one thread and little memory")
                row.value = check()
    for channels_last in (False, True):
        name = f"CUDA graph, {'NHWC' if channels_last else 'NCHW'}"
        if report.wanted(name):
            with report.step(name):
                if options.rehearse:
                    raise NotRun("an emulated device has no graphs")
                cases.verify_graph(channels_last)


def name_of(shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool) -> str:
    return f"{'x'.join(map(str, shape))} {DTYPES[dtype]}{' NHWC' if channels_last else ''}"
