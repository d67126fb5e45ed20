"""Sums over batches from which running statistics are estimated.

A row is float64 (2 C + 1,), as the kernels write it: [n, mean.., M2..] with n the values of a channel and M2 the sum of
squared deviations from their mean. Two methods combine the rows of batches, then those of processes:

    exact        (n, mean, M2) of the joint data, by Chan, Golub and LeVeque's update    var = M2 / (n - 1)
    cumulative   [k, mean.., var..]: plain means over k batches of mean and M2 / (n - 1), as torch's update_bn

They differ by the variance of the batch means, which `cumulative` drops, and by how uneven batches are weighted. Source:
Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance".
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bnexport.errors import LibraryError

Row = NDArray[np.float64]

METHODS = ("exact", "cumulative")
# Values of one piece of an array that is reduced without the kernels, in float64.
_PIECE = 1 << 20


def parts(row: Row) -> tuple[float, Row, Row]:
    """Return the count and the two vectors (C,) of a row."""
    channels = len(row) // 2
    return float(row[0]), row[1 : channels + 1], row[channels + 1 :]


def start(row: Row, method: str) -> Row:
    """Turn the row of one batch into a sum of `method`."""
    count, mean, m2 = parts(row)
    return row if method == "exact" else np.concatenate([[1.0], mean, m2 / max(count - 1, 1)])


def merge(a: Row, b: Row, method: str) -> Row:
    """Combine two sums of disjoint data."""
    (n_a, mean_a, spread_a), (n_b, mean_b, spread_b) = parts(a), parts(b)
    if n_a == 0 or n_b == 0:
        return a if n_b == 0 else b
    n, delta = n_a + n_b, mean_b - mean_a
    share = n_b / n
    exact = spread_a + spread_b + delta * delta * (n_a * share)
    spread = exact if method == "exact" else spread_a + (spread_b - spread_a) * share
    return np.concatenate([[n], mean_a + delta * share, spread])


def total(rows: Iterable[Row], method: str) -> Row:
    """Combine sums in their order."""
    first, *others = rows
    for row in others:
        first = merge(first, row, method)
    return first


def statistics(row: Row, method: str) -> tuple[Row, Row]:
    """Return running mean and running variance, both (C,); the variance of `exact` is unbiased."""
    count, mean, spread = parts(row)
    return mean, spread / (count - 1) if method == "exact" else spread


def batch_statistics(row: Row) -> tuple[Row, Row]:
    """Return the mean and the biased variance with which training normalises the batch of a row."""
    count, mean, m2 = parts(row)
    return mean, m2 / max(count, 1)


def of_array(x: np.ndarray[Any, Any]) -> Row:
    """Compute the row of an array (N, C, *), by the compiled kernel where its library and type allow it."""
    x = np.ascontiguousarray(x)
    kernel = _kernel()
    if kernel is not None and str(x.dtype) in kernel.DTYPES and x.size:
        row = np.empty(2 * x.shape[1] + 1)
        statistics_type = "float64" if x.dtype == np.float64 else "float32"
        kernel.cpu_moments(
            row=row.ctypes.data,
            x=x.ctypes.data,
            dtype=kernel.DTYPES[str(x.dtype)],
            stats_dtype=kernel.DTYPES[statistics_type],
            layout=kernel.LAYOUTS["NCS"],
            N=x.shape[0],
            C=x.shape[1],
            S=int(np.prod(x.shape[2:])),
            threads=_threads(),
        )
        return row
    return total(_pieces(x), "exact")


def _pieces(x: np.ndarray[Any, Any]) -> Iterable[Row]:
    """Compute rows of a few samples each: a float64 copy of all of them may not fit."""
    step = max(1, _PIECE // max(1, x[:1].size))
    axes = (0, *range(2, x.ndim))
    for first in range(0, max(len(x), 1), step):
        piece = x[first : first + step].astype(np.float64)
        count = piece.size // max(1, x.shape[1])
        mean = piece.mean(axes) if count else np.zeros(x.shape[1])
        deviation = piece - mean.reshape(1, -1, *(1,) * (x.ndim - 2))
        yield np.concatenate([[count], mean, (deviation * deviation).sum(axes)])


@functools.cache
def _threads() -> int:
    return min(os.cpu_count() or 1, 1024)


def _kernel() -> Any:
    from bnexport.native import capi

    try:
        capi.library()
    except LibraryError:
        return None
    return capi


def unfinished_row(x: Any, finite: Callable[[Any], Any]) -> int | None:
    """Return the first index of dimension 0 with a value that is not finite. finite: of the array's own kind."""
    return next((index for index, row in zip(itertools.count(), x) if not bool(finite(row).all())), None)
