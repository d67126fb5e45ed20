"""The algebra of per-channel maps. NumPy only; everything is float64 until it is rounded once.

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
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from bnexport.folding.refusal import Refused

# Weights are rounded to these types; anything else is not a parameter type.
FLOAT_TYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}

# Rows are scaled in pieces of about this many elements, so that float64 copies stay small.
_BLOCK = 1 << 21
# What is this much smaller than a rounding error of its neighbours does not count.
_NEGLIGIBLE = 2.0**-40


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
        """Raises Refused for statistics or an eps that no trained batch norm has."""
        gamma, beta, mean, var = (np.asarray(array, np.float64) for array in (gamma, beta, mean, var))
        for name, array in (("scale", gamma), ("bias", beta), ("mean", mean), ("variance", var)):
            if not np.isfinite(array).all():
                raise Refused("not-finite", f"the {name} holds NaN or infinite values")
        if (var < 0).any():
            raise Refused("negative-variance", f"the variance is negative, smallest {var.min():.3g}")
        if not np.isfinite(eps) or eps < 0:
            raise Refused("bad-epsilon", f"epsilon is {eps}, expected a finite number >= 0")
        if (var + eps == 0).any():
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
        """Whether 0 stays 0, so that zero padding does not notice the map."""
        return bool((self.offset == 0).all())

    def apply(self, values: np.ndarray) -> np.ndarray:
        """The map on an array whose last axis is the channel (or broadcasts to it)."""
        return (np.asarray(values, np.float64) - self.center) * self.scale + self.shift

    def then(self, after: ChannelAffine) -> ChannelAffine:
        """First this map, then `after`."""
        return ChannelAffine(
            self.scale * after.scale, self.center, (self.shift - after.center) * after.scale + after.shift
        )

    def only_scale(self) -> ChannelAffine:
        return ChannelAffine.scaling(self.scale)

    def take(self, channels: np.ndarray | slice) -> ChannelAffine:
        """The map on some of the channels, in the order given."""
        return ChannelAffine(self.scale[channels], self.center[channels], self.shift[channels])

    def repeat(self, count: int) -> ChannelAffine:
        """Each channel `count` times in a row, as when (C, S) is flattened."""
        return ChannelAffine(*(np.repeat(part, count) for part in (self.scale, self.center, self.shift)))


def along(vector: np.ndarray, axis: int, rank: int) -> np.ndarray:
    """`vector` shaped to broadcast along `axis` of an array of `rank` dimensions."""
    shape = [1] * rank
    shape[axis] = -1
    return vector.reshape(shape)


def round_scaled(weight: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """weight * factor in float64, rounded once to the weight's type. `factor` broadcasts to weight."""
    out = np.empty(weight.shape, weight.dtype)
    factor = np.broadcast_to(factor, weight.shape)
    if weight.ndim == 0:
        return np.asarray(weight.astype(np.float64) * factor).astype(weight.dtype)
    rows = max(1, _BLOCK // max(1, weight[:1].size))
    for start in range(0, weight.shape[0], rows):
        block = slice(start, start + rows)
        out[block] = (weight[block].astype(np.float64) * factor[block]).astype(weight.dtype)
    return out


def check_scaled(weight: np.ndarray, factor: np.ndarray, dtype: np.dtype) -> None:
    """Refuses a scaling that `dtype` cannot hold; see the head of this file. `factor` has the weight's rank."""
    limits = ml_dtypes.finfo(dtype)
    largest_finite, smallest_normal = float(limits.max), float(limits.smallest_normal)
    # The slice of an element is the set of elements with the same factor.
    shared = tuple(axis for axis in range(weight.ndim) if factor.shape[axis] == 1)
    if weight.size == 0:
        return
    # Two reductions instead of abs(weight): no copy of a large weight. NaN and infinity come through.
    with np.errstate(invalid="ignore"):
        highest = weight.max(axis=shared, keepdims=True).astype(np.float64)
        lowest = weight.min(axis=shared, keepdims=True).astype(np.float64)
    before = np.maximum(highest, -lowest)
    if not np.isfinite(before).all():
        raise Refused("not-finite", "the weight holds NaN or infinite values")
    after = before * np.abs(factor)
    with np.errstate(over="ignore"):
        finite = np.isfinite(after.astype(dtype).astype(np.float64)).all()
    if not finite:
        raise Refused("overflow", f"a folded weight would be {after.max():.3g}, {dtype} ends at {largest_finite:.3g}")
    loss = float(limits.smallest_subnormal) / 2
    lost = (after < smallest_normal) & (before > 0) & (np.abs(factor) < 1) & (factor != 0)
    lost &= loss > _NEGLIGIBLE * float(limits.eps) / 2 * after.max()
    if lost.any():
        raise Refused(
            "underflow",
            f"a folded weight channel would be at most {after[lost].min():.3g},"
            f" {dtype} loses bits below {smallest_normal:.3g}",
        )


def round_vector(values: np.ndarray, dtype: np.dtype, what: str, magnitude: np.ndarray | None = None) -> np.ndarray:
    """Exact values rounded once to `dtype`.

    magnitude: size of the terms whose sum `values` is. What cancelled to less than the rounding of
    its terms may become zero; a value that is small in itself may not.
    """
    if not np.isfinite(values).all():
        raise Refused("not-finite", f"the {what} would hold NaN or infinite values")
    with np.errstate(over="ignore"):
        rounded = values.astype(dtype)
    if not np.isfinite(rounded.astype(np.float64)).all():
        largest = float(np.abs(values).max())
        raise Refused(
            "overflow", f"the {what} would be {largest:.3g}, {dtype} ends at {float(ml_dtypes.finfo(dtype).max):.3g}"
        )
    eps = float(ml_dtypes.finfo(dtype).eps)
    flushed = (rounded == 0) & (values != 0)
    flushed &= np.abs(values) > _NEGLIGIBLE * eps / 2 * np.abs(values).max(initial=0.0)
    if magnitude is not None:
        flushed &= np.abs(values) > eps * magnitude
    if flushed.any():
        raise Refused("underflow", f"the {what} would flush {np.abs(values[flushed]).max():.3g} to zero in {dtype}")
    return rounded
