"""The closed forms of tests.support.kernel_reference over a group of processes, in the kernels' terms.

The ranks of a group are list entries. Shapes are (N, C, *); everything is float64.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from bnexport import tolerances
from tests.support import kernel_reference

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}


def statistics_dtype(dtype: str) -> type:
    return DTYPES[tolerances.STATISTICS_TYPE[dtype]]


def wide(array: np.ndarray | None) -> np.ndarray | None:
    return None if array is None else np.asarray(array).astype(np.float64)


def per_channel(x: np.ndarray) -> np.ndarray:
    """(N, C, *) as (C, N * S)."""
    return np.moveaxis(x, 1, 0).reshape(x.shape[1], x.size // x.shape[1] if x.shape[1] else 0)


def spread_out(values: np.ndarray, x: np.ndarray) -> np.ndarray:
    """(C,) against the axes of x."""
    return values.reshape((1, -1) + (1,) * (x.ndim - 2))


@dataclasses.dataclass
class Forward:
    y: np.ndarray
    mean: np.ndarray
    invstd: np.ndarray
    running_mean: np.ndarray | None = None
    running_var: np.ndarray | None = None


def forward(
    xs,
    weight=None,
    bias=None,
    running_mean=None,
    running_var=None,
    *,
    momentum=0.1,
    eps=1e-5,
    training=1,
    stats_mode="exact",
):
    """The forward of every rank, as a list."""
    results = kernel_reference.group_forward(
        [wide(x) for x in xs],
        wide(weight),
        wide(bias),
        running_mean=wide(running_mean),
        running_var=wide(running_var),
        momentum=momentum,
        eps=eps,
        training=bool(training),
        stats_mode=stats_mode,
    )
    return [Forward(r.output, r.mean, r.invstd, r.running_mean, r.running_var) for r in results]


@dataclasses.dataclass
class Backward:
    dx: np.ndarray
    dweight: np.ndarray
    dbias: np.ndarray
    absolute_dweight: np.ndarray
    absolute_dbias: np.ndarray


def backward(dys, xs, weight, mean, invstd, *, training=1, stats_mode="exact", grad_reduction="local"):
    """The gradient of every rank. `mean`, `invstd`: the group's, (C,)."""
    dys, xs = [wide(dy) for dy in dys], [wide(x) for x in xs]
    mean, invstd = wide(mean), wide(invstd)
    with np.errstate(divide="ignore"):
        variance = 1 / invstd**2
    gradients = kernel_reference.group_backward(
        dys,
        xs,
        wide(weight),
        eps=0.0,
        training=bool(training),
        stats_mode=stats_mode,
        grad_reduction=grad_reduction,
        means=mean,
        variances=variance,
    )
    hats = [(x - spread_out(mean, x)) * spread_out(invstd, x) for x in xs]
    A_abs = [np.abs(per_channel(dy)).sum(axis=1) for dy in dys]
    B_abs = [np.abs(per_channel(dy * hat)).sum(axis=1) for dy, hat in zip(dys, hats, strict=True)]
    results = []
    for r, gradient in enumerate(gradients):
        dw_abs, db_abs = (B_abs[r], A_abs[r]) if grad_reduction == "local" else (sum(B_abs), sum(A_abs))
        results.append(Backward(gradient.grad_input, gradient.grad_weight, gradient.grad_bias, dw_abs, db_abs))
    return results


def condition_of(x: np.ndarray, mean: np.ndarray, invstd: np.ndarray) -> float:
    """1 + max |mean| * invstd, the factor by which rounding the mean to S weighs."""
    return 1.0 + float(np.max(np.abs(mean) * invstd, initial=0.0))


def assert_within(got: np.ndarray, expected: np.ndarray, bound: tolerances.Tolerance, what: str) -> None:
    overflow = 65504.0 * (1 - 2.0**-10) if np.asarray(got).dtype == np.float16 else np.inf
    got, expected = wide(got), wide(expected)
    assert got.shape == expected.shape, f"{what}: got shape {got.shape}, expected {expected.shape}"
    with np.errstate(invalid="ignore"):
        excess = np.abs(got - expected) - bound.rtol * np.abs(expected) - bound.atol
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    same |= np.isinf(got) & (np.sign(got) == np.sign(expected)) & (np.abs(expected) > overflow)
    bad = ~same & ~(excess <= 0)
    if bad.any():
        at = np.unravel_index(np.argmax(np.where(bad, np.nan_to_num(excess, nan=np.inf), -np.inf)), got.shape)
        raise AssertionError(
            f"{what} at {at}: got {got[at]!r}, expected {expected[at]!r}, bound {bound}, {bad.sum()} of {bad.size} off"
        )
