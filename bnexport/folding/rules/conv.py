"""Convolutions of any rank, with any groups: Conv, ConvTranspose, DeformConv (opset 19 and 22), and MMCV's MMCVDeformConv2d and
MMCVModulatedDeformConv2d.

    x -> Conv(W, b) -> map             =    x -> Conv(k W, k (b - c) + t)       any padding
    x -> map -> Conv(W, b)             =    x -> Conv(W k, b + sum W h)         without zero padding, or h = 0

    x -> ConvTranspose(W, b) -> map    =    x -> ConvTranspose(W k, k (b - c) + t)
    x -> map -> ConvTranspose(W, b)    =    x -> ConvTranspose(k W, b + sum W h)       kernel 1, stride 1, no padding, or h = 0

    x, offset, mask -> DeformConv(W, b) -> map    =    x, offset, mask -> DeformConv(k W, k (b - c) + t)
    x -> k x -> DeformConv(W, b)                  =    x -> DeformConv(W k, b)

    z[g, o] = sum_j W[g, o, j] * x[g, j] + b[g, o]

with g the group, o the output channel in the group, j input channel in the group and kernel position; a ConvTranspose's weight is
(input channels, output channels / groups, kernel). So k goes to the rows o of W behind a Conv, to its columns j in front of one.

Only the finished sum is mapped behind it, so every padding, stride, dilation, group, offset and mask is allowed; the bias of a
ConvTranspose reaches every position, those that output_padding adds included. MMCVDeformConv2d has no bias, so it takes only a
scale. In front of it padding inserts zeros behind the map, where the moved map would see h. A ConvTranspose has as many products
at a position as meet there, so an offset moves only where each position has exactly one. A DeformConv reads zeros outside of its
data.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.placing import Rule, Search, check_axis
from bnexport.graph.constants import Described
from bnexport.graph.nodes import Refused, get_int, get_ints, input_at, only_attributes, padded


class _Form(NamedTuple):
    """attributes: the known ones, the number of groups first. outputs: the axis of the output channels of one group in the
    weight's view (groups, rows, columns, kernel...). weight, bias: places among the inputs.
    """

    attributes: tuple[str, ...]
    outputs: int = 1
    weight: int = 1
    bias: int | None = 2


_CONV = ("group", "auto_pad", "dilations", "kernel_shape", "pads", "strides")
_MMCV = ("groups", "deform_groups", "dilation", "padding", "stride")
_DEFORMABLE = {
    "DeformConv": _Form(("group", "dilations", "kernel_shape", "offset_group", "pads", "strides"), bias=3),
    "MMCVDeformConv2d": _Form((*_MMCV, "bias", "im2col_step"), weight=2, bias=None),
    "MMCVModulatedDeformConv2d": _Form(_MMCV, weight=3, bias=4),
}
_FORMS = {
    "Conv": _Form(_CONV),
    "ConvTranspose": _Form((*_CONV, "output_padding", "output_shape"), outputs=2),
    **_DEFORMABLE,
}


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    form, what = _FORMS[node.op_type], f"{node.op_type} weight"
    weight, view = _read(node, axis, form, search)
    channels = _channels(node, "makes", view, form.outputs, affine)
    if form.bias is None and not affine.is_scaling:
        raise Refused("shift", f"{node.op_type} has no bias to take the shift")
    scale, shift, products = affine.scale.reshape(channels), affine.shift.reshape(channels), math.prod(view)
    search.plan.scale(node, form.weight, scale, what, view, shift=shift, products=products // max(affine.channels, 1))
    if form.bias is not None:
        bias = search.plan.vector(node, form.bias, affine.channels, f"{node.op_type} bias")
        if bias.any() or not affine.is_scaling:
            search.plan.map(node, form.bias, 0, affine, weight.dtype, f"{node.op_type} bias", bias)


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    form, what = _FORMS[node.op_type], f"{node.op_type} weight"
    weight, view = _read(node, axis, form, search)
    channels = _channels(node, "reads", view, 3 - form.outputs, affine)
    if not affine.is_scaling:
        _check_shift(node, weight)
        total, size = search.plan.sums(node, 1, affine.offset.reshape(channels), view, (0, form.outputs), what)
        search.plan.add(node, 2, total.reshape(-1), size.reshape(-1), weight.dtype, f"{node.op_type} bias")
    search.plan.scale(node, form.weight, affine.scale.reshape(channels), what, view)


def _read(node: ir.Node, axis: int, form: _Form, search: Search) -> tuple[Described, tuple[int, ...]]:
    """Return the weight, and its shape as (groups, rows, columns, kernel...); a ConvTranspose's has input channels as rows."""
    only_attributes(node, form.attributes)
    check_axis(node, axis)
    weight = search.context.constants.describe(input_at(node, form.weight), f"{node.op_type} weight")
    return weight, grouped(node, weight.shape, form.attributes[0])


def grouped(node: ir.Node, shape: tuple[int, ...], name: str = "group") -> tuple[int, ...]:
    """Return the shape of a weight as (groups, rows, columns, kernel...). name: of the attribute that counts the groups."""
    group = get_int(node, name, 1)
    if len(shape) < 3 or group < 1 or shape[0] % group:
        raise Refused("shape", f"a {node.op_type} weight of shape {shape} with {group} groups")
    return (group, shape[0] // group, *shape[1:])


def _channels(node: ir.Node, does: str, view: tuple[int, ...], place: int, affine: ChannelAffine) -> tuple[int, ...]:
    """Return the shape of a vector along one axis of the view. Raises Refused where it has other channels than the map."""
    channels = view[0] * view[place]
    if channels != affine.channels:
        raise Refused("shape", f"{node.op_type} {does} {channels} channels, the map has {affine.channels}")
    return tuple(size if axis in (0, place) else 1 for axis, size in enumerate(view))


def _check_shift(node: ir.Node, weight: Described) -> None:
    """Refuse an operator whose positions do not all get the same share of a shift in front of it."""
    if node.op_type in _DEFORMABLE:
        raise Refused("padding", f"{node.op_type} reads zeros outside of its data, which the shift would change")
    if node.op_type == "ConvTranspose":
        ones = all(size == 1 for size in (*(get_ints(node, "strides") or ()), *weight.shape[2:]))
        moved = padded(node) or any(get_ints(node, "output_padding") or ()) or "output_shape" in node.attributes
        if moved or not ones:
            raise Refused("padding", "the ConvTranspose mixes positions, so the shift would differ between them")
    elif padded(node):
        raise Refused("padding", "the Conv pads with zeros, which the shift would change at the borders")


CONV = Rule(
    "conv",
    ("Conv",),
    backward,
    forward,
    into="convolutions",
    forms="Conv 1-D, 2-D, 3-D; groups, depthwise",
    behind="W' = k W, b' = k (b - c) + t; any padding",
    front="W' = W k, b' = b + sum W h; an offset needs a Conv without padding",
)
CONV_TRANSPOSE = Rule(
    "conv_transpose",
    ("ConvTranspose",),
    backward,
    forward,
    into="transposed convolutions",
    forms="ConvTranspose, groups",
    behind="W'[g,i,o] = W[g,i,o] k[g,o], b' as above",
    front="W' = k W; an offset needs a 1x1 kernel, stride 1, no padding",
)
DEFORM_CONV = Rule(
    "deform_conv",
    tuple(_DEFORMABLE),
    backward,
    forward,
    domains=("", "mmcv", "mmdeploy"),
    into="deformable convolutions",
    forms="DeformConv; MMCVDeformConv2d, MMCVModulatedDeformConv2d of mmcv and mmdeploy",
    behind="as `conv`, whatever offset and mask are; MMCVDeformConv2d has no bias",
    front="W' = W k; zeros are read outside of the data, so no offset",
)
