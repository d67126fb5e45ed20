"""Training batch norm in float64 from its definition, and the comparison of results with it.

Arrays of NumPy and tensors of torch alike, all of them float64. Bounds are those of bnexport/tolerances.py.
"""

from __future__ import annotations

import math
from typing import Any

from bnexport import tolerances

EPS, MOMENTUM = 1e-5, 0.1
Array = Any  # of NumPy or torch


def along(vector: Array, x: Array) -> Array:
    return vector.reshape(1, -1, *(1,) * (x.ndim - 2))


def sums(values: Array) -> Array:
    return values.sum((0, *range(2, values.ndim)))


def moments(x: Array) -> tuple[Array, Array]:
    """Mean and biased variance of each channel."""
    count = math.prod(x.shape) // x.shape[1]
    mean = sums(x) / count
    mean = mean + sums(x - along(mean, x)) / count
    return mean, sums((x - along(mean, x)) ** 2) / count


def largest(values: Array) -> float:
    return float(abs(values).max())


def close(got: Array, want: Array, bound: tolerances.Tolerance, what: str) -> None:
    """AssertionError for a value outside of the bound, NaN among them."""
    bad = ~(abs(got - want) - (bound.rtol * abs(want) + bound.atol) <= 0)
    if bool(bad.any()):
        raise AssertionError(f"{what}: {int(bad.sum())} of {math.prod(want.shape)} values off, bound {bound}")


class Expected:
    """Results of a batch under the C API's names, and their bounds. `dtype`: of the data.

    statistics: mean, variance and count where they are not the batch's own, and then dx, which follows from them in another way.
    running: running mean and variance before.
    """

    def __init__(
        self, dtype: str, x: Array, dy: Array, weight: Array, bias: Array, *, running: tuple[Array, Array] | None = None,
        statistics: tuple[Array, Array, int] | None = None, dx: Array = None, eps: float = EPS, momentum: float = MOMENTUM,
    ) -> None:  # fmt: skip
        mean, var, count = statistics or (*moments(x), math.prod(x.shape) // x.shape[1])
        invstd = 1 / (var + eps) ** 0.5
        hat, scale = (x - along(mean, x)) * along(invstd, x), weight * invstd
        self.want = {"y": hat * along(weight, x) + along(bias, x), "saved_mean": mean, "saved_invstd": invstd}
        self.want |= {"dbias": sums(dy), "dweight": sums(dy * hat)}
        if dx is None:
            means = (along(self.want["dbias"], x) + hat * along(self.want["dweight"], x)) / count
            dx = along(scale, x) * (dy - means)
        self.want["dx"] = dx
        condition, std = 1 + largest(mean * invstd), float(var.max()) ** 0.5
        unit = tolerances.UNIT_ROUNDOFF[tolerances.STATISTICS_TYPE[dtype]]
        self.bounds = {
            "y": tolerances.forward(dtype, condition=condition, weight=largest(weight)),
            "dx": tolerances.backward_input(dtype, condition=condition, scale=largest(scale) * largest(dy)),
            # The std of the smallest channel would be the exact scale; the largest is a bound for all.
            "saved_mean": tolerances.statistic(dtype, scale=max(std, 1e-30)),
            # Means of parts meet in double.
            "saved_invstd": tolerances.Tolerance(32 * unit * (condition if dtype == "float64" else 1), 0.0),
        }
        for name, terms in (("dbias", dy), ("dweight", dy * hat)):
            absolute = float(sums(abs(terms)).max())
            self.bounds[name] = tolerances.backward_sum(dtype, condition=condition, absolute_sum=absolute)
        if running is not None:
            for name, old, new in zip(
                ("running_mean_out", "running_var_out"), running, (mean, var * (count / max(count - 1, 1))), strict=True
            ):
                self.want[name] = (1 - momentum) * old + momentum * new
                scale_ = max(largest(old), largest(new), std)
                self.bounds[name] = tolerances.statistic(dtype, scale=scale_)

    def check(self, what: object, **got: Array) -> None:
        for name, values in got.items():
            close(values, self.want[name], self.bounds[name], f"{name}, {what}")
