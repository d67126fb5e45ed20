"""A computation in float64 goes the way at its kinks that another one went, and no other difference is taken over."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bnexport.training import step

FUNCTIONS = {
    "relu": F.relu,
    "relu in place": lambda x: F.relu_(1 * x),
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": F.leaky_relu,
    "prelu": lambda x: F.prelu(x, torch.tensor([0.25], dtype=x.dtype)),
    "clamp": lambda x: x.clamp(-3, 3),
    "abs": torch.abs,
    "where": lambda x: torch.where(x > 0, 2 * x, x),
    "maximum": lambda x: torch.maximum(x, -x),
    "max_pool": lambda x: F.max_pool2d(x, 2),
    "amax": lambda x: (1 + x - x.detach().round()).amax(3),
    "topk": lambda x: (1 + x - x.detach().round()).topk(2, 3).values,
}


def gradient(function, x, mode):
    x = x.detach().requires_grad_()
    with mode:
        # A kink sees a value that was computed, not the argument itself.
        y = function(1.0 * x)
    (gradient,) = torch.autograd.grad((y * torch.arange(y.numel(), dtype=y.dtype).view(y.shape)).sum(), x)
    return gradient


def near_kinks():
    """Values of float32 on one side of kinks, and of float64 on the other, a rounding apart."""
    points = torch.tensor([0.0, 3.0, -3.0, 6.0, 1.0]).repeat(20)[:96].view(2, 3, 4, 4)
    noise = 1e-6 * torch.randn(points.shape, generator=torch.Generator().manual_seed(0))
    return points + noise, (points - noise).double()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_follows(name):
    single, double = near_kinks()
    recorder = step.Recorder()
    expected = gradient(FUNCTIONS[name], single, recorder)
    values = [value.numpy() for value in recorder.values]
    alone = gradient(FUNCTIONS[name], double, step.Recorder())
    followed = gradient(FUNCTIONS[name], double, step.Follower(values, []))
    assert (alone - expected).abs().max() > 0.1  # it would go the other way
    np.testing.assert_allclose(followed.numpy(), expected.numpy(), rtol=1e-5, atol=1e-5)


def test_other_differences_stay():
    x = torch.linspace(-1, 1, 16, dtype=torch.float64)
    wrong = (x + 0.01).float().numpy()
    expected = gradient(F.relu, x, step.Recorder())
    for values in ([wrong], [wrong[:8]], [None], []):
        assert torch.equal(gradient(F.relu, x, step.Follower(values, [])), expected)


def test_arguments_stay():
    layer = nn.Hardtanh()
    parameter = torch.linspace(-2, 2, 9, dtype=torch.float64)
    before = parameter.clone()
    near = (parameter + 1e-7).float().numpy()
    with step.Follower([near, near], [parameter]):
        layer(parameter)
        layer(parameter.view(3, 3))
    assert torch.equal(parameter, before)
