"""Rows of `bench`: training steps of modules, the host's time included, against torch.nn's batch norm and sync batch norm.

A step is a forward and a backward through autograd, as a training loop makes them, and of ResNet-50 also as one CUDA graph.
Candidates take turns, and a time is the median of rounds. ResNet-50 stands here in few lines, as no package of models is needed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm as SyncFunction

import bnexport
from benchmarks.gpu.report import NotRun, Report
from benchmarks.gpu.section import Options

Norm = Callable[[int], nn.Module]
SHAPES = [(4, 32, 14, 14), (32, 256, 56, 56), (8, 2048, 16, 32)]
MOST = 1.1  # times BatchNorm2d's step of ResNet-50
BATCH, SIDE = 64, 224
STEPS, ROUNDS = 10, 7
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, stride


class Synchronised(nn.BatchNorm2d):
    """torch.nn.SyncBatchNorm with its collectives in a group of one process, where the module itself would leave them out."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        statistics = (self.running_mean, self.running_var)
        group = torch.distributed.group.WORLD
        result: torch.Tensor = SyncFunction.apply(
            input, self.weight, self.bias, *statistics, self.eps, self.momentum, group, 1
        )
        return result


class Bottleneck(nn.Module):
    def __init__(self, norm: Norm, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), norm(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), norm(width), nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False), norm(4 * width),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False), norm(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def resnet50(norm: Norm, share: int = 1) -> nn.Sequential:
    """ResNet-50 (He et al. 2015, stride in the 3 x 3 convolution); widths divided by `share`."""
    channels = 64 // share
    layers: list[nn.Module] = [
        nn.Conv2d(3, channels, 7, 2, 3, bias=False),
        norm(channels),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    for width, blocks, stride in STAGES:
        for index in range(blocks):
            layers.append(Bottleneck(norm, channels, width // share, stride if index == 0 else 1))
            channels = 4 * width // share
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000 // share))


def candidates(device: str) -> dict[str, Norm]:
    """The modules that take turns; without a device torch has no sync batch norm."""
    norms: dict[str, Norm] = {"ours": bnexport.SyncBatchNorm, "BatchNorm2d": nn.BatchNorm2d}
    if device == "cuda":
        if not torch.distributed.is_initialized():
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
        norms["SyncBatchNorm"] = Synchronised
    return norms


def step_times(steps: dict[str, Callable[[], None]], device: str, count: int, rounds: int) -> dict[str, float]:
    """Median microseconds of a step of each, host and device together."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):  # the first warms up
        for name, step in steps.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                step()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn > 0:
                times[name].append((time.perf_counter() - start) * 1e6 / count)
    return {name: statistics.median(each) for name, each in times.items()}


def step_of(model: nn.Module, x: torch.Tensor, dy: torch.Tensor | None, autocast: bool) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, dtype=torch.float16 if x.is_cuda else torch.bfloat16, enabled=autocast):
            y = model(x)
        y.backward(torch.ones_like(y) if dy is None else dy)

    return step


def summary(times: dict[str, float]) -> str:
    ours = times["ours"]
    return f"{ours:.0f} us" + "".join(f", {ours / t:.2f} x {name}" for name, t in times.items() if name != "ours")


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """A step as one CUDA graph: what is left is the device's time. The graph reads the model that the step holds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events meanwhile
        step()

    def replay(graph: Any = graph, step: Any = step) -> None:
        graph.replay()

    return replay


def run(report: Report, options: Options) -> None:
    device, few = options.device, options.rehearse
    for shape in SHAPES[:1] if few else SHAPES:
        for channels_last in (False, True):
            name = f"module step {'x'.join(map(str, shape))} float16{' NHWC' if channels_last else ''}"
            if report.wanted(name, 10):
                with report.step(name) as row:
                    times = module_step(shape, channels_last, device, few)
                    row.ok, row.value, row.data = None, summary(times), {"us": times}
    for channels_last, in_graph in itertools.product((False, True), (False, True)):
        where = (
            f"{' in a CUDA graph' if in_graph else ''}, batch {2 if few else BATCH}{' NHWC' if channels_last else ''}"
        )
        if report.wanted(f"ResNet-50 step{where}", 30):
            with report.step(f"ResNet-50 step{where}", 60) as row:
                if few and in_graph:
                    raise NotRun("an emulated device has no graphs")
                times = network_step(channels_last, device, few, in_graph)
                row.ok = None if few else times["ours"] <= MOST * times["BatchNorm2d"]
                row.value, row.data = summary(times), {"us": times, "most": MOST}


def format_of(channels_last: bool) -> Any:
    return torch.channels_last if channels_last else torch.contiguous_format


def module_step(shape: tuple[int, ...], channels_last: bool, device: str, few: bool) -> dict[str, float]:
    x, dy = (torch.randn(shape, device=device).to(torch.float16) for _ in range(2))
    x, dy = (each.contiguous(memory_format=format_of(channels_last)) for each in (x, dy))
    x.requires_grad_()
    steps = {}
    for name, norm in candidates(device).items():
        steps[name] = step_of(norm(shape[1]).to(device).train(), x, dy, autocast=False)
    return step_times(steps, device, 2 if few else 100, 1 if few else ROUNDS)


def network_step(channels_last: bool, device: str, few: bool, in_graph: bool) -> dict[str, float]:
    batch, side, share = (2, 32, 16) if few else (BATCH, SIDE, 1)
    x = torch.randn(batch, 3, side, side, device=device).contiguous(memory_format=format_of(channels_last))
    steps = {}
    for name, norm in candidates(device).items():
        if in_graph and name == "SyncBatchNorm":
            continue  # its collectives
        model = resnet50(norm, share).to(device, memory_format=format_of(channels_last)).train()
        step = step_of(model, x, None, autocast=True)
        steps[name] = captured(step) if in_graph else step
    return step_times(steps, device, 1 if few else STEPS, 1 if few else ROUNDS)
