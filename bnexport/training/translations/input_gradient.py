"""Gradient of a convolution by its input, in the form that ONNX Runtime computes fastest.

    dx[n, c, y] = sum over o, k, i with s i + d k - p = y of  w[o, c, k] g[n, o, i]

`choose` picks the form by the shapes. CPU time of each, one thread, as a multiple of torch's
(benchmarks/bench_conv_gradient.py):

    form         what it is                                 dense 3x3    8 x 8 and less    1x1          depthwise
    TRANSPOSED   ConvTranspose of g                         1.0 - 1.3    1.8 - 2.0         0.3 - 0.9    1.4 - 5.3
    TURNED       Conv of g, the kernel turned around        1.2 - 1.4    2.2 - 2.7         0.2 - 0.6    1.6 - 4.9
    SUMMED       one product for all images, taps added     1.5 - 1.8    1.3 - 1.4         0.1 - 1.5

ConvTranspose multiplies image by image and group by group: bad for small images and many groups.
TURNED and SUMMED want a stride of 1. What lost for larger strides: zeros put into g (2.6 - 9.5), a Conv for each
phase of the output (1.0 - 3.5; ConvTranspose 0.3 - 1.4 dense, 1.3 - 4.9 depthwise). For a stride of 1:
Col2Im after a product (1.1 - 3.8), taps of g gathered for one product (1.3 - 3.0), products added one to the next
(1.5 - 2.0); depthwise, taps times weights channels last (4.3 - 14) and products with banded matrices (2.5 - 14).
"""

from __future__ import annotations

import enum
import itertools
import math
from typing import Any

from bnexport.training.translations.geometry import MANY_TAPS, Geometry
from bnexport.training.translations.values import ints, op, reshape

_SMALL_PLANE = 64


class InputGradientForm(enum.Enum):
    TRANSPOSED = "transposed"
    TURNED = "turned"
    SUMMED = "summed"


def possible(shape: Geometry, form: InputGradientForm) -> bool:
    if form is InputGradientForm.TRANSPOSED:
        return True
    if any(s > 1 for s in shape.stride):
        return False
    if form is InputGradientForm.TURNED:
        return all(p <= d * (k - 1) for p, d, k in zip(shape.padding, shape.dilation, shape.kernel))
    return shape.groups == 1 and math.prod(shape.kernel) <= MANY_TAPS


def choose(shape: Geometry) -> InputGradientForm:
    """Choose the form for a shape; a pure function, so that a graph is the same on every machine."""
    if possible(shape, InputGradientForm.TURNED) and (math.prod(shape.kernel) == 1 or shape.groups > 1):
        return InputGradientForm.TURNED
    if possible(shape, InputGradientForm.SUMMED) and math.prod(shape.plane) <= _SMALL_PLANE:
        return InputGradientForm.SUMMED
    return InputGradientForm.TRANSPOSED


def input_gradient(g: Any, weight: Any, shape: Geometry, form: InputGradientForm | None = None) -> Any:
    """Compute dx (N, channels, *extents) of g (N, outputs, *plane) and weight (outputs, channels / groups, *kernel)."""
    function = {
        InputGradientForm.TRANSPOSED: _transposed,
        InputGradientForm.TURNED: _turned,
        InputGradientForm.SUMMED: _summed,
    }[form or choose(shape)]
    return function(g, weight, shape)


def _transposed(g: Any, weight: Any, shape: Geometry) -> Any:
    axes = zip(shape.extents, shape.plane, shape.kernel, shape.stride, shape.padding, shape.dilation)
    return op.ConvTranspose(
        g,
        weight,
        strides=shape.stride,
        pads=shape.padding * 2,
        dilations=shape.dilation,
        # What the forward's division by the stride left over at the end of each dimension.
        output_padding=[x - ((i - 1) * s - 2 * p + d * (k - 1) + 1) for x, i, k, s, p, d in axes],
        group=shape.groups,
    )


def _turned(g: Any, weight: Any, shape: Geometry) -> Any:
    ends = [d * (k - 1) - p for p, d, k in zip(shape.padding, shape.dilation, shape.kernel)]
    kernel = _exchanged(weight, shape)
    if math.prod(shape.kernel) > 1:
        backwards = [-1] * shape.rank
        before_start = [-k - 1 for k in shape.kernel]
        kernel = op.Slice(kernel, ints(backwards), ints(before_start), ints(shape.spatial), ints(backwards))
    return op.Conv(g, kernel, pads=ends * 2, dilations=shape.dilation, group=shape.groups)


def _exchanged(weight: Any, shape: Geometry) -> Any:
    """Swap the first two axes within groups: (O, C / G, *K) becomes (C, O / G, *K)."""
    groups = shape.groups
    ins, outs = shape.channels // groups, shape.outputs // groups
    if ins == outs == 1:
        return weight
    split = reshape(weight, [groups, outs, ins, *shape.kernel])
    exchanged = op.Transpose(split, perm=[0, 2, 1, *(axis + 1 for axis in shape.spatial)])
    return reshape(exchanged, [shape.channels, outs, *shape.kernel])


def _summed(g: Any, weight: Any, shape: Geometry) -> Any:
    """Multiply g (N *plane, O) by weight (O, *K C), then add each tap's (N, *plane, C) at its position."""
    taps = math.prod(shape.kernel)
    rows = reshape(op.Transpose(g, perm=[0, *shape.spatial, 1]), [-1, shape.outputs])
    columns = reshape(op.Transpose(weight, perm=[0, *shape.spatial, 1]), [shape.outputs, taps * shape.channels])
    product = reshape(op.Gemm(rows, columns), [-1, *shape.plane, taps, shape.channels])
    moved = []
    for index, position in enumerate(itertools.product(*(range(k) for k in shape.kernel))):
        tap = op.Squeeze(
            op.Slice(product, ints([index]), ints([index + 1]), ints([shape.rank + 1])), ints([shape.rank + 1])
        )
        # A negative padding crops.
        starts = [k * d - p for k, d, p in zip(position, shape.dilation, shape.padding)]
        ends = [x - i - start for x, i, start in zip(shape.extents, shape.plane, starts)]
        moved.append(op.Pad(tap, ints([0, *starts, 0, 0, *ends, 0])))
    return op.Transpose(op.Sum(*moved), perm=[0, shape.rank + 1, *range(1, shape.rank + 1)])
