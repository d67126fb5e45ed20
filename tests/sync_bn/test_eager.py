"""The way without the dispatcher: taken where nothing looks at operators, with the operators' bits."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bnexport import SyncBatchNorm
from bnexport.sync_bn import eager, operators


@pytest.fixture
def calls(monkeypatch):
    """Names of the operators that are called."""
    seen = []
    for name in ("sync_batch_norm", "sync_batch_norm_backward"):
        operator = getattr(operators, name)

        def spy(*arguments, operator=operator, name=name):
            seen.append(name)
            return operator(*arguments)

        monkeypatch.setattr(operators, name, spy)
    return seen


def step(module, x):
    leaf = x.clone().requires_grad_()
    module(leaf).square().sum().backward()
    return leaf.grad, module.weight.grad, module.bias.grad, module.running_mean, module.running_var


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(4, 6, 5, 7), (2, 6, 1, 1)], ids=str)
def test_the_same_bits_without_the_operators(calls, monkeypatch, shape, layout):
    x = torch.randn(shape).to(memory_format=layout)
    direct = step(SyncBatchNorm(6), x)
    assert calls == []
    monkeypatch.setattr(eager, "_unobserved", lambda *_: False)
    by_operators = step(SyncBatchNorm(6), x)
    assert "sync_batch_norm" in calls
    for got, want in zip(direct, by_operators, strict=True):
        assert got.stride() == want.stride() and torch.equal(got, want)


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_modes_and_tracers_see_the_operator(calls):
    module, x = SyncBatchNorm(6).eval(), torch.randn(4, 6, 5)
    with Recorder() as recorder:
        module(x)
    assert "bnexport.sync_batch_norm.default" in recorder.names
    torch.jit.trace(module, (x,), check_trace=False)
    assert calls.count("sync_batch_norm") == 2


def test_a_backward_that_is_differentiated_takes_the_operator(calls):
    module, x = SyncBatchNorm(6), torch.randn(4, 6, 5, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    assert calls == ["sync_batch_norm_backward"]
    gradient.square().sum().backward()
    assert x.grad.abs().sum() > 0


def test_what_needs_no_gradient_gets_none():
    module, x = SyncBatchNorm(6), torch.randn(4, 6, 5)
    module.weight.requires_grad_(False)
    module(x).sum().backward()
    assert module.weight.grad is None and module.bias.grad is not None
    with torch.no_grad():
        assert not module(x).requires_grad
