"""Table of error bounds, used by tests, `verify` and the documents.

Symbols: u the unit roundoff of a type (half an ulp of 1), T the data's type, S the type in which
statistics and weights are kept and in which kernels compute (float32; float64 for float64 data),
x_hat = (x - mean) * invstd, y = weight * x_hat + bias.

Condition number. The stored mean has a relative error of u_S, which is u_S * |mean| / std once
x - mean is divided by std. The data, too, hold x to u_T * |x| only, but that error is in the input
of every implementation alike. So all absolute bounds scale with

    condition = 1 + max over channels of |mean| / std

Forward. Computing y takes 4 roundings in S on centred values (x - mean, * invstd, * weight,
+ bias), and one rounding to T. The statistics come from sums in S lanes of at most 1024 values,
collected in double: a sum of 1024 terms with 8 or more lanes has an error of at most 128 u_S, about
sqrt(128) = 11 u_S in practice. Together, with a margin of two:

    |y - y_exact| <= (2 u_T + 4 u_S) |y_exact| + 32 u_S * condition * max(1, max |weight|)

Backward. grad_input = weight * invstd * (dy - mean(dy) - x_hat * mean(dy * x_hat)) adds the error of
the two means, each again one blocked sum, and is proportional to weight * invstd * max|dy|:

    |dx - dx_exact| <= 2 u_T |dx_exact| + 64 u_S * condition * max |weight * invstd| * max |dy|

Sums over n = N * S values (grad_weight, grad_bias): rounding errors of n terms of one sign pattern
grow as sqrt(n) when collected in blocks; x_hat carries u_S * condition in each term, one sign:

    |dw - dw_exact| <= 16 u_S * condition * sum |dy * x_hat|  +  u_S |dw_exact|

Running statistics: (1 - m) * old + m * new, three roundings in S plus that of the batch statistic:

    |r - r_exact| <= 32 u_S * max(|r_exact|, |old|)       (mean: + 32 u_S * std)

Whole models. Each of L layers that sum K products adds about sqrt(K) u relative to the largest
value, and errors of layers add like sqrt(L). K = 10^4 and L = 100 give 1000 u, so

    |y - y_ref| <= 1024 u * max |y_ref|                   (2^-14 for float32)

In float16 and bfloat16 models kernels add in float32 and each layer rounds its output once or twice,
errors of layers again adding like sqrt(L): sqrt(2 * 100) = 14, and a margin of two:

    |y - y_ref| <= (32 u_T + 1024 u_S) * max |y_ref|

Ill-conditioned models. Where the reference's own error, measured from float64, exceeds that bound, four
times it (OWN_ERROR) is the bound instead. That is evidence only while it is small: a bound above
LARGEST_SHARE of max |y_ref|, and above the table's, would accept a wrong model, so nothing is decided on
such inputs (`is_evidence`).
"""

from __future__ import annotations

import dataclasses

import numpy as np

UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}

STATISTICS_TYPE = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}

# Largest bound, as a share of the largest finite value of an output, by which an output can still be judged.
LARGEST_SHARE = 0.01

# Inputs of a layer, where an error of its weights is judged by what it does to the output: all of them as large as
# 16 standard deviations of a normalised input. Larger ones enlarge the outputs of all other channels in proportion.
ACTIVATION = 16.0

# A model and its reference round at different places: the bound of either from float64 is this often the reference's error.
OWN_ERROR = 4.0

_FORWARD = 32.0
_BACKWARD = 64.0
_SUM = 16.0
_STATISTIC = 32.0
_MODEL = 1024.0
_MODEL_ROUNDING = 32.0


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """|got - expected| <= rtol * |expected| + atol, element by element."""

    rtol: float
    atol: float

    def __str__(self) -> str:
        return f"{self.atol:.3g}" + (f" + {self.rtol:.3g} * |value|" if self.rtol else "")

    def __add__(self, other: Tolerance) -> Tolerance:
        """Return the bound of two errors in sequence, as when two implementations are compared."""
        return Tolerance(self.rtol + other.rtol, self.atol + other.atol)


def condition(mean: np.ndarray, std: np.ndarray) -> float:
    """Return 1 + max |mean| / std over the channels; channels with std 0 do not count."""
    mean, std = np.abs(np.asarray(mean, np.float64)), np.asarray(std, np.float64)
    ratio = np.divide(mean, std, out=np.zeros_like(mean), where=std > 0)
    return 1.0 + float(ratio.max(initial=0.0))


def forward(dtype: str, *, condition: float = 1.0, weight: float = 1.0) -> Tolerance:
    """Bound the output of sync batch norm. `weight`: max |weight|.

    >>> forward("float16").rtol > forward("float32").rtol > forward("float64").rtol
    True
    """
    u_t, u_s = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF[STATISTICS_TYPE[dtype]]
    return Tolerance(2 * u_t + 4 * u_s, _FORWARD * u_s * condition * max(1.0, weight))


def backward_input(dtype: str, *, condition: float = 1.0, scale: float = 1.0) -> Tolerance:
    """Bound grad_input. `scale`: max |weight * invstd| * max |grad_output|."""
    u_t, u_s = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF[STATISTICS_TYPE[dtype]]
    return Tolerance(2 * u_t, _BACKWARD * u_s * condition * scale)


def backward_sum(dtype: str, *, condition: float = 1.0, absolute_sum: float = 1.0) -> Tolerance:
    """Bound grad_weight or grad_bias. `absolute_sum`: the largest sum of |terms| of a channel."""
    u_s = UNIT_ROUNDOFF[STATISTICS_TYPE[dtype]]
    return Tolerance(u_s, _SUM * u_s * condition * absolute_sum)


def statistic(dtype: str, *, scale: float = 1.0) -> Tolerance:
    """Bound running statistics. `scale`: max(|old|, std) of the channels."""
    u_s = UNIT_ROUNDOFF[STATISTICS_TYPE[dtype]]
    return Tolerance(_STATISTIC * u_s, _STATISTIC * u_s * scale)


def model(dtype: str, reference: np.ndarray) -> Tolerance:
    """Bound an output of a whole model, relative to the largest finite reference value."""
    values = np.abs(np.asarray(reference, np.float64))
    largest = float(values[np.isfinite(values)].max(initial=0.0))
    statistics = STATISTICS_TYPE[dtype]
    rounding = 0.0 if statistics == dtype else _MODEL_ROUNDING * UNIT_ROUNDOFF[dtype]
    return Tolerance(0.0, (rounding + _MODEL * UNIT_ROUNDOFF[statistics]) * largest)


def is_evidence(bound: float, table: float, largest: float) -> bool:
    """Whether a bound derived from the reference's own error can detect a wrong model.

    table: the bound of `model`. largest: the largest finite magnitude of the reference.

    >>> is_evidence(4.53e5, table=10.0, largest=1.8e5)
    False
    """
    return bound <= max(table, LARGEST_SHARE * largest)
