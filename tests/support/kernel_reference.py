"""Closed forms of (sync) batch norm in NumPy float64: the reference for every implementation.

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

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bnexport.errors import UsageError

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Forward:
    """Result of a forward: output (N, C, *), the rest (C,), all float64. var is biased."""

    output: Array
    mean: Array
    var: Array
    invstd: Array
    running_mean: Array | None
    running_var: Array | None


@dataclasses.dataclass(frozen=True)
class Backward:
    """Result of a backward: grad_input (N, C, *), grad_weight and grad_bias (C,); None if not asked for."""

    grad_input: Array | None
    grad_weight: Array | None
    grad_bias: Array | None


def inverse_std(var: ArrayLike, eps: float) -> Array:
    """Compute 1 / sqrt(var + eps), and 0 if both are 0: a constant channel then yields its bias, not NaN."""
    total = np.asarray(var, np.float64) + eps
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total == 0, 0.0, 1.0 / np.sqrt(total))


def forward(
    input: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    running_mean: ArrayLike | None = None,
    running_var: ArrayLike | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Forward:
    """Compute batch norm of one process. input (N, C, *), rank >= 2; all others (C,).

    Raises UsageError for a wrong shape, and in inference without running statistics.
    """
    return group_forward(
        [input],
        weight,
        bias,
        running_mean=running_mean,
        running_var=running_var,
        training=training,
        momentum=momentum,
        eps=eps,
    )[0]


def group_forward(
    inputs: Sequence[ArrayLike],
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    running_mean: ArrayLike | None = None,
    running_var: ArrayLike | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    stats_mode: str = "exact",
) -> list[Forward]:
    """Compute sync batch norm of a group: one input (N_r, C, *) and one result for each process.

    running_var takes var * n / (n - 1), n the total count in `exact`; in MMCV's modes
    n = n_r * G, so that processes with uneven batches get different running_var. n <= 1 means
    factor 1. When every process is empty the running statistics stay.
    """
    xs = [_as_input(x) for x in inputs]
    C = xs[0].shape[1]
    w, b = _vector(weight, C, "weight", 1.0), _vector(bias, C, "bias", 0.0)
    old_mean = None if running_mean is None else _vector(running_mean, C, "running_mean", 0.0)
    old_var = None if running_var is None else _vector(running_var, C, "running_var", 1.0)
    if not training:
        if old_mean is None or old_var is None:
            raise UsageError(
                "running_mean and running_var: got None, expected (C,) vectors, which inference normalises with"
            )
        return [_normalise(x, w, b, old_mean, old_var, eps, old_mean, old_var) for x in xs]

    lambdas, _ = _lambdas(xs, stats_mode)
    counts = [_count(x) for x in xs]
    mean = sum((lam * _sum(x) for lam, x in zip(lambdas, xs)), np.zeros(C))
    var = sum((lam * _sum((x - _wide(mean, x)) ** 2) for lam, x in zip(lambdas, xs)), np.zeros(C))
    results = []
    for x, count in zip(xs, counts):
        n = sum(counts) if stats_mode == "exact" else count * len(xs)
        unbiased = var * (n / (n - 1) if n > 1 else 1.0)
        m = momentum if sum(counts) else 0.0
        new_mean = None if old_mean is None else (1 - m) * old_mean + m * mean
        new_var = None if old_var is None else (1 - m) * old_var + m * unbiased
        results.append(_normalise(x, w, b, mean, var, eps, new_mean, new_var))
    return results


def backward(
    grad_output: ArrayLike,
    input: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    training: bool = True,
    mean: ArrayLike | None = None,
    var: ArrayLike | None = None,
) -> Backward:
    """Compute the full derivative of batch norm over inputs of shape [B, C, H, W] (any rank >= 2).

    Statistics are those of the batch, not the running ones: the forward used them, so the
    derivative goes through them; count = B * H * W; weight (gamma) is broadcast as (1, C, 1, 1);
    d gamma is the sum of grad_output * x_hat, with the normalised x_hat and not the input.
    Derivation: this file's head. With `training=False` mean and var are constants (the running
    statistics, required then) and grad_input = weight * invstd * grad_output.
    """
    x = _as_input(input)
    if not training and (mean is None or var is None):
        raise UsageError(
            "mean and var: got None, expected the running statistics, which are constants when training is False"
        )
    result = group_backward([grad_output], [x], weight, eps=eps, training=training, means=mean, variances=var)
    return result[0]


def group_backward(
    grad_outputs: Sequence[ArrayLike],
    inputs: Sequence[ArrayLike],
    weight: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    training: bool = True,
    stats_mode: str = "exact",
    grad_reduction: str = "local",
    means: ArrayLike | None = None,
    variances: ArrayLike | None = None,
) -> list[Backward]:
    """Compute the derivative of `group_forward`: one grad_output, input and result for each process.

    grad_weight and grad_bias are each process's sums (`local`), or their mean or sum over the group.
    """
    xs = [_as_input(x) for x in inputs]
    dys = [_like(dy, x, "grad_output", "input") for dy, x in zip(grad_outputs, xs)]
    C = xs[0].shape[1]
    w = _vector(weight, C, "weight", 1.0)
    if means is None or variances is None:
        statistics = group_forward(xs, eps=eps, stats_mode=stats_mode)[0]
        mean, var = statistics.mean, statistics.var
    else:
        mean, var = _vector(means, C, "mean", 0.0), _vector(variances, C, "var", 1.0)
    invstd = inverse_std(var, eps)
    x_hats = [(x - _wide(mean, x)) * _wide(invstd, x) for x in xs]
    dbiases = [_sum(dy) for dy in dys]
    dweights = [_sum(dy * x_hat) for dy, x_hat in zip(dys, x_hats)]
    A, B = sum(dbiases, np.zeros(C)), sum(dweights, np.zeros(C))
    lambdas, k = _lambdas(xs, stats_mode) if training else ([0.0] * len(xs), 1.0)
    A_prime = A - (1 - k) * invstd * mean * B
    G = len(xs)
    results = []
    for dy, x_hat, lam, dweight, dbias in zip(dys, x_hats, lambdas, dweights, dbiases):
        dx = _wide(w * invstd, dy) * (dy - lam * (_wide(A_prime, dy) + x_hat * _wide(B, dy)))
        reduced = {"local": (dweight, dbias), "mean": (B / G, A / G), "sum": (B, A)}[grad_reduction]
        results.append(Backward(dx, *reduced))
    return results


def _normalise(
    x: Array, w: Array, b: Array, mean: Array, var: Array, eps: float, new_mean: Array | None, new_var: Array | None
) -> Forward:
    invstd = inverse_std(var, eps)
    output = (x - _wide(mean, x)) * _wide(w * invstd, x) + _wide(b, x)
    return Forward(output, mean, var, invstd, new_mean, new_var)


def _lambdas(xs: Sequence[Array], stats_mode: str) -> tuple[list[float], float]:
    """Compute lambda of each process, and k = the sum of lambda over all values."""
    counts = [_count(x) for x in xs]
    G, total = len(xs), sum(counts)
    if stats_mode == "exact":
        return [1.0 / total if total else 0.0] * G, 1.0
    if stats_mode == "default":
        return [1.0 / (G * n) if n else 0.0 for n in counts], sum(n > 0 for n in counts) / G
    if stats_mode == "N":
        batch = sum(x.shape[0] for x, n in zip(xs, counts) if n)
        return [x.shape[0] / (n * batch) if n else 0.0 for x, n in zip(xs, counts)], 1.0
    raise UsageError(f"stats_mode: got {stats_mode!r}, expected exact, default or N")


def _as_input(value: ArrayLike) -> Array:
    array = np.asarray(value, np.float64)
    if array.ndim < 2:
        raise UsageError(f"input: got rank {array.ndim}, expected rank >= 2 (N, C, *)")
    return array


def _like(value: ArrayLike, other: Array, name: str, other_name: str) -> Array:
    array = np.asarray(value, np.float64)
    if array.shape != other.shape:
        raise UsageError(f"{name} and {other_name}: got shapes {array.shape} and {other.shape}, expected equal shapes")
    return array


def _vector(value: ArrayLike | None, C: int, name: str, default: float) -> Array:
    if value is None:
        return np.full(C, default)
    array = np.asarray(value, np.float64)
    if array.shape != (C,):
        raise UsageError(f"{name} and input: got shape {array.shape} beside {C} channels, expected ({C},)")
    return array


def _count(x: Array) -> int:
    return x.shape[0] * int(np.prod(x.shape[2:], dtype=np.int64))


def _sum(x: Array) -> Array:
    return x.sum(axis=(0, *range(2, x.ndim)))


def _wide(vector: Array, x: Array) -> Array:
    return vector.reshape(1, -1, *(1,) * (x.ndim - 2))
