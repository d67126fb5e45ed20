"""Conv of any rank, with any groups.

    x -> Conv(W, b) -> map    =    x -> Conv(k W, k (b - c) + t)       any padding
    x -> map -> Conv(W, b)    =    x -> Conv(W k, b + sum W h)         without zero padding, or h = 0

    z[g, o] = sum_j W[g, o, j] * x[g, j] + b[g, o]

with g the group, o the output channel in the group, j input channel in the group and kernel position. So k goes to the
rows o of W behind a Conv, to its columns j in front of one. Only the finished sum is mapped behind it, so every padding,
stride, dilation and group is allowed. In front of it padding inserts zeros behind the map, where the moved map would see h.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.folding.placing import Rule, Search
from bnexport.graph.constants import Described
from bnexport.graph.nodes import Refused, get_int, input_at, only_attributes, padded

_ATTRIBUTES = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    weight, view = grouped(node, axis, search.context, _ATTRIBUTES)
    if weight.shape[0] != affine.channels:
        raise Refused("shape", f"Conv makes {weight.shape[0]} channels, the map has {affine.channels}")
    rows = (view[0], view[1], *[1] * (len(view) - 2))
    scale, shift = affine.scale.reshape(rows), affine.shift.reshape(rows)
    search.plan.scale(node, 1, scale, "Conv weight", view, shift=shift, products=math.prod(view[2:]))
    map_bias(node, affine, weight.dtype, search)


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    if index != 0:
        raise Refused("not-data", "the map would change a Conv's weight or bias that is not a constant")
    weight, view = grouped(node, axis, search.context, _ATTRIBUTES)
    if view[0] * view[2] != affine.channels:
        raise Refused("shape", f"Conv reads {view[0] * view[2]} channels, the map has {affine.channels}")
    columns = (view[0], 1, view[2], *[1] * (len(view) - 3))
    if not affine.is_scaling:
        if padded(node):
            raise Refused("padding", "the Conv pads with zeros, which the shift would change at the borders")
        add_to_bias(node, affine.offset.reshape(columns), view, (0, 1), weight.dtype, search)
    search.plan.scale(node, 1, affine.scale.reshape(columns), "Conv weight", view)


def map_bias(node: ir.Node, affine: ChannelAffine, dtype: np.dtype, search: Search, index: int = 2) -> None:
    """Apply the map to the bias (input `index`), which is created if absent and not 0."""
    bias = _bias(node, affine.channels, search, index)
    if not bias.any() and affine.is_scaling:
        return
    size = np.abs(affine.scale) * (np.abs(bias) + np.abs(affine.center)) + np.abs(affine.shift)
    search.plan.replace(node, index, affine.apply(bias), dtype, f"{node.op_type} bias", size)


def add_to_bias(
    node: ir.Node, offset: np.ndarray, view: tuple[int, ...], kept: tuple[int, ...], dtype: np.dtype, search: Search
) -> None:
    """Add the sums of W * offset over all axes except those of the output channels, `kept`, to the bias."""
    total, size = search.plan.sums(node, 1, offset, view, kept, f"{node.op_type} weight")
    bias = _bias(node, total.size, search)
    size = np.abs(bias) + size.reshape(-1)
    search.plan.replace(node, 2, bias + total.reshape(-1), dtype, f"{node.op_type} bias", size)


def grouped(
    node: ir.Node, axis: int, context: Context, attributes: tuple[str, ...], index: int = 1
) -> tuple[Described, tuple[int, ...]]:
    """Return the weight, and its shape as (groups, rows, columns, kernel...); a ConvTranspose's has input channels as
    rows. index: of the weight.
    """
    only_attributes(node, attributes)
    if axis != 1:
        raise Refused("axis", f"the map acts on axis {axis}, a {node.op_type}'s channels are axis 1")
    weight = context.constants.describe(input_at(node, index), f"{node.op_type} weight")
    group = get_int(node, "groups" if "groups" in node.attributes else "group", 1)
    if weight.ndim < 3 or group < 1 or weight.shape[0] % group:
        raise Refused("shape", f"a {node.op_type} weight of shape {weight.shape} with {group} groups")
    return weight, (group, weight.shape[0] // group, *weight.shape[1:])


def _bias(node: ir.Node, channels: int, search: Search, index: int = 2) -> np.ndarray:
    slot = (node, index)
    if input_at(node, index) is None and slot not in search.context.edits and slot not in search.plan.edits:
        return np.zeros(channels)
    bias = search.plan.value(node, index, f"{node.op_type} bias")
    if bias.shape != (channels,):
        raise Refused("shape", f"the {node.op_type} bias has shape {bias.shape}, expected ({channels},)")
    return bias


RULE = Rule(
    "conv",
    ("Conv",),
    backward,
    forward,
    into="convolutions",
    forms="Conv 1-D, 2-D, 3-D; groups, depthwise",
    behind="W' = k W, b' = k (b - c) + t; any padding",
    front="W' = W k, b' = b + sum W h; an offset needs a Conv without padding",
)
