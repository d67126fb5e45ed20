"""Algebra of per-channel maps, in NumPy; everything is float64 until it is rounded once.

A batch norm in inference is, for each channel,

    y = gamma * (x - mean) / sqrt(var + eps) + beta
      = scale * (x - center) + shift        scale = gamma / sqrt(var + eps), center = mean, shift = beta

Two of them in a row, first (s1, c1, t1), then (s2, c2, t2), are

    y = s2 * (s1 * (x - c1) + t1 - c2) + t2 = (s1 s2) * (x - c1) + (t1 - c2) * s2 + t2

A linear operator z = W x + b followed by the map has the weights scale * W and the bias
scale * (b - center) + shift. Keeping the center apart from the shift avoids the cancellation of
scale * b + (shift - scale * center) where |mean| is large.

Rounding. A weight element is at most u relative to the exact product. That holds while the type can
hold it: a slice (all elements that share one factor) is refused when its largest element overflows,
or when it falls below the smallest normal number, since then the whole slice loses bits. Elements
that are tiny beside the largest of their slice may become subnormal or zero: their absolute error is
below u * largest, no more than rounding the largest one. So may a slice whose loss is below 2^-40 of the
rounding error of the layer's largest weight, a ratio that no later layer makes up for: weight decay drives
the dead channels of trained float32 networks to 1e-40 and below. (In float16 the ratio is never that small.)

Dead channels of float16. So may, third, a slice that makes an output channel z = sum_k W'_k x_k + t' on its own,
where its error is below the rounding error of that channel's output, which is at least that of the shift:

    sqrt(K) max|W'_k - round(W'_k)| X <= max(u |shift|, half the smallest subnormal)

for K products of inputs up to X (`tolerances.ACTIVATION`), errors adding like sqrt(K).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import ml_dtypes
import numpy as np

from bnexport import tolerances
from bnexport.graph.nodes import Refused

# A value below this share of its neighbours' rounding error counts as zero.
_NEGLIGIBLE = 2.0**-40


class _Limits(NamedTuple):
    max: float
    smallest_normal: float
    smallest_subnormal: float
    eps: float


@dataclasses.dataclass(frozen=True)
class ChannelAffine:
    """y[c] = scale[c] * (x[c] - center[c]) + shift[c]; three float64 vectors of one length."""

    scale: np.ndarray
    center: np.ndarray
    shift: np.ndarray

    @classmethod
    def from_batch_norm(
        cls, gamma: np.ndarray, beta: np.ndarray, mean: np.ndarray, var: np.ndarray, eps: float
    ) -> ChannelAffine:
        """Compute the map of a batch norm. Raise Refused for statistics or an eps that no trained batch norm has."""
        gamma, beta, mean, var = (np.asarray(array, np.float64) for array in (gamma, beta, mean, var))
        # One test for the four vectors: a sum with NaN or infinity is not finite.
        if not np.isfinite(gamma + beta + mean + var).all():
            for name, array in (("scale", gamma), ("bias", beta), ("mean", mean), ("variance", var)):
                if not np.isfinite(array).all():
                    raise Refused("not-finite", f"the {name} holds NaN or infinite values")
        if not 0 <= eps < math.inf:
            raise Refused("bad-epsilon", f"epsilon is {eps}, expected a finite number >= 0")
        smallest = var.min(initial=np.inf)
        if smallest < 0:
            raise Refused("negative-variance", f"the variance is negative, smallest {smallest:.3g}")
        if smallest + eps == 0:
            raise Refused("zero-variance", "variance + epsilon is 0 in a channel")
        return cls(gamma / np.sqrt(var + eps), mean, beta)

    @classmethod
    def scaling(cls, scale: np.ndarray) -> ChannelAffine:
        zero = np.zeros_like(scale)
        return cls(scale, zero, zero)

    @classmethod
    def shifting(cls, shift: np.ndarray) -> ChannelAffine:
        return cls(np.ones_like(shift), np.zeros_like(shift), shift)

    @property
    def channels(self) -> int:
        return int(self.scale.shape[0])

    @property
    def offset(self) -> np.ndarray:
        """The image of 0: y = scale * x + offset."""
        return self.shift - self.scale * self.center

    @property
    def is_scaling(self) -> bool:
        """Whether 0 stays 0, so that zero padding is unaffected by the map."""
        return bool((self.offset == 0).all())

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Apply the map to an array whose last axis is the channel (or broadcasts to it)."""
        return (np.asarray(values, np.float64) - self.center) * self.scale + self.shift

    def then(self, after: ChannelAffine) -> ChannelAffine:
        """Compose the maps: this one first, then `after`."""
        return ChannelAffine(
            self.scale * after.scale, self.center, (self.shift - after.center) * after.scale + after.shift
        )

    @property
    def is_shift(self) -> bool:
        """Whether the map only adds a constant."""
        return bool((self.scale == 1).all())

    def only_scale(self) -> ChannelAffine:
        return ChannelAffine.scaling(self.scale)

    def inverse_scale(self, bound: float) -> np.ndarray:
        """Return 1 / scale. Raise Refused if it exceeds `bound`."""
        smallest = float(np.abs(self.scale).min(initial=np.inf))
        if smallest * bound < 1:
            raise Refused("scale", f"a scale of {smallest:.3g} would be divided by, the bound is 1 / {bound:.3g}")
        return 1.0 / self.scale

    def take(self, channels: np.ndarray | slice) -> ChannelAffine:
        """Return the map on some of the channels, in the order given."""
        return ChannelAffine(self.scale[channels], self.center[channels], self.shift[channels])

    def spread(self, channels: np.ndarray | slice, size: int) -> ChannelAffine:
        """Return the map on these channels of `size`, and the identity on the others."""
        scale, center, shift = np.ones(size), np.zeros(size), np.zeros(size)
        scale[channels], center[channels], shift[channels] = self.scale, self.center, self.shift
        return ChannelAffine(scale, center, shift)

    def repeat(self, count: int) -> ChannelAffine:
        """Repeat each channel `count` times in a row, as when (C, S) is flattened."""
        return ChannelAffine(*(np.repeat(part, count) for part in (self.scale, self.center, self.shift)))


def along(vector: np.ndarray, axis: int, rank: int) -> np.ndarray:
    """Reshape `vector` so that it broadcasts along `axis` of an array of `rank` dimensions."""
    shape = [1] * rank
    shape[axis] = -1
    return vector.reshape(shape)


@functools.cache
def _limits(dtype: np.dtype) -> _Limits:
    info = ml_dtypes.finfo(dtype)
    return _Limits(*(float(value) for value in (info.max, info.smallest_normal, info.smallest_subnormal, info.eps)))


def holds(largest: np.ndarray, dtype: np.dtype) -> bool:
    """Whether `dtype` holds the largest magnitude of each slice as a normal number; further checks are then
    unnecessary.
    """
    limits = _limits(dtype)
    return bool(largest.min() >= limits.smallest_normal and largest.max() <= limits.max)


class Outputs(NamedTuple):
    """Output channels that slices make on their own: their shift, which broadcasts to the slices, and K, how many
    products an output adds.
    """

    shift: np.ndarray
    products: float

    def hidden_error(self, limits: _Limits) -> np.ndarray:
        """Return the largest weight error that no output shows, for each channel; see the head of this file."""
        rounding = np.maximum(limits.eps / 2 * np.abs(self.shift), limits.smallest_subnormal / 2)
        return rounding / (tolerances.ACTIVATION * math.sqrt(max(self.products, 1.0)))


def check_range(largest: np.ndarray, factor: np.ndarray, dtype: np.dtype, outputs: Outputs | None = None) -> None:
    """Raise Refused for a scaling that `dtype` cannot represent; see the head of this file.

    largest: the largest magnitude of each slice; factor: the magnitude of what it is multiplied by; outputs: those of
    the slices, where each makes one on its own.
    """
    limits = _limits(dtype)
    after = largest * factor
    if holds(after, dtype):
        return
    if not np.isfinite(largest).all():
        raise Refused("not-finite", "the weight holds NaN or infinite values")
    with np.errstate(over="ignore"):
        finite = np.isfinite(after.astype(dtype).astype(np.float64)).all()
    if not finite:
        raise Refused("overflow", f"a folded weight would be {after.max():.3g}, {dtype} ends at {limits.max:.3g}")
    lost = (after < limits.smallest_normal) & (largest > 0) & (factor < 1) & (factor != 0)
    lost &= limits.smallest_subnormal / 2 > _NEGLIGIBLE * limits.eps / 2 * after.max()
    if outputs is not None:
        lost &= np.minimum(after, limits.smallest_subnormal / 2) > outputs.hidden_error(limits)
    if lost.any():
        raise Refused(
            "underflow",
            f"a folded weight channel would be at most {after[lost].min():.3g},"
            f" {dtype} loses bits below {limits.smallest_normal:.3g}",
        )


def round_vector(values: np.ndarray, dtype: np.dtype, what: str, magnitude: np.ndarray | None = None) -> np.ndarray:
    """Round exact values once to `dtype`.

    magnitude: size of the terms whose sum `values` is. What cancelled to less than the rounding of
    its terms may become zero; a value that is small in itself may not.
    """
    limits = _limits(dtype)
    largest = float(np.abs(values).max(initial=0.0))
    if not largest <= limits.max:
        with np.errstate(over="ignore"):
            finite = np.isfinite(values.astype(dtype)).all()
        if not finite:
            raise Refused("overflow", f"the {what} would be {largest:.3g}, {dtype} ends at {limits.max:.3g}")
    rounded = values.astype(dtype)
    if np.count_nonzero(rounded) == np.count_nonzero(values):
        return rounded
    eps = limits.eps
    flushed = (rounded == 0) & (values != 0)
    flushed &= np.abs(values) > _NEGLIGIBLE * eps / 2 * largest
    if magnitude is not None:
        flushed &= np.abs(values) > eps * magnitude
    if flushed.any():
        raise Refused("underflow", f"the {what} would flush {np.abs(values[flushed]).max():.3g} to zero in {dtype}")
    return rounded
