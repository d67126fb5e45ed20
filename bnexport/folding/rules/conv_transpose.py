"""ConvTranspose of any rank, with any groups. Its weight is (input channels, output channels / groups, kernel).

    x -> ConvTranspose(W, b) -> map    =    x -> ConvTranspose(W k, k (b - c) + t)
    x -> map -> ConvTranspose(W, b)    =    x -> ConvTranspose(k W, b + sum W h)       kernel 1, stride 1, no padding, or h = 0

    z[g, o] = sum_i W[g, i, o] * x[g, i] (placed by stride and dilation, cut by pads) + b[g, o]

Behind it the bias reaches every position, those that output_padding adds included. In front of it the number of products
that meet depends on the position, so an offset moves only where each position has exactly one.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.placing import Rule, Search
from bnexport.folding.rules.conv import add_to_bias, grouped, map_bias
from bnexport.graph.constants import Described
from bnexport.graph.nodes import Refused, get_ints, padded

_ATTRIBUTES = ("auto_pad", "dilations", "group", "kernel_shape", "output_padding", "output_shape", "pads", "strides")


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    weight, view = grouped(node, axis, search.context, _ATTRIBUTES)
    if view[0] * view[2] != affine.channels:
        raise Refused("shape", f"ConvTranspose makes {view[0] * view[2]} channels, the map has {affine.channels}")
    columns = (view[0], 1, view[2], *[1] * (len(view) - 3))
    scale, shift, products = affine.scale.reshape(columns), affine.shift.reshape(columns), view[1] * math.prod(view[3:])
    search.plan.scale(node, 1, scale, "ConvTranspose weight", view, shift=shift, products=products)
    map_bias(node, affine, weight.dtype, search)


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    if index != 0:
        raise Refused("not-data", "the map would change a ConvTranspose's weight or bias that is not a constant")
    weight, view = grouped(node, axis, search.context, _ATTRIBUTES)
    if weight.shape[0] != affine.channels:
        raise Refused("shape", f"ConvTranspose reads {weight.shape[0]} channels, the map has {affine.channels}")
    rows = (view[0], view[1], *[1] * (len(view) - 2))
    if not affine.is_scaling:
        if not _pointwise(node, weight):
            raise Refused("padding", "the ConvTranspose mixes positions, so the shift would differ between them")
        add_to_bias(node, affine.offset.reshape(rows), view, (0, 2), weight.dtype, search)
    search.plan.scale(node, 1, affine.scale.reshape(rows), "ConvTranspose weight", view)


def _pointwise(node: ir.Node, weight: Described) -> bool:
    """Whether each output position comes from exactly one input position."""
    ones = all(size == 1 for size in (*(get_ints(node, "strides") or ()), *weight.shape[2:]))
    zeros = not padded(node) and not any(get_ints(node, "output_padding") or ())
    return ones and zeros and "output_shape" not in node.attributes


RULE = Rule(
    "conv_transpose",
    ("ConvTranspose",),
    backward,
    forward,
    into="transposed convolutions",
    forms="ConvTranspose, groups",
    behind="W'[g,i,o] = W[g,i,o] k[g,o], b' as above",
    front="W' = k W; an offset needs a 1x1 kernel, stride 1, no padding",
)
