"""Training batch norm in float64 on the host, from its definition."""

from __future__ import annotations

import numpy as np

EPS = 1e-5


def _over_channels(values: np.ndarray, rank: int) -> np.ndarray:
    return values.reshape(1, -1, *(1,) * (rank - 2))


def forward(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float = EPS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y, mean and invstd of the batch."""
    axes, wide = (0, *range(2, x.ndim)), x.astype(np.float64)
    mean = wide.mean(axes)
    invstd = 1 / np.sqrt(((wide - _over_channels(mean, x.ndim)) ** 2).mean(axes) + eps)
    hat = (wide - _over_channels(mean, x.ndim)) * _over_channels(invstd, x.ndim)
    return hat * _over_channels(weight, x.ndim) + _over_channels(bias, x.ndim), mean, invstd


def backward(
    dy: np.ndarray, x: np.ndarray, weight: np.ndarray, mean: np.ndarray, invstd: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dx, dweight and dbias, with the statistics that the forward saved."""
    axes, count = (0, *range(2, x.ndim)), x.size / x.shape[1]
    wide, rank = dy.astype(np.float64), x.ndim
    hat = (x.astype(np.float64) - _over_channels(mean, rank)) * _over_channels(invstd, rank)
    dbias, dweight = wide.sum(axes), (wide * hat).sum(axes)
    inner = wide - _over_channels(dbias, rank) / count - hat * _over_channels(dweight, rank) / count
    return inner * _over_channels(weight * invstd, rank), dweight, dbias
