"""bnexport's operators and module on the device, kernels and torch operations alike.

TF32 is off and cuDNN is deterministic: what differs is ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import bnexport
from benchmarks.gpu.calls import DTYPES
from benchmarks.gpu.expected import Expected
from benchmarks.gpu.kit import NotRun, Steps
from benchmarks.gpu.libraries import DEVICE, REHEARSES
from benchmarks.gpu.two_processes import run_two
from bnexport import tolerances
from bnexport.sync_bn import kernels, operators

LOCAL = ("", 1, "exact", "local", 0)
SHAPES = [(6, 3), (3, 65, 7, 7), (4, 3, 100, 100), (32, 64, 28, 28), (2, 3, 2, 3, 4), (16, 256, 1, 1)]
LAYOUTS = ("contiguous", "channels_last", "transposed")


def steps(_: str) -> Steps:
    checks: dict[str, Callable[[str], None]] = {"the kernels are in use": check_use, "an empty batch": check_empty}
    checks |= {f"operators {DTYPES[dtype]}": partial(check_operators_of, dtype=dtype) for dtype in DTYPES}
    for autocast in (None, torch.float16, torch.bfloat16):
        checks[f"a model trains as with BatchNorm2d, autocast {autocast}"] = partial(check_models, autocast=autocast)
    on_device = {
        "a CUDA graph replays a step": check_graph,
        "nothing waits for the device": check_waits,
        "torch.compile has one graph": check_compile,
    }
    checks |= {name: emulated if REHEARSES else check for name, check in on_device.items()}
    made: Steps = {"a group of two processes": partial(run_two, "")}
    for (name, check), backend in itertools.product(checks.items(), ("kernels", "torch")):
        made[f"{name}, {backend}"] = partial(run_check, check, "torch" if backend == "torch" else "")
    return made


def run_check(check: Callable[[str], None], backend: str) -> None:
    torch.manual_seed(2)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    kernels.backend = backend
    check(DEVICE)


def emulated(device: str) -> None:
    raise NotRun("needs a CUDA device")


def check_use(device: str) -> None:
    assert kernels.usable(torch.zeros(1, 1, device=device).device) == (kernels.backend == "")


def check_operators_of(device: str, dtype: torch.dtype) -> None:
    for shape, layout in itertools.product(SHAPES[:3] if REHEARSES else SHAPES, LAYOUTS):
        check_operators(device, dtype, shape, layout)


def check_models(device: str, autocast: torch.dtype | None) -> None:
    for layout in LAYOUTS[:2]:
        check_training(device, autocast, layout)


def arranged(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "channels_last" and x.dim() > 2:
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x.transpose(0, -1).contiguous().transpose(0, -1) if layout == "transposed" else x


def check_operators(device: str, dtype: torch.dtype, shape: tuple[int, ...], layout: str) -> None:
    x = arranged(torch.randn(shape, device=device).mul_(2).add_(1).to(dtype), layout)
    dy = torch.randn(shape, device=device).to(dtype)
    S = torch.float64 if dtype == torch.float64 else torch.float32
    weight, bias, mean = (torch.randn(shape[1], dtype=S, device=device) for _ in range(3))
    var = torch.rand(shape[1], dtype=S, device=device) + 0.5
    results = []
    for _ in range(2):
        y, *new, saved_mean, saved_invstd = operators.sync_batch_norm(
            x, mean, var, weight, bias, True, 0.1, 1e-5, *LOCAL
        )
        grads = operators.sync_batch_norm_backward(dy, x, weight, saved_mean, saved_invstd, True, [True] * 3, *LOCAL)
        results.append([y, *new, *grads])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), "a second run gives other bits"
    names = ("y", "running_mean_out", "running_var_out", "dx", "dweight", "dbias")
    # NumPy's and torch's sums need contiguous rows: over strided ones they lose as many digits as a plain loop.
    wide = [tensor.double().contiguous() for tensor in (x, dy, weight, bias)]
    want = Expected(DTYPES[dtype], *wide, running=(mean.double(), var.double()))
    want.check("an operator", **{name: got.double() for name, got in zip(names, results[0], strict=True)})


def train_step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(x).float().square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def small_model(norm: type[nn.Module], device: str) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 16, 3), norm(16), nn.ReLU(), nn.Conv2d(16, 8, 3), norm(8)).to(device).train()


def check_training(device: str, autocast: torch.dtype | None, layout: str) -> None:
    ours, theirs = small_model(bnexport.SyncBatchNorm, device), small_model(nn.BatchNorm2d, device)
    x = arranged(torch.randn(8, 3, 32, 32, device=device), layout)
    with torch.autocast(device, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        gradients = train_step(ours, x)
        # Two implementations round every layer to the autocast type, in another order; without it there is float64.
        expected = train_step(theirs, x) if autocast is not None else train_step(theirs.double(), x.double())
    roundoff = tolerances.UNIT_ROUNDOFF[DTYPES[autocast or torch.float32]]
    for got, want in zip(gradients, expected, strict=True):
        difference, allowed = float((got - want).norm()), 64 * roundoff * max(1.0, float(want.norm()))
        if not difference <= allowed:
            raise AssertionError(f"gradient: off by {difference:.3g}, allowed {allowed:.3g}")


def check_empty(device: str) -> None:
    module = bnexport.SyncBatchNorm(4).to(device)
    y = module(torch.zeros(0, 4, 3, 3, device=device))
    assert y.shape == (0, 4, 3, 3)
    assert torch.equal(module.running_mean, torch.zeros(4, device=device))


def check_graph(device: str) -> None:
    model, x = small_model(bnexport.SyncBatchNorm, device), torch.randn(8, 3, 32, 32, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train_step(model, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train_step(model, x)
    for _ in range(3):
        x.copy_(torch.randn(8, 3, 32, 32))
        graph.replay()
        replayed = [gradient.clone() for gradient in captured]
        assert all(torch.equal(a, b) for a, b in zip(replayed, train_step(model, x.clone()), strict=True))


def check_waits(device: str) -> None:
    model, x = small_model(bnexport.SyncBatchNorm, device), torch.randn(4, 3, 16, 16, device=device)
    train_step(model, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(model, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_compile(device: str) -> None:
    model, x = small_model(bnexport.SyncBatchNorm, device), torch.randn(4, 3, 16, 16, device=device)
    expected = train_step(model, x)
    for got, want in zip(train_step(torch.compile(model, fullgraph=True), x), expected, strict=True):
        assert torch.allclose(got, want, atol=1e-4)
