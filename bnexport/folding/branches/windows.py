"""Kernels of parallel branches, and the windows of Conv, pools and Pad that they are read from."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine, Outputs, check_range
from bnexport.folding.context import Context
from bnexport.folding.sites import read_fill, read_pads
from bnexport.graph.constants import ELEMENTS
from bnexport.graph.nodes import Refused, get_ints, get_string, label

# The algebra of linear branches: kernels that are mapped per channel, composed and added. NumPy, float64.
#
# A kernel makes from x, with g the group, o and i the output and input channel in the group, j the kernel position:
#
#     z[g, o](p) = sum_ij W[g, o, i, j] x[g, i](stride p + dilation j - begin) + b[g, o]
#
# where x counts as zero outside; a matrix product is a kernel without positions.
#
# Mapped:    k (z - c) + t has W' = k W and b' = k (b - c) + t.
# Composed:  a 1x1 kernel A behind any W: A W, A b + a; the strides multiply. Any W behind a 1x1 kernel A with stride 1:
#            W A, b + sum_ij W a; the pads add. If W pads, its zeros take the place of a behind A: a must be zero.
# Added:     W1 + W2 on the union of their positions. With -begin <= position <= -begin + dilation (size - 1) the union
#            runs from the least to the greatest. Both make results of one size for every input if and only if
#            begin + end - dilation (size - 1) and the strides agree; it stays the same for the sum.
# Regrouped: with G = gcd of the numbers of groups, the groups of each lie block-diagonally in those of the result.

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Window:
    """Where a kernel reads: for each axis of positions its size, zeros before and behind, stride and dilation."""

    sizes: Axes
    begins: Axes
    ends: Axes
    strides: Axes
    dilations: Axes

    @classmethod
    def point(cls, rank: int) -> Window:
        """Return a window of one position, stride 1, without padding."""
        return cls((1,) * rank, (0,) * rank, (0,) * rank, (1,) * rank, (1,) * rank)

    @property
    def is_point(self) -> bool:
        return all(size == 1 for size in self.sizes)

    @property
    def pads(self) -> bool:
        return any((*self.begins, *self.ends))

    def joined(self, other: Window) -> Window:
        """Return the least window that holds both. Raise Refused where the results differ in size or the positions do not meet."""
        if self.strides != other.strides:
            raise Refused("shape", f"its branches have strides {list(self.strides)} and {list(other.strides)}")
        axes = [_join(*pair) for pair in zip(self._axes(), other._axes(), strict=True)]
        sizes, begins, ends, dilations = zip(*axes, strict=True) if axes else ((), (), (), ())
        return Window(sizes, begins, ends, self.strides, dilations)

    def offsets(self, inner: Window) -> tuple[slice, ...]:
        """Return the slices of this window, one for each axis, where the positions of `inner` lie."""
        places = []
        for size, begin, dilation, own, before in zip(
            self.sizes, self.begins, self.dilations, inner.sizes, inner.begins, strict=True
        ):
            start = (begin - before) // dilation
            assert 0 <= start <= size - own
            places.append(slice(start, start + own))
        return tuple(places)

    def _axes(self) -> list[tuple[int, int, int, int]]:
        return list(zip(self.sizes, self.begins, self.ends, self.dilations, strict=True))


def _join(one: tuple[int, int, int, int], two: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Join two windows along one axis; each is (size, begin, end, dilation)."""
    if one[0] < two[0]:
        one, two = two, one
    size, begin, end, dilation = one
    own, before, behind, step = two
    if size == 1:
        dilation = step = 1
    growth = begin + end - dilation * (size - 1)
    # The dilation of a single position says nothing.
    step = dilation if own == 1 else step
    if before + behind - step * (own - 1) != growth:
        raise Refused("shape", "its branches make results of different sizes")
    if step != dilation or (begin - before) % dilation:
        raise Refused("shape", f"the positions of its branches do not meet: dilations {dilation} and {step}")
    low = max(begin, before)
    high = max(dilation * (size - 1) - begin, dilation * (own - 1) - before)
    return (low + high) // dilation + 1, low, growth + high, dilation


@dataclasses.dataclass(frozen=True)
class Kernel:
    """weight: (groups, outputs / groups, inputs / groups, *sizes). bias: (outputs,).

    bias_size: magnitudes of the terms whose sum the bias is; peak: the largest magnitude in the weights of any term,
    for each output. All float64.
    """

    weight: np.ndarray
    bias: np.ndarray
    window: Window
    bias_size: np.ndarray
    peak: np.ndarray

    @classmethod
    def of(cls, weight: np.ndarray, bias: np.ndarray | None, window: Window) -> Kernel:
        outputs = weight.shape[0] * weight.shape[1]
        bias = np.zeros(outputs) if bias is None else bias
        return cls(weight, bias, window, np.abs(bias), _peak(weight))

    @classmethod
    def identity(cls, channels: int, rank: int) -> Kernel:
        return cls.of(np.ones((channels, 1, 1, *[1] * rank)), None, Window.point(rank))

    @property
    def groups(self) -> int:
        return int(self.weight.shape[0])

    @property
    def outputs(self) -> int:
        return int(self.weight.shape[0] * self.weight.shape[1])

    @property
    def inputs(self) -> int:
        return int(self.weight.shape[0] * self.weight.shape[2])

    def check_type(self, dtype: np.dtype) -> None:
        """Raise Refused if `dtype` cannot hold the weights (`affine.check_range`)."""
        flat = self.weight.reshape(self.outputs, -1)
        largest = np.abs(flat).max(axis=1, initial=0.0)
        factor = np.divide(largest, self.peak, out=np.ones_like(largest), where=self.peak > 0)
        check_range(self.peak, factor, dtype, Outputs(self.bias, flat.shape[1]))

    def mapped(self, affine: ChannelAffine) -> Kernel:
        """Followed by `affine`."""
        rows = affine.scale.reshape(*self.weight.shape[:2], *[1] * (self.weight.ndim - 2))
        size = np.abs(affine.scale) * (self.bias_size + np.abs(affine.center)) + np.abs(affine.shift)
        weight = self.weight * rows
        return Kernel(weight, affine.apply(self.bias), self.window, size, _peak(weight))

    def padded(self, begins: Axes, ends: Axes) -> Kernel:
        """Followed by zeros around its result. Refused where that is not the same as zeros around its input."""
        if not self.window.is_point or any(pad < 0 for pad in (*begins, *ends)):
            raise Refused("padding", "zeros around the result of a branch are no zeros around its input")
        if (any(begins) or any(ends)) and self.bias.any():
            raise Refused("padding", "a branch pads with zeros behind a shift, which padding before it would change")
        window = dataclasses.replace(
            self.window, begins=_sum(self.window.begins, begins), ends=_sum(self.window.ends, ends)
        )
        return dataclasses.replace(self, window=window)

    def after(self, inner: Kernel) -> Kernel:
        """Preceded by `inner`."""
        if inner.outputs != self.inputs:
            raise Refused("shape", f"a branch makes {inner.outputs} channels where {self.inputs} are read")
        own = self.window
        if own.is_point and not own.pads:
            strides = tuple(one * two for one, two in zip(own.strides, inner.window.strides, strict=True))
            window = dataclasses.replace(inner.window, strides=strides)
        else:
            inner = inner.padded(own.begins, own.ends)
            window = dataclasses.replace(own, begins=inner.window.begins, ends=inner.window.ends)
        weight = _composed(self, inner, window.sizes)
        bias, size = self._of_constant(inner.bias), self._of_constant(inner.bias_size, absolute=True)
        return Kernel(weight, self.bias + bias, window, self.bias_size + size, _peak(weight))

    def plus(self, other: Kernel, window: Window) -> Kernel:
        """Both on the same input; `window`: their windows joined."""
        if (self.inputs, self.outputs) != (other.inputs, other.outputs):
            raise Refused(
                "shape",
                f"its branches make {self.outputs} channels of {self.inputs} and {other.outputs} of {other.inputs}",
            )
        groups = math.gcd(self.groups, other.groups)
        shape = (groups, self.outputs // groups, self.inputs // groups, *window.sizes)
        check_size(math.prod(shape), self.weight.size + other.weight.size)
        weight = np.zeros(shape)
        for kernel in (self, other):
            _add_blocks(weight, kernel.weight, window.offsets(kernel.window))
        return Kernel(
            weight,
            self.bias + other.bias,
            window,
            self.bias_size + other.bias_size,
            np.maximum(self.peak, other.peak),
        )

    def _of_constant(self, values: np.ndarray, *, absolute: bool = False) -> np.ndarray:
        """Apply the weights to an input that is `values` everywhere."""
        if not values.any():
            return np.zeros(self.outputs)
        weight = np.abs(self.weight) if absolute else self.weight
        sums = weight.sum(axis=tuple(range(3, weight.ndim)))
        return np.matmul(sums, values.reshape(self.groups, -1, 1)).reshape(-1)


def check_size(elements: int, held: int) -> None:
    """Refuse to make more elements than the branches hold and than are evaluated anywhere: a file may ask for any."""
    if elements > max(ELEMENTS, held):
        raise Refused("too-large", f"a merged weight would have {elements:,} elements")


def joined_size(one: Kernel, two: Kernel, window: Window) -> int:
    """Size of the merged weight, which is the number of multiplications for each output position."""
    return one.outputs * (one.inputs // math.gcd(one.groups, two.groups)) * math.prod(window.sizes)


def _composed(outer: Kernel, inner: Kernel, sizes: Axes) -> np.ndarray:
    # Depthwise, on either side: one of the two has a single position, so that their positions broadcast.
    if outer.weight.shape[1:3] == (1, 1):
        return inner.weight * outer.weight.reshape(*inner.weight.shape[:2], 1, *outer.window.sizes)
    if inner.weight.shape[1:3] == (1, 1):
        return outer.weight * inner.weight.reshape(outer.groups, 1, outer.weight.shape[2], *inner.window.sizes)
    groups = math.gcd(outer.groups, inner.groups)
    held = outer.weight.size + inner.weight.size
    for count in (outer.outputs * outer.inputs, inner.outputs * inner.inputs, outer.outputs * inner.inputs):
        check_size(count * math.prod(sizes) // groups, held)
    one, two = (_regrouped(kernel.weight, groups) for kernel in (outer, inner))
    # (groups, positions, outputs, between) @ (groups, positions, between, inputs); one of them has a single position.
    left, right = (weight.reshape(*weight.shape[:3], -1).transpose(0, 3, 1, 2) for weight in (one, two))
    product = np.matmul(left, right).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(product).reshape(groups, one.shape[1], two.shape[2], *sizes)


def _regrouped(weight: np.ndarray, groups: int) -> np.ndarray:
    """Return the weight in fewer groups, with zeros between those that were apart."""
    if weight.shape[0] == groups:
        return weight
    ratio = weight.shape[0] // groups
    wide = np.zeros((groups, ratio * weight.shape[1], ratio * weight.shape[2], *weight.shape[3:]))
    _add_blocks(wide, weight, tuple(slice(None) for _ in weight.shape[3:]))
    return wide


def _add_blocks(target: np.ndarray, weight: np.ndarray, places: tuple[slice, ...]) -> None:
    """Adds `weight` to `target`, which has fewer groups or as many, at the positions `places`."""
    ratio = weight.shape[0] // target.shape[0]
    blocks = weight.reshape(target.shape[0], ratio, *weight.shape[1:])
    wide = target.reshape(target.shape[0], ratio, weight.shape[1], ratio, weight.shape[2], *target.shape[3:])
    diagonal = np.arange(ratio)
    # Two arrays as indices with a slice between them: their axis comes first.
    index: tuple[Any, ...] = (slice(None), diagonal, slice(None), diagonal, slice(None), *places)
    wide[index] += blocks.swapaxes(0, 1)


def _peak(weight: np.ndarray) -> np.ndarray:
    axes = tuple(range(2, weight.ndim))
    return np.abs(weight).max(axis=axes, initial=0.0).reshape(-1)


def _sum(one: Axes, two: Axes) -> Axes:
    return tuple(first + second for first, second in zip(one, two, strict=True))


# Read the window of a Conv or a pool, and the zeros of a Pad.


def read_window(node: ir.Node, sizes: tuple[int, ...]) -> Window:
    """Return the window of a Conv or a pool. Raise Refused where its padding depends on the size of the input."""
    rank = len(sizes)
    strides = get_ints(node, "strides") or (1,) * rank
    dilations = get_ints(node, "dilations") or (1,) * rank
    pads = get_ints(node, "pads") or (0,) * 2 * rank
    if (len(strides), len(dilations), len(pads)) != (rank, rank, 2 * rank):
        raise Refused("shape", f"the strides, dilations or pads of {label(node)} are not those of {rank} axes")
    if (get_ints(node, "kernel_shape") or sizes) != sizes:
        raise Refused("shape", f"the kernel_shape of {label(node)} is not that of its weight")
    if min((1, *sizes, *strides, *dilations)) < 1:
        raise Refused("bad-attribute", f"{label(node)} has a size, a stride or a dilation below 1")
    begins, ends = pads[:rank], pads[rank:]
    auto_pad = get_string(node, "auto_pad", "NOTSET")
    if auto_pad not in ("NOTSET", "") and any(pads):
        raise Refused("padding", f"{label(node)} has pads and auto_pad")
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        if any(stride != 1 for stride in strides):
            raise Refused("padding", f"the padding of {label(node)} depends on the size of its input")
        totals = [dilation * (size - 1) for size, dilation in zip(sizes, dilations, strict=True)]
        less = tuple(total // 2 for total in totals)
        more = tuple(total - half for total, half in zip(totals, less, strict=True))
        begins, ends = (less, more) if auto_pad == "SAME_UPPER" else (more, less)
    elif auto_pad not in ("NOTSET", "", "VALID"):
        raise Refused("padding", f"{label(node)} has the unknown auto_pad {auto_pad!r}")
    return Window(tuple(sizes), begins, ends, tuple(strides), tuple(dilations))


def read_zeros(node: ir.Node, rank: int, context: Context) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Zeros that a Pad adds before and behind each axis of positions. Refused where it does something else."""
    pads = read_pads(node, rank, context)
    cropped = any(number < 0 for pair in pads for number in pair)
    if cropped or get_string(node, "mode", "constant") != "constant" or read_fill(node, context) != 0:
        raise Refused("padding", f"{label(node)} crops, or pads with something else than zeros")
    if any(map(any, pads[:2])):
        raise Refused("axis", f"{label(node)} pads the channels or the batch")
    begins, ends = zip(*pads[2:], strict=True) if rank > 2 else ((), ())
    return begins, ends
