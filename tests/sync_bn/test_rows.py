"""What the members of a group make of each other's rows, both backends against the closed forms, in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bnexport import schema
from bnexport.sync_bn import torch_operations
from bnexport.sync_bn.kernels import kernels_for
from tests.support import kernel_reference

BACKENDS: dict[str, Callable[[torch.Tensor], Any]] = {"kernels": kernels_for, "torch": lambda x: torch_operations}
# Uneven batches and sizes, and a process without data. MMCV's "default" has another derivative then (reference.py).
SPLITS = {
    "uneven": ((3, 2, 4), (1, 2, 5), (2, 2, 4)),
    "one is empty": ((0, 2, 4), (3, 2, 4)),
    "all are empty": ((0, 2, 4),) * 2,
}
W, B = torch.tensor([0.5, -2.0], dtype=torch.float64), torch.tensor([1.0, 0.25], dtype=torch.float64)
OLD_MEAN, OLD_VAR = torch.tensor([0.5, -1.0], dtype=torch.float64), torch.tensor([2.0, 0.75], dtype=torch.float64)


def _data(split: tuple[tuple[int, ...], ...], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).mul_(2).add_(1) for shape in split]


def _same(got: torch.Tensor | None, want: np.ndarray | None) -> None:
    assert got is not None and want is not None
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Callable[[torch.Tensor], Any]:
    return request.param


@pytest.mark.parametrize("stats_mode", schema.STATS_MODES)
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_forward(backend: Callable[[torch.Tensor], Any], split: tuple[tuple[int, ...], ...], stats_mode: str) -> None:
    xs = _data(split, 0)
    rows = torch.stack([backend(x).forward_row(x, stats_mode) for x in xs])
    options = {"momentum": 0.3, "eps": 1e-3}
    expected = kernel_reference.group_forward(xs, W, B, OLD_MEAN, OLD_VAR, stats_mode=stats_mode, **options)
    for x, want in zip(xs, expected, strict=True):
        y, mean_out, var_out, mean, invstd = backend(x).forward(
            x, (OLD_MEAN, OLD_VAR, W, B), True, 0.3, 1e-3, stats_mode, rows
        )
        for got, one in ((y, want.output), (mean_out, want.running_mean), (var_out, want.running_var)):
            _same(got, one)
        _same(mean, want.mean)
        _same(invstd, want.invstd)


@pytest.mark.parametrize(("stats_mode", "reduction"), itertools.product(schema.STATS_MODES, schema.GRAD_REDUCTIONS))
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_backward(
    backend: Callable[[torch.Tensor], Any], split: tuple[tuple[int, ...], ...], stats_mode: str, reduction: str
) -> None:
    xs, dys = _data(split, 0), _data(split, 1)
    statistics = kernel_reference.group_forward(xs, eps=1e-3, stats_mode=stats_mode)[0]
    mean, invstd = torch.from_numpy(statistics.mean), torch.from_numpy(statistics.invstd)
    rows = torch.stack(
        [backend(x).backward_row(dy, x, mean, invstd, stats_mode) for dy, x in zip(dys, xs, strict=True)]
    )
    expected = kernel_reference.group_backward(
        dys, xs, W, mean, invstd, stats_mode=stats_mode, grad_reduction=reduction
    )
    for dy, x, row, want in zip(dys, xs, rows, expected, strict=True):
        arguments = (dy, x, W, mean, invstd, True, [True] * 3, stats_mode, reduction)
        grad_input, grad_weight, grad_bias = backend(x).backward(*arguments, row, rows)
        _same(grad_input, want.grad_input)
        _same(grad_weight, want.grad_weight)
        _same(grad_bias, want.grad_bias)


def test_backward_of_fixed_statistics(backend: Callable[[torch.Tensor], Any]) -> None:
    """Without a gradient of the input no rows come from the others."""
    (x, dy) = _data(((3, 2, 4), (3, 2, 4)), 0)
    mean, invstd = OLD_MEAN, torch.tensor([0.5, 1.5], dtype=torch.float64)
    row = backend(x).backward_row(dy, x, mean, invstd, "exact")
    want = kernel_reference.backward(dy, x, W, mean, invstd, training=False)
    arguments = (dy, x, W, mean, invstd, False)
    got = backend(x).backward(*arguments, [True] * 3, "exact", "local", row, None)
    for one, other in zip(got, (want.grad_input, want.grad_weight, want.grad_bias), strict=True):
        _same(one, other)
    grad_input, none, also_none = backend(x).backward(*arguments, [True, False, False], "exact", "mean", None, None)
    assert none is None and also_none is None
    _same(grad_input, want.grad_input)
