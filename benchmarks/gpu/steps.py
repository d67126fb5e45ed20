"""Training steps of modules, the host's time included, against torch.nn's batch norm and sync batch norm.

A step is a forward and a backward through autograd, as a training loop makes them, and of ResNet-50 also as one CUDA graph.
Candidates take turns, and a time is the median of rounds. ResNet-50 stands here in few lines, as no package of models is needed.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm as SyncFunction

import bnexport
from benchmarks.gpu.kit import NotRun, Steps
from benchmarks.gpu.libraries import DEVICE, REHEARSES

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


def step_times(steps: dict[str, Callable[[], None]], device: str, few: bool, is_short: bool) -> dict[str, float]:
    """Median microseconds of a step of each, host and device together."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    count = (2 if few else 100) if is_short else (1 if few else STEPS)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for turn in range((1 if few else ROUNDS) + 1):  # the first warms up
        for name, step in steps.items():
            wait()
            start = time.perf_counter()
            for _ in range(count):
                step()
            wait()
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


def steps() -> Steps:
    made: Steps = {}
    for shape, channels_last in itertools.product(SHAPES[:1] if REHEARSES else SHAPES, (False, True)):
        name = f"module step {'x'.join(map(str, shape))} float16{' NHWC' if channels_last else ''}"
        made[name] = functools.partial(measure, shape, channels_last, False)
    for channels_last, in_graph in itertools.product((False, True), (False, True)):
        where = f"{' in a CUDA graph' if in_graph else ''}{' NHWC' if channels_last else ''}"
        made[f"ResNet-50 step{where}"] = functools.partial(measure, None, channels_last, in_graph)
    return made


def measure(shape: tuple[int, ...] | None, channels_last: bool, in_graph: bool) -> dict[str, Any]:
    if REHEARSES and in_graph:
        raise NotRun("an emulated device has no graphs")
    torch.backends.cudnn.benchmark = True  # peers at their best
    layout = torch.channels_last if channels_last else torch.contiguous_format
    times = step_times(steps_of(shape, layout, DEVICE, REHEARSES, in_graph), DEVICE, REHEARSES, bool(shape))
    right = None if REHEARSES or shape else times["ours"] <= MOST * times["BatchNorm2d"]
    return {"right": right, "said": summary(times), "us": times, "most": MOST}


def steps_of(
    shape: tuple[int, ...] | None, layout: Any, device: str, few: bool, in_graph: bool
) -> dict[str, Callable[[], None]]:
    """A step of each candidate: of a module for a shape, else of ResNet-50 under autocast."""
    batch, side, share = (2, 32, 16) if few else (BATCH, SIDE, 1)
    x = torch.randn(shape or (batch, 3, side, side), device=device).contiguous(memory_format=layout)
    x = x.to(torch.float16).requires_grad_() if shape else x
    dy = torch.randn_like(x) if shape else None
    steps = {}
    for name, norm in candidates(device).items():
        if in_graph and name == "SyncBatchNorm":
            continue  # its collectives
        model = norm(shape[1]) if shape else resnet50(norm, share)
        step = step_of(model.to(device, memory_format=layout).train(), x, dy, autocast=shape is None)
        steps[name] = captured(step) if in_graph else step
    return steps
