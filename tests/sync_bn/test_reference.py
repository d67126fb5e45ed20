"""The closed forms against torch.autograd in float64: what everything else is tested against."""

import numpy as np
import pytest
import torch

from tests.support import kernel_reference

BOUND = 1e-11

SHAPES = [(4, 3), (4, 3, 5), (2, 3, 4, 5), (2, 3, 2, 3, 2)]


def _tensors(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 2 + 3
    dy = torch.randn(shape, generator=generator, dtype=torch.float64)
    w, b = torch.randn(2, shape[1], generator=generator, dtype=torch.float64)
    return x, dy, w, b


def _close(got, expected):
    np.testing.assert_allclose(got, expected.detach() if torch.is_tensor(expected) else expected, rtol=0, atol=BOUND)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_backward_equal_autograd(shape, training):
    x, dy, w, b = _tensors(shape)
    mean, var = torch.randn(shape[1], dtype=torch.float64), torch.rand(shape[1], dtype=torch.float64) + 0.5
    leaves = [tensor.clone().requires_grad_() for tensor in (x, w, b)]
    running = (None, None) if training else (mean, var)
    y = torch.nn.functional.batch_norm(leaves[0], *running, *leaves[1:], training=training, eps=1e-3)
    forward = kernel_reference.forward(x, w, b, mean, var, training=training, eps=1e-3)
    backward = kernel_reference.backward(dy, x, w, forward.mean, forward.invstd, training=training)
    _close(forward.output, y)
    gradients = torch.autograd.grad(y, leaves, dy)
    for got, expected in zip((backward.grad_input, backward.grad_weight, backward.grad_bias), gradients):
        _close(got, expected)


def test_running_statistics_equal_torch():
    x, _, _, _ = _tensors((4, 3, 5, 5))
    module = torch.nn.BatchNorm2d(3, momentum=0.3).double()
    module(x)
    forward = kernel_reference.forward(x, None, None, np.zeros(3), np.ones(3), momentum=0.3)
    _close(forward.running_mean, module.running_mean)
    _close(forward.running_var, module.running_var)


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

    xs = [x.detach() for x in xs]
    forward = kernel_reference.group_forward(xs, w, stats_mode=stats_mode)
    backward = kernel_reference.group_backward(dys, xs, w, forward[0].mean, forward[0].invstd, stats_mode=stats_mode)
    for rank in range(len(xs)):
        _close(forward[rank].output, ys[rank])
        _close(backward[rank].grad_input, expected[rank])


def test_exact_group_equals_the_joint_batch():
    x, dy, w, b = _tensors((7, 3, 4))
    parts, grads = x.split([2, 0, 4, 1]), dy.split([2, 0, 4, 1])
    joint = kernel_reference.forward(x, w, b, np.zeros(3), np.ones(3))
    grad = kernel_reference.backward(dy, x, w, joint.mean, joint.invstd)
    for part in kernel_reference.group_forward(parts, w, b, np.zeros(3), np.ones(3)):
        _close(part.running_var, joint.running_var)
    for reduction, share in (("sum", 1), ("mean", 4)):
        for part in kernel_reference.group_backward(
            grads, parts, w, joint.mean, joint.invstd, grad_reduction=reduction
        ):
            _close(part.grad_weight, grad.grad_weight / share)
            _close(part.grad_bias, grad.grad_bias / share)
    parts = kernel_reference.group_backward(grads, parts, w, joint.mean, joint.invstd)
    _close(np.sum([part.grad_weight for part in parts], 0), grad.grad_weight)


def test_all_processes_empty_leaves_the_statistics():
    empty = np.zeros((0, 2, 3))
    for result in kernel_reference.group_forward([empty, empty], running_mean=[1.0, 2.0], running_var=[3.0, 4.0]):
        assert result.running_mean.tolist() == [1.0, 2.0]
        assert result.running_var.tolist() == [3.0, 4.0]


def test_constant_channel_without_eps_gives_the_bias():
    result = kernel_reference.forward(np.full((4, 1), 7.0), [2.0], [3.0], eps=0.0)
    assert result.invstd.tolist() == [0.0]
    assert result.output.ravel().tolist() == [3.0] * 4
