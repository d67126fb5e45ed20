"""The way without the dispatcher: taken where nothing looks at operators, with the operators' bits."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bnexport import SyncBatchNorm
from bnexport.sync_bn import operators


@pytest.fixture
def calls(monkeypatch):
    seen = []
    for owner, attribute, name in (
        (operators, "sync_batch_norm", "sync_batch_norm"),
        (torch.ops.bnexport.sync_batch_norm_backward, "default", "sync_batch_norm_backward"),
    ):
        operator = getattr(owner, attribute)

        def spy(*arguments, operator=operator, name=name):
            seen.append(name)
            return operator(*arguments)

        monkeypatch.setattr(owner, attribute, spy)
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
    monkeypatch.setattr(operators, "_is_observed", lambda: True)
    by_operators = step(SyncBatchNorm(6), x)
    assert "sync_batch_norm" in calls
    for got, want in zip(direct, by_operators, strict=True):
        assert got.stride() == want.stride() and torch.equal(got, want)


CHANGES = {
    "strides": lambda vector: torch.stack([vector, vector + 1], 1)[:, 0],
    "a negated view": lambda vector: torch._neg_view(-vector),
    "another type": lambda vector: vector.half(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("name", ["weight", "running_var"])
def test_tensors_unlike_those_of_the_last_call_are_looked_at_again(calls, name, change):
    module, x = SyncBatchNorm(6), torch.randn(4, 6, 5, requires_grad=True)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(0.5, 2.0, 6))
    want = copy.deepcopy(module)
    for _ in range(2):
        module(x).sum().backward()
        want(x).sum().backward()
    assert calls == []
    vector = getattr(module, name)
    vector.data = change(vector.data)
    (got,) = torch.autograd.grad(module(x).square().sum(), x)
    assert "sync_batch_norm" in calls
    torch.testing.assert_close(got, torch.autograd.grad(want(x).square().sum(), x)[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(module.running_var.float(), want.running_var, rtol=1e-3, atol=1e-3)


def test_a_gradient_unlike_that_of_the_last_call_is_looked_at_again():
    module, x = SyncBatchNorm(6), torch.randn(4, 6, 5, requires_grad=True)
    dy = torch.randn(4, 6, 5)
    want = torch.autograd.grad(torch.nn.BatchNorm1d(6)(x), x, dy)[0]
    for gradient in (dy, dy, torch._neg_view(-dy), dy.mT.contiguous().mT):
        torch.testing.assert_close(torch.autograd.grad(module(x), x, gradient)[0], want)


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


@pytest.mark.parametrize("gradients", [True, False])
def test_a_tensor_that_left_a_transform(gradients):
    left = []

    def function(x):
        left.append(2 * x)
        return x.sum()

    x = torch.randn(4, 6, 5)
    torch.func.grad(function)(x)
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(SyncBatchNorm(6)(left[0]), torch.nn.BatchNorm1d(6)(2 * x))


def test_a_backward_that_is_differentiated_takes_the_operator(calls):
    module, x = SyncBatchNorm(6).double(), torch.randn(4, 6, 5, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    assert set(calls) == {"sync_batch_norm_backward"}
    gradient.square().sum().backward()
    assert x.grad.abs().sum() > 0


def test_what_needs_no_gradient_gets_none():
    module, x = SyncBatchNorm(6), torch.randn(4, 6, 5)
    module.weight.requires_grad_(False)
    module(x).sum().backward()
    assert module.weight.grad is None and module.bias.grad is not None
    with torch.no_grad():
        assert not module(x).requires_grad


def test_new_statistics_lie_where_the_old_ones_did_and_autograd_knows(calls):
    module, x = SyncBatchNorm(6), torch.randn(4, 6, 5)
    module.running_mean.copy_(torch.arange(6.0))
    want_mean, want_var = (
        0.9 * old + 0.1 * new
        for old, new in ((module.running_mean, x.mean((0, 2))), (module.running_var, x.var((0, 2))))
    )
    places = [buffer.data_ptr() for buffer in module.buffers()]
    factor = torch.ones(6, requires_grad=True)
    product = factor * module.running_mean  # saves the statistic for its backward
    module(x)
    assert calls == [] and [buffer.data_ptr() for buffer in module.buffers()] == places
    torch.testing.assert_close(module.running_mean, want_mean)
    torch.testing.assert_close(module.running_var, want_var)
    assert module.num_batches_tracked == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_that_the_kernel_cannot_change_in_place(momentum):
    """Another type, a view of every second number, one that autograd follows, one made under inference mode."""
    x = torch.randn(4, 6, 5)
    want = torch.nn.BatchNorm1d(6, momentum=momentum)
    want(x), want(x + 1)
    odd = [torch.zeros(6, dtype=torch.bfloat16), torch.zeros(12)[::2]]
    for mean in odd:
        module = SyncBatchNorm(6, momentum=momentum)
        module.running_mean = mean
        module(x), module(x + 1)
        loose = {"rtol": 2e-2, "atol": 2e-2} if mean.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(module.running_mean.float(), want.running_mean, **loose)
        torch.testing.assert_close(module.running_var, want.running_var)
        assert module.num_batches_tracked == 2
    with torch.inference_mode():
        module = SyncBatchNorm(6, momentum=momentum)
        module(x), module(x + 1)
    torch.testing.assert_close(module.running_mean, want.running_mean)
