"""The torch operators on a CUDA device, kernels and torch operations alike, against the float64 closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import bnexport
from bnexport import tolerances
from bnexport.sync_bn import kernels, operators
from tests.support import kernel_reference
from tests.support.checks import assert_within, condition_of

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

LOCAL = ("", 1, "exact", "local", 0)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
SHAPES = [
    (6, 3),
    (1, 1, 2),
    (3, 65, 7, 7),
    (4, 3, 100, 100),
    (32, 64, 28, 28),
    (2, 3, 2, 3, 4),
    (16, 256, 1, 1),
    (0, 4, 3, 3),
]


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """No TF32, and cuDNN with one order of its sums: what differs is ours."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.fixture(params=["kernels", "torch"])
def backend(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(kernels, "backend", "torch")
    elif not kernels.usable(torch.device("cuda", 0)):
        pytest.fail("the CUDA library is not there")
    return request.param


def host(tensor: torch.Tensor) -> np.ndarray:
    # NumPy's pairwise sums need contiguous rows: over strided ones they lose as many digits as a plain loop.
    return np.ascontiguousarray(tensor.detach().double().cpu().numpy())


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_backward(backend, dtype, shape, layout, training):
    T = DTYPES[dtype]
    S = torch.float64 if dtype == "float64" else torch.float32
    C = shape[1]
    x = torch.randn(shape, device="cuda").mul_(2).add_(1).to(T)
    if layout == "channels_last" and x.dim() > 2:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    elif layout == "transposed":
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    dy = torch.randn(shape, device="cuda").to(T)
    w, b, old_mean = (torch.randn(C, dtype=S, device="cuda") for _ in range(3))
    old_var = torch.rand(C, dtype=S, device="cuda") + 0.5
    y, new_mean, new_var, mean, invstd = operators.sync_batch_norm(
        x, old_mean, old_var, w, b, training, 0.1, 1e-5, *LOCAL
    )
    assert y.stride() == torch.empty_like(x).stride()
    array = host(x)
    expected = kernel_reference.forward(
        array, host(w), host(b), running_mean=host(old_mean), running_var=host(old_var), training=training
    )
    condition = condition_of(expected)
    assert_within(
        y.double().cpu(),
        expected.output,
        tolerances.forward(dtype, condition=condition, weight=float(w.abs().max())),
        "output",
    )
    scale = float(
        max(
            np.abs(host(old_mean)).max(),
            host(old_var).max(),
            np.abs(expected.running_var).max(),
            np.sqrt(expected.var).max(),
        )
    )
    assert_within(new_mean.cpu(), expected.running_mean, tolerances.statistic(dtype, scale=scale), "running_mean")
    assert_within(new_var.cpu(), expected.running_var, tolerances.statistic(dtype, scale=scale), "running_var")

    dx, dw, db = operators.sync_batch_norm_backward(dy, x, w, mean, invstd, training, [True] * 3, *LOCAL)
    statistics = {} if training else {"mean": host(old_mean), "var": host(old_var)}
    gradient = kernel_reference.backward(host(dy), array, host(w), training=training, **statistics)
    largest = float(dy.abs().max()) if dy.numel() else 0.0
    scale = float(np.abs(host(w) * expected.invstd).max() * largest)
    assert_within(
        dx.double().cpu(),
        gradient.grad_input,
        tolerances.backward_input(dtype, condition=condition, scale=scale),
        "grad_input",
    )
    axes = (0, *range(2, len(shape)))
    per_channel = (1, -1, *(1,) * (len(shape) - 2))
    x_hat = (array - expected.mean.reshape(per_channel)) * expected.invstd.reshape(per_channel)
    for got, want, terms in ((dw, gradient.grad_weight, host(dy) * x_hat), (db, gradient.grad_bias, host(dy))):
        total = float(np.abs(terms).sum(axes).max())
        assert_within(got.cpu(), want, tolerances.backward_sum(dtype, condition=condition, absolute_sum=total), "sum")


@pytest.mark.parametrize("ratio", [1e2, 1e4])
def test_large_means(backend, ratio):
    x = (torch.randn(8, 3, 64, 64, dtype=torch.float64) + ratio).float()
    y, *_ = operators.sync_batch_norm(x.cuda(), None, None, None, None, True, 1.0, 1e-5, *LOCAL)
    expected = kernel_reference.forward(x.double().numpy())
    assert_within(
        y.double().cpu(), expected.output, tolerances.forward("float32", condition=condition_of(expected)), "output"
    )


def test_same_bits_on_every_run(backend):
    x, dy = torch.randn(2, 16, 96, 33, 17, device="cuda").unbind()
    runs = []
    for _ in range(5):
        y, _, _, mean, invstd = operators.sync_batch_norm(x, None, None, None, None, True, 0.1, 1e-5, *LOCAL)
        runs.append((y, *operators.sync_batch_norm_backward(dy, x, None, mean, invstd, True, [True] * 3, *LOCAL)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run))


def train_step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(x).float().square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def small_model(norm: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 16, 3), norm(16), nn.ReLU(), nn.Conv2d(16, 8, 3), norm(8)).cuda().train()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("autocast", [None, torch.float16, torch.bfloat16], ids=str)
def test_a_model_trains_as_with_batch_norm(backend, autocast, memory_format):
    ours, theirs = small_model(bnexport.SyncBatchNorm), small_model(nn.BatchNorm2d)
    x = torch.randn(8, 3, 32, 32, device="cuda").contiguous(memory_format=memory_format)
    with torch.autocast("cuda", dtype=autocast or torch.float16, enabled=autocast is not None):
        gradients, expected = train_step(ours, x), train_step(theirs, x)
    # Two implementations that round every layer to the autocast type, in another order.
    roundoff = tolerances.UNIT_ROUNDOFF[str(autocast or torch.float32).removeprefix("torch.")]
    for got, want in zip(gradients, expected):
        assert torch.linalg.vector_norm(got - want) <= 64 * roundoff * max(1.0, torch.linalg.vector_norm(want))
    for name, value in theirs.state_dict().items():
        assert torch.allclose(ours.state_dict()[name].double(), value.double(), atol=64 * roundoff), name


def test_a_cuda_graph_replays_a_step(backend):
    model = small_model(bnexport.SyncBatchNorm)
    x = torch.randn(8, 3, 32, 32, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train_step(model, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train_step(model, x)
    for seed in range(3):
        x.copy_(torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        replayed = [gradient.clone() for gradient in captured]
        assert all(torch.equal(a, b) for a, b in zip(replayed, train_step(model, x.clone())))


def test_compile_has_one_graph(backend):
    model = small_model(bnexport.SyncBatchNorm)
    x = torch.randn(4, 3, 16, 16, device="cuda")
    expected = train_step(model, x)
    compiled_model = torch.compile(model, fullgraph=True)
    for got, want in zip(train_step(compiled_model, x), expected):
        assert torch.allclose(got, want, atol=1e-4)


def test_nothing_waits_for_the_device(backend):
    model = small_model(bnexport.SyncBatchNorm)
    x = torch.randn(4, 3, 16, 16, device="cuda")
    train_step(model, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(model, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_device_of_the_tensor_is_used(backend):
    x = torch.randn(4, 3, 8, 8, device="cuda:1")
    y, *_ = operators.sync_batch_norm(x, None, None, None, None, True, 0.1, 1e-5, *LOCAL)
    assert y.device == x.device
    assert_within(
        y.double().cpu(),
        kernel_reference.forward(host(x)).output,
        tolerances.forward("float32", condition=3.0),
        "output",
    )
