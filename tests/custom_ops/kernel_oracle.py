"""Naive float64 statement of both operators over a group of processes; slow, and plainly right.

The ranks of a group are list entries. Shapes are (N, C, *); everything is float64.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from bnexport import tolerances

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


def inverse_std(variance: np.ndarray, eps: float) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((variance == 0) & (eps == 0), 0.0, 1 / np.sqrt(variance + eps))


@dataclasses.dataclass
class Forward:
    y: np.ndarray
    mean: np.ndarray
    invstd: np.ndarray
    running_mean: np.ndarray | None = None
    running_var: np.ndarray | None = None


def group_statistics(xs: list[np.ndarray], stats_mode: str) -> tuple[np.ndarray, np.ndarray, bool]:
    """mean, variance (biased), and whether every rank is empty."""
    C = xs[0].shape[1]
    columns = [per_channel(x) for x in xs]
    filled = [i for i, c in enumerate(columns) if c.shape[1] > 0]
    if not filled:
        return np.zeros(C), np.zeros(C), True
    if stats_mode == "exact":
        joint = np.concatenate(columns, axis=1)
        mean = joint.mean(axis=1)
        return mean, ((joint - mean[:, None]) ** 2).mean(axis=1), False
    weights = [1.0 if stats_mode == "default" else float(xs[i].shape[0]) for i in filled]
    total = float(len(xs)) if stats_mode == "default" else sum(weights)
    mean = sum(w * columns[i].mean(axis=1) for w, i in zip(weights, filled, strict=True)) / total
    variance = (
        sum(w * ((columns[i] - mean[:, None]) ** 2).mean(axis=1) for w, i in zip(weights, filled, strict=True)) / total
    )
    return mean, variance, False


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
    xs = [wide(x) for x in xs]
    C = xs[0].shape[1]
    w = np.ones(C) if weight is None else wide(weight)
    b = np.zeros(C) if bias is None else wide(bias)
    running_mean, running_var = wide(running_mean), wide(running_var)
    results = []
    for x in xs:
        new_mean, new_var = running_mean, running_var
        if training:
            mean, variance, empty = group_statistics(xs, stats_mode)
            local = x.shape[0] * int(np.prod(x.shape[2:], dtype=np.int64))
            count = sum(per_channel(other).shape[1] for other in xs) if stats_mode == "exact" else local * len(xs)
            unbiased = variance * (count / (count - 1) if count > 1 else 1.0)
            if not empty and running_mean is not None:
                new_mean = (1 - momentum) * running_mean + momentum * mean
            if not empty and running_var is not None:
                new_var = (1 - momentum) * running_var + momentum * unbiased
        else:
            mean, variance = running_mean, running_var
        invstd = inverse_std(variance, eps)
        y = spread_out(w, x) * (x - spread_out(mean, x)) * spread_out(invstd, x) + spread_out(b, x)
        results.append(Forward(y, mean, invstd, new_mean, new_var))
    return results


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
    C, G = xs[0].shape[1], len(xs)
    w = np.ones(C) if weight is None else wide(weight)
    A = [per_channel(dy).sum(axis=1) for dy in dys]
    hats = [(x - spread_out(mean, x)) * spread_out(invstd, x) for x in xs]
    B = [per_channel(dy * hat).sum(axis=1) for dy, hat in zip(dys, hats, strict=True)]
    A_abs = [np.abs(per_channel(dy)).sum(axis=1) for dy in dys]
    B_abs = [np.abs(per_channel(dy * hat)).sum(axis=1) for dy, hat in zip(dys, hats, strict=True)]
    A_all, B_all = sum(A), sum(B)
    results = []
    for r in range(G):
        x, dy = xs[r], dys[r]
        factor = 1 / G if grad_reduction == "mean" else 1.0
        dw, db = (B[r], A[r]) if grad_reduction == "local" else (B_all * factor, A_all * factor)
        dw_abs, db_abs = (B_abs[r], A_abs[r]) if grad_reduction == "local" else (sum(B_abs), sum(A_abs))
        dx = spread_out(w * invstd, x) * dy
        if training and x.size:
            N, S = x.shape[0], int(np.prod(x.shape[2:], dtype=np.int64))
            A_used = A_all
            if stats_mode == "exact":
                share = 1 / sum(per_channel(other).shape[1] for other in xs)
            elif stats_mode == "default":
                share = 1 / (G * N * S)
                non_empty = sum(other.size > 0 for other in xs) / G
                A_used = A_all - (1 - non_empty) * invstd * mean * B_all
            else:
                share = 1 / (S * sum(other.shape[0] for other in xs if other.size > 0))
            dx = spread_out(w * invstd, x) * (dy - share * (spread_out(A_used, x) + hats[r] * spread_out(B_all, x)))
        results.append(Backward(dx, dw, db, dw_abs, db_abs))
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
