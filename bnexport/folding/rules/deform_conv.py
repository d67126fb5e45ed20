"""DeformConv (opset 19 and 22), and MMCV's MMCVDeformConv2d and MMCVModulatedDeformConv2d.

    x, offset, mask -> DeformConv(W, b) -> map    =    x, offset, mask -> DeformConv(k W, k (b - c) + t)
    x -> k x -> DeformConv(W, b)                  =    x -> DeformConv(W k, b)

    z[g, o] = sum_j W[g, o, j] * m[j] * x[g](position j + offset j) + b[g, o]

with g the group, o the output channel in the group, j input channel in the group and kernel position: linear in W and b,
whatever offset and mask are. MMCVDeformConv2d has no bias, so it takes only a scale. In front of the data only a scale
moves, since a zero is read outside of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.placing import Rule, Search
from bnexport.folding.rules.conv import grouped, map_bias
from bnexport.graph.nodes import Refused


class _Deformable(NamedTuple):
    """Places of the weight and the bias among the inputs; attributes, the number of groups first."""

    weight: int
    bias: int | None
    attributes: tuple[str, ...]


_MMCV = ("groups", "deform_groups", "dilation", "padding", "stride")
_OPERATORS = {
    "DeformConv": _Deformable(1, 3, ("group", "dilations", "kernel_shape", "offset_group", "pads", "strides")),
    "MMCVDeformConv2d": _Deformable(2, None, (*_MMCV, "bias", "im2col_step")),
    "MMCVModulatedDeformConv2d": _Deformable(3, 4, _MMCV),
}


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    own = _OPERATORS[node.op_type]
    weight, view = grouped(node, axis, search.context, own.attributes, own.weight)
    if weight.shape[0] != affine.channels:
        raise Refused("shape", f"{node.op_type} makes {weight.shape[0]} channels, the map has {affine.channels}")
    if own.bias is None and not affine.is_scaling:
        raise Refused("shift", f"{node.op_type} has no bias to take the shift")
    rows = (view[0], view[1], *[1] * (len(view) - 2))
    scale, shift = affine.scale.reshape(rows), affine.shift.reshape(rows)
    what = f"{node.op_type} weight"
    search.plan.scale(node, own.weight, scale, what, view, shift=shift, products=math.prod(view[2:]))
    if own.bias is not None:
        map_bias(node, affine, weight.dtype, search, own.bias)


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    own = _OPERATORS[node.op_type]
    if index != 0:
        raise Refused("not-data", f"the map would change input {index} of a {node.op_type}")
    _, view = grouped(node, axis, search.context, own.attributes, own.weight)
    if view[0] * view[2] != affine.channels:
        raise Refused("shape", f"{node.op_type} reads {view[0] * view[2]} channels, the map has {affine.channels}")
    if not affine.is_scaling:
        raise Refused("padding", f"{node.op_type} reads zeros outside of its data, which the shift would change")
    columns = (view[0], 1, view[2], *[1] * (len(view) - 3))
    search.plan.scale(node, own.weight, affine.scale.reshape(columns), f"{node.op_type} weight", view)


RULE = Rule(
    "deform_conv",
    tuple(_OPERATORS),
    backward,
    forward,
    domains=("", "mmcv", "mmdeploy"),
    into="deformable convolutions",
    forms="DeformConv; MMCVDeformConv2d, MMCVModulatedDeformConv2d of mmcv and mmdeploy",
    behind="as `conv`, whatever offset and mask are; MMCVDeformConv2d has no bias",
    front="W' = W k; zeros are read outside of the data, so no offset",
)
