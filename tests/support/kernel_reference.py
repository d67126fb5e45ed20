"""Closed forms of (sync) batch norm in NumPy float64, and comparisons with them in the bounds of bnexport.tolerances.

Symbols. x is seen as (N, C, S) with S the product of the spatial sizes; sums run over all axes but
the channel's. Process r of a group of G holds n_r = N_r * S_r values a channel.

    mean   = sum_r lambda_r sum x                  lambda_r the weight of one value of process r
    var    = sum_r lambda_r sum (x - mean)^2
    invstd = 1 / sqrt(var + eps)                   0 where var and eps are both 0, as torch does
    x_hat  = (x - mean) * invstd
    y      = weight * x_hat + bias

    stats_mode   lambda_r
    exact        1 / sum_q n_q                     the true statistics of the joint batch
    default      1 / (G * n_r)                     MMCV: every process counts the same
    N            1 / (S_r * sum_q N_q)             MMCV: processes weighted by their batch size

Gradient. With dy the gradient by y and the group sums A = sum dy, B = sum dy * x_hat,

    d mean / dx = lambda,   d var / dx = 2 lambda (x - mean)      (*)
    dx = weight * invstd * (dy - lambda * (A + x_hat * B))
    dweight = sum dy * x_hat,   dbias = sum dy

which is the chain rule through y, mean and var (Ioffe and Szegedy 2015, section 3, with the sums
over the group). (*) uses sum lambda (x - mean) = 0, that is k = sum lambda = 1. In `default` mode
MMCV divides by G although empty processes add nothing; then k = (non-empty) / G,
d var / dx = 2 lambda ((x - mean) - (1 - k) mean), and A becomes A - (1 - k) * invstd * mean * B.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from bnexport import tolerances
from tests.support.checks import assert_within

Array = NDArray[np.float64]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}


def statistics_dtype(dtype: str) -> type:
    return DTYPES[tolerances.STATISTICS_TYPE[dtype]]


def wide(value: ArrayLike) -> Array:
    return np.asarray(value.double() if hasattr(value, "double") else value).astype(np.float64)


def along(vector: ArrayLike, x: Array) -> Array:
    """(C,) against the axes of x."""
    return wide(vector).reshape(1, -1, *(1,) * (x.ndim - 2))


@dataclasses.dataclass(frozen=True)
class Forward:
    """Result of a forward: output (N, C, *), the rest (C,). var is biased."""

    output: Array
    mean: Array
    var: Array
    invstd: Array
    running_mean: Array | None
    running_var: Array | None


@dataclasses.dataclass(frozen=True)
class Backward:
    """Result of a backward: grad_input (N, C, *), the rest (C,); the sums of the absolute terms of the two sums last."""

    grad_input: Array
    grad_weight: Array
    grad_bias: Array
    absolute_weight: Array
    absolute_bias: Array


def forward(input: ArrayLike, *vectors: Any, **options: Any) -> Forward:
    """Compute batch norm of one process: `group_forward` of one."""
    return group_forward([input], *vectors, **options)[0]


def group_forward(
    inputs: Sequence[ArrayLike], weight: Any = None, bias: Any = None, running_mean: Any = None, running_var: Any = None,
    *, training: bool = True, momentum: float = 0.1, eps: float = 1e-5, stats_mode: str = "exact",
) -> list[Forward]:  # fmt: skip
    """Compute sync batch norm of a group: one input (N_r, C, *) and one result for each process; all others (C,).

    running_var takes var * n / (n - 1), n the total count in `exact`; in MMCV's modes
    n = n_r * G, so that processes with uneven batches get different running_var. n <= 1 means
    factor 1. When every process is empty the running statistics stay.
    """
    xs, C = [wide(x) for x in inputs], np.shape(inputs[0])[1]
    w, b = (np.full(C, default) if it is None else wide(it) for it, default in ((weight, 1.0), (bias, 0.0)))
    old = [None if it is None else wide(it) for it in (running_mean, running_var)]
    if training:
        lambdas, _ = _lambdas(xs, stats_mode)
        mean = sum((lam * _sum(x) for lam, x in zip(lambdas, xs)), np.zeros(C))
        var = sum((lam * _sum((x - along(mean, x)) ** 2) for lam, x in zip(lambdas, xs)), np.zeros(C))
    else:
        mean, var = old
    with np.errstate(divide="ignore", invalid="ignore"):
        invstd = np.where(var + eps == 0, 0.0, 1 / np.sqrt(var + eps))
    total, results = sum(map(_count, xs)), []
    for x in xs:
        output = (x - along(mean, x)) * along(w * invstd, x) + along(b, x)
        n = total if stats_mode == "exact" else _count(x) * len(xs)
        new, m = (mean, var * (n / (n - 1) if n > 1 else 1.0)), momentum if total and training else 0.0
        running = [None if it is None else (1 - m) * it + (m * value if m else 0) for it, value in zip(old, new)]
        results.append(Forward(output, mean, var, invstd, *running))
    return results


def backward(grad_output: ArrayLike, input: ArrayLike, weight: Any, mean: Any, invstd: Any, **options: Any) -> Backward:
    """Compute the derivative of batch norm of one process: `group_backward` of one."""
    return group_backward([grad_output], [input], weight, mean, invstd, **options)[0]


def group_backward(
    grad_outputs: Sequence[ArrayLike], inputs: Sequence[ArrayLike], weight: Any, mean: Any, invstd: Any,
    *, training: bool = True, stats_mode: str = "exact", grad_reduction: str = "local",
) -> list[Backward]:  # fmt: skip
    """Compute the derivative of `group_forward`: one grad_output, input and result for each process.

    grad_weight and grad_bias are each process's sums (`local`), or their mean or sum over the group. With `training=False` the
    statistics are constants: grad_input = weight * invstd * grad_output.
    """
    dys, xs, mean, invstd = [wide(dy) for dy in grad_outputs], [wide(x) for x in inputs], wide(mean), wide(invstd)
    w = np.ones_like(invstd) if weight is None else wide(weight)
    terms = [dy * (x - along(mean, x)) * along(invstd, x) for dy, x in zip(dys, xs)]
    each = [tuple(map(_sum, (term, dy, np.abs(term), np.abs(dy)))) for term, dy in zip(terms, dys)]
    B, A, *absolute = (sum(parts, np.zeros(len(mean))) for parts in zip(*each))
    lambdas, k = _lambdas(xs, stats_mode) if training else ([0.0] * len(xs), 1.0)
    A_prime, G, results = A - (1 - k) * invstd * mean * B, len(xs), []
    for dy, x, lam, own in zip(dys, xs, lambdas, each):
        dx = along(w * invstd, dy) * dy
        if lam:  # else the input is not read
            x_hat = (x - along(mean, x)) * along(invstd, x)
            dx = dx - along(w * invstd, dy) * lam * (along(A_prime, dy) + x_hat * along(B, dy))
        reduced = {"local": own, "mean": (B / G, A / G, *absolute), "sum": (B, A, *absolute)}[grad_reduction]
        results.append(Backward(dx, *reduced))
    return results


def _lambdas(xs: Sequence[Array], stats_mode: str) -> tuple[list[float], float]:
    """Compute lambda of each process, and k = the sum of lambda over all values."""
    counts = [_count(x) for x in xs]
    G, total = len(xs), sum(counts)
    if stats_mode == "exact":
        return [1.0 / total if total else 0.0] * G, 1.0
    if stats_mode == "default":
        return [1.0 / (G * n) if n else 0.0 for n in counts], sum(n > 0 for n in counts) / G
    batch = sum(x.shape[0] for x, n in zip(xs, counts) if n)
    return [x.shape[0] / (n * batch) if n else 0.0 for x, n in zip(xs, counts)], 1.0


def _count(x: Array) -> int:
    return x.shape[0] * int(np.prod(x.shape[2:], dtype=np.int64))


def _sum(x: Array) -> Array:
    return x.sum(axis=(0, *range(2, x.ndim)))


def _largest(*arrays: Any) -> float:
    return max((float(np.max(np.abs(wide(it)), initial=0)) for it in arrays if it is not None), default=0.0)


def check_forward(
    dtype: str, want: Forward, weight: Any = None, old: Sequence[Any] = (), *, condition: float = 0.0, **got: Any
) -> None:
    """Compare results by name. old: running statistics before. condition: that of `want` by default."""
    condition = condition or 1 + _largest(want.mean * want.invstd)
    std = float(np.sqrt(want.var).max(initial=0))
    bounds = {
        "output": tolerances.forward(dtype, condition=condition, weight=1.0 if weight is None else _largest(weight)),
        "running_mean": tolerances.statistic(dtype, scale=max(std, _largest(want.mean, *old[:1]))),
        "running_var": tolerances.statistic(dtype, scale=max(std, _largest(want.var, *old[1:]))),
        "mean": tolerances.statistic(dtype, scale=std),
        # Means of blocks are doubles: for double data their difference carries the condition.
        "invstd": tolerances.Tolerance(
            tolerances.statistic(dtype).rtol * (condition if dtype == "float64" else 1), 0.0
        ),
    }
    for name, value in got.items():
        assert_within(value, getattr(want, name), bounds[name], name, finite=False)


def check_backward(
    dtype: str,
    want: Backward,
    weight: Any,
    mean: Any,
    invstd: Any,
    grad_output: Any,
    *,
    condition: float = 0.0,
    **got: Any,
) -> None:
    """Compare results by name. condition: that of the statistics by default."""
    condition = condition or 1 + _largest(wide(mean) * wide(invstd))
    scale = _largest(wide(invstd) * (1 if weight is None else wide(weight))) * _largest(grad_output)
    bounds = {
        "grad_input": tolerances.backward_input(dtype, condition=condition, scale=scale),
        "grad_weight": tolerances.backward_sum(dtype, condition=condition, absolute_sum=_largest(want.absolute_weight)),
        "grad_bias": tolerances.backward_sum(dtype, condition=condition, absolute_sum=_largest(want.absolute_bias)),
    }
    for name, value in got.items():
        assert_within(value, getattr(want, name), bounds[name], name, finite=False)
