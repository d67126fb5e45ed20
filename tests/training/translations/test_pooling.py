"""Max, average and adaptive pooling: values, torch's indices and gradients."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from tests.training.translations.calls import BATCH, Call, check_calls
from tests.training.translations.cases import case, check

ATEN = torch.ops.aten
SIZES = {2: (9, 8), 3: (5, 6, 7)}
SWEEPS = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])


def _overload(name, rank):
    return getattr(ATEN, name.format(rank)).default


def max_pool(x, kernel, stride, padding, dilation, ceil_mode):
    """The forward, and the backward of its indices."""
    rank = x.dim() - 2
    window = (kernel, stride, padding, dilation, ceil_mode)
    name = f"max_pool{rank}d k{kernel} s{stride} p{padding} d{dilation} ceil={ceil_mode}"
    forward = _overload("max_pool{}d_with_indices", rank)
    y, indices = forward(x, *window)
    backward = _overload("max_pool{}d_with_indices_backward", rank)
    return [
        Call(name, forward, (x, *window)),
        Call(f"{name}, gradient", backward, (torch.randn_like(y), x, *window, indices), (0, 1, len(window) + 2)),
    ]


@SWEEPS
def test_max_pool(every):
    calls = []
    for rank, kernel, stride, padding, dilation, ceil_mode in itertools.product(
        (2, 3), (1, 2, 3, 4), (1, 2, 3), (0, 1), (1, 2, 3), (False, True)
    ):
        if 2 * padding > kernel or dilation * (kernel - 1) >= min(SIZES[rank]) + 2 * padding:
            continue
        x = torch.randn(BATCH, 3, *SIZES[rank])
        calls += max_pool(x, *([number] * rank for number in (kernel, stride, padding, dilation)), ceil_mode)
    check_calls(calls[::every])


def test_max_pool_of_unequal_windows():
    x = torch.randn(BATCH, 3, 11, 10)
    check_calls(
        max_pool(x, [3, 2], [1, 2], [1, 0], [1, 3], False)
        + max_pool(x, [2, 3], [3, 2], [0, 1], [3, 1], True)
        + max_pool(x, [2, 4], [2, 3], [1, 2], [4, 2], True)
        + max_pool(x, [1, 3], [], [0, 1], [1, 1], True)
    )


def test_max_pool_takes_the_first_of_equal_maxima():
    x = torch.randint(0, 3, (BATCH, 4, 9, 8)).float()
    check_calls(max_pool(x, [3, 3], [2, 2], [1, 1], [1, 1], False) + max_pool(x, [2, 2], [3, 3], [1, 1], [3, 3], True))


def test_max_pool_by_cpu_kernels():
    x = torch.randn(BATCH, 3, 11, 10)
    check_calls(
        max_pool(x, [3, 3], [2, 2], [1, 1], [1, 1], False)
        + max_pool(x, [2, 3], [3, 2], [0, 1], [3, 1], True)
        + max_pool(x, [1, 3], [], [0, 1], [1, 1], True)
        + max_pool(torch.randn(BATCH, 3, 5, 6, 7), [2] * 3, [2] * 3, [0] * 3, [1] * 3, False),
        with_cpu_kernels=True,
    )


@SWEEPS
def test_avg_pool(every):
    calls = []
    for rank, window, ceil_mode, include, divisor in itertools.product(
        (2, 3),
        ((2, 2, 0), (3, 2, 1), (3, 1, 1), (2, 3, 0), (4, 3, 2), (3, 4, 1)),
        (False, True),
        (False, True),
        (None, 5),
    ):
        x = torch.randn(BATCH, 3, *SIZES[rank])
        arguments = (*([number] * rank for number in window), ceil_mode, include, divisor)
        name = f"avg_pool{rank}d {window} ceil={ceil_mode} include={include} divisor={divisor}"
        forward, backward = _overload("avg_pool{}d", rank), _overload("avg_pool{}d_backward", rank)
        grad = torch.randn_like(forward(x, *arguments))
        calls += [
            Call(name, forward, (x, *arguments)),
            Call(f"{name}, gradient", backward, (grad, x, *arguments), (0, 1)),
        ]
    check_calls(calls[::every])


def test_avg_pool_of_unequal_windows():
    x = torch.randn(BATCH, 3, 11, 10)
    arguments = ([3, 2], [2, 3], [1, 0], True, True, None)
    grad = torch.randn_like(ATEN.avg_pool2d.default(x, *arguments))
    check_calls(
        [
            Call("forward", ATEN.avg_pool2d.default, (x, *arguments)),
            Call("gradient", ATEN.avg_pool2d_backward.default, (grad, x, *arguments), (0, 1)),
            Call("stride left out", ATEN.avg_pool2d.default, (x, [3, 2])),
        ]
    )


def test_adaptive_pool():
    calls = []
    for rank, size in itertools.product((2, 3), (1, 3, 4, 12)):
        x = torch.randn(BATCH, 2, *SIZES[rank])
        out = [size + 1] + [size] * (rank - 1)
        name = f"adaptive {rank}d {out}"
        average, largest = _overload("_adaptive_avg_pool{}d", rank), _overload("adaptive_max_pool{}d", rank)
        y, indices = largest(x, out)
        grad = torch.randn_like(y)
        calls += [
            Call(f"{name}, average", average, (x, out)),
            Call(f"{name}, average, gradient", _overload("_adaptive_avg_pool{}d_backward", rank), (grad, x), (0, 1)),
            Call(f"{name}, max", largest, (x, out)),
            Call(
                f"{name}, max, gradient",
                _overload("adaptive_max_pool{}d_backward", rank),
                (grad, x, indices),
                (0, 1, 2),
            ),
        ]
    check_calls(calls)


def test_traced():
    """Through torch's exporter, forward and backward, in the way that models call it."""
    image, signal = ("N", 3, 9, 8), ("N", 3, 9)
    check(
        [
            case("max 1d", lambda x: F.max_pool1d(x, 3, 2, 1), signal),
            case("max 2d", lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), image),
            case("max 2d, indices", lambda x: F.max_pool2d(x, 2, return_indices=True), image),
            case("max 3d", lambda x: F.max_pool3d(x, 2), ("N", 2, 5, 6, 7)),
            case("average 1d", lambda x: F.avg_pool1d(x, 3, 2, 1), signal),
            case("average 2d", lambda x: F.avg_pool2d(x, 2), image),
            case("average 3d", lambda x: F.avg_pool3d(x, 2), ("N", 2, 5, 6, 7)),
            case("adaptive average 1d", lambda x: F.adaptive_avg_pool1d(x, 4), signal),
            case("adaptive average 2d", lambda x: F.adaptive_avg_pool2d(x, (3, 2)), image),
            case("global", lambda x: F.adaptive_avg_pool2d(x, 1), image),
            case("adaptive max 1d", lambda x: F.adaptive_max_pool1d(x, 4), signal),
            case("adaptive max 2d", lambda x: F.adaptive_max_pool2d(x, (3, 2)), image),
        ]
    )
