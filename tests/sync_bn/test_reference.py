"""The closed forms against torch.autograd in float64: what everything else is tested against."""

import numpy as np
import pytest
import torch

from bnexport.errors import UsageError
from tests.support import kernel_reference

BOUND = 1e-11

SHAPES = [(4, 3), (4, 3, 5), (2, 3, 4, 5), (2, 3, 2, 3, 2)]


def _tensors(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 2 + 3
    dy = torch.randn(shape, generator=generator, dtype=torch.float64)
    w, b = torch.randn(2, shape[1], generator=generator, dtype=torch.float64)
    return x, dy, w, b


def _autograd(x, dy, w, b, eps, mean=None, var=None):
    x, w, b = (tensor.clone().requires_grad_() for tensor in (x, w, b))
    y = torch.nn.functional.batch_norm(x, mean, var, w, b, training=mean is None, eps=eps)
    return y, *torch.autograd.grad(y, (x, w, b), dy)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward_equal_autograd(shape):
    x, dy, w, b = _tensors(shape)
    y, dx, dw, db = _autograd(x, dy, w, b, 1e-5)
    forward = kernel_reference.forward(x, w, b, eps=1e-5)
    backward = kernel_reference.backward(dy, x, w, eps=1e-5)
    for got, expected in (
        (forward.output, y),
        (backward.grad_input, dx),
        (backward.grad_weight, dw),
        (backward.grad_bias, db),
    ):
        np.testing.assert_allclose(got, expected.detach(), rtol=0, atol=BOUND)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fixed_statistics_equal_autograd(shape):
    x, dy, w, b = _tensors(shape)
    mean, var = torch.randn(shape[1], dtype=torch.float64), torch.rand(shape[1], dtype=torch.float64) + 0.5
    y, dx, dw, _ = _autograd(x, dy, w, b, 1e-3, mean, var)
    forward = kernel_reference.forward(x, w, b, running_mean=mean, running_var=var, training=False, eps=1e-3)
    backward = kernel_reference.backward(dy, x, w, eps=1e-3, training=False, mean=mean, var=var)
    for got, expected in ((forward.output, y), (backward.grad_input, dx), (backward.grad_weight, dw)):
        np.testing.assert_allclose(got, expected.detach(), rtol=0, atol=BOUND)


def test_running_statistics_equal_torch():
    x, _, _, _ = _tensors((4, 3, 5, 5))
    module = torch.nn.BatchNorm2d(3, momentum=0.3).double()
    module(x)
    forward = kernel_reference.forward(x, running_mean=np.zeros(3), running_var=np.ones(3), momentum=0.3)
    np.testing.assert_allclose(forward.running_mean, module.running_mean, atol=BOUND)
    np.testing.assert_allclose(forward.running_var, module.running_var, atol=BOUND)


SPLITS = {"even": (3, 3), "uneven": (1, 5, 2), "empty": (0, 4, 2), "one each": (1, 1)}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("stats_mode", ["exact", "default", "N"])
def test_group_gradients_are_the_derivative_of_the_group_forward(split, stats_mode):
    """Autograd through the formula that reference.py states for the mode, empty processes included."""
    shapes = (
        [(n, 2, 3 + rank) for rank, n in enumerate(split)] if stats_mode != "default" else [(n, 2, 3) for n in split]
    )
    xs = [torch.randn(shape, dtype=torch.float64).add_(1).requires_grad_() for shape in shapes]
    dys = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    w = torch.tensor([0.5, -2.0], dtype=torch.float64)
    counts = [x.shape[0] * x.shape[2] for x in xs]
    if stats_mode == "exact":
        lambdas = [1 / sum(counts)] * len(xs)
    elif stats_mode == "default":
        lambdas = [1 / (len(xs) * max(n, 1)) for n in counts]
    else:
        lambdas = [1 / (x.shape[2] * sum(split)) for x in xs]
    mean = sum(lam * x.sum((0, 2)) for lam, x in zip(lambdas, xs))
    var = sum(lam * ((x - mean[:, None]) ** 2).sum((0, 2)) for lam, x in zip(lambdas, xs))
    invstd = (var + 1e-5) ** -0.5
    ys = [(x - mean[:, None]) * (invstd * w)[:, None] for x in xs]
    expected = torch.autograd.grad(sum((y * dy).sum() for y, dy in zip(ys, dys)), xs)

    arrays = [x.detach().numpy() for x in xs]
    forward = kernel_reference.group_forward(arrays, w, eps=1e-5, stats_mode=stats_mode)
    backward = kernel_reference.group_backward([dy.numpy() for dy in dys], arrays, w, eps=1e-5, stats_mode=stats_mode)
    for rank in range(len(xs)):
        np.testing.assert_allclose(forward[rank].output, ys[rank].detach(), rtol=0, atol=BOUND)
        np.testing.assert_allclose(backward[rank].grad_input, expected[rank], rtol=0, atol=BOUND)


def test_exact_group_equals_the_joint_batch():
    x, dy, w, b = _tensors((7, 3, 4))
    parts, grads = np.split(x.numpy(), [2, 2, 6]), np.split(dy.numpy(), [2, 2, 6])
    joint = kernel_reference.forward(x, w, b, running_mean=np.zeros(3), running_var=np.ones(3))
    group = kernel_reference.group_forward(parts, w, b, running_mean=np.zeros(3), running_var=np.ones(3))
    np.testing.assert_allclose(np.concatenate([part.output for part in group]), joint.output, atol=BOUND)
    for part in group:
        np.testing.assert_allclose(part.running_var, joint.running_var, atol=BOUND)
    grad = kernel_reference.backward(dy, x, w)
    parts_grad = kernel_reference.group_backward(grads, parts, w)
    np.testing.assert_allclose(np.concatenate([part.grad_input for part in parts_grad]), grad.grad_input, atol=BOUND)
    np.testing.assert_allclose(sum(part.grad_weight for part in parts_grad), grad.grad_weight, atol=BOUND)


def test_all_processes_empty_leaves_the_statistics():
    empty = np.zeros((0, 2, 3))
    for result in kernel_reference.group_forward([empty, empty], running_mean=[1.0, 2.0], running_var=[3.0, 4.0]):
        assert result.running_mean.tolist() == [1.0, 2.0]
        assert result.running_var.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("stats_mode", ["exact", "default", "N"])
def test_no_channels_at_all(stats_mode):
    x = np.zeros((2, 0, 3))
    (forward,) = kernel_reference.group_forward([x], stats_mode=stats_mode)
    (backward,) = kernel_reference.group_backward([x], [x], stats_mode=stats_mode)
    assert forward.output.shape == backward.grad_input.shape == x.shape


def test_errors():
    with pytest.raises(UsageError, match="rank 1"):
        kernel_reference.forward(np.zeros(3))
    with pytest.raises(UsageError, match="weight and input"):
        kernel_reference.forward(np.zeros((2, 3)), np.zeros(2))
    with pytest.raises(UsageError, match="running_mean and running_var"):
        kernel_reference.forward(np.zeros((2, 3)), training=False)
    with pytest.raises(UsageError, match="stats_mode"):
        kernel_reference.group_forward([np.zeros((2, 3))], stats_mode="none")


def test_constant_channel_without_eps_gives_the_bias():
    result = kernel_reference.forward(np.full((4, 1), 7.0), [2.0], [3.0], eps=0.0)
    assert result.invstd.tolist() == [0.0]
    assert result.output.ravel().tolist() == [3.0] * 4


def test_statistics_are_given_whole_or_computed():
    x, dy, w, _ = _tensors((4, 3, 5))
    own = kernel_reference.group_backward([dy], [x], w)[0]
    for given in ({"means": np.zeros(3)}, {"variances": np.ones(3)}):
        assert np.array_equal(kernel_reference.group_backward([dy], [x], w, **given)[0].grad_input, own.grad_input)
