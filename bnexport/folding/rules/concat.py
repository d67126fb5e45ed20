"""Concat along the channels, or along another axis.

    u, v -> Concat along channels -> map      =    u -> its part of the map, v -> its part of the map -> Concat
    u, v -> Concat along another -> map       =    u -> map, v -> map -> Concat
    u -> map, v -> Concat along channels      =    u, v -> Concat -> map of the channels of u, identity for those of v

With operands of C1, C2, ... channels the map (k, c, t) splits into (k[:C1], ...), (k[C1:C1+C2], ...). A constant operand is
mapped in place.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.folding.placing import Rule, Search
from bnexport.graph.nodes import Refused, get_int, label, only_attributes, required_input


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    values = _operands(node)
    if _concat_axis(node, search.context) != axis:
        parts = [affine] * len(values)
    else:
        sizes = _sizes(node, values, axis, search.context)
        if sum(sizes) != affine.channels:
            raise Refused("shape", f"{label(node)} joins {sum(sizes)} channels, the map has {affine.channels}")
        ends = np.cumsum(sizes)
        parts = [affine.take(slice(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    for index, (value, part) in enumerate(zip(values, parts, strict=True)):
        if search.context.constants.is_constant(value):
            _map_constant(node, index, axis, part, search)
        else:
            search.backward(value, axis, part)


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    if _concat_axis(node, search.context) != axis:
        raise Refused("concat", f"{label(node)} joins the mapped channels with others along another axis")
    if node.inputs.count(node.inputs[index]) > 1:
        raise Refused("shared", f"{label(node)} joins the same value twice")
    # Many batch norms may meet in one Concat, and the sizes stay.
    ends = search.context.memory.get((node, axis))
    if ends is None:
        ends = np.cumsum([0, *_sizes(node, _operands(node), axis, search.context)])
        search.context.memory[node, axis] = ends
    own = slice(ends[index], ends[index + 1])
    if own.stop - own.start != affine.channels:
        raise Refused("shape", f"operand {index} of {label(node)} does not have {affine.channels} channels")
    search.forward(node.outputs[0], axis, affine.spread(own, int(ends[-1])))


def _operands(node: ir.Node) -> list[ir.Value]:
    only_attributes(node, ("axis",))
    return [required_input(node, index) for index in range(max(len(node.inputs), 1))]


def _concat_axis(node: ir.Node, context: Context) -> int:
    # The default of 1 is opset 1's; later opsets always write the axis.
    axis = get_int(node, "axis", 1)
    if axis < 0:
        axis += context.known_rank(node.outputs[0], node)
    return axis


def _sizes(node: ir.Node, values: list[ir.Value], axis: int, context: Context) -> list[int]:
    sizes = [context.size(value, axis) for value in values]
    if any(size is None for size in sizes):
        raise Refused("shape", f"the channels of an operand of {label(node)} are not known")
    return [size for size in sizes if size is not None]


def _map_constant(node: ir.Node, index: int, axis: int, part: ChannelAffine, search: Search) -> None:
    what = f"{label(node)} constant"
    values = search.plan.value(node, index, what)
    if values.shape[axis : axis + 1] != (part.channels,):
        raise Refused("shape", f"the {what} of shape {values.shape} does not fit the map")
    dtype = search.context.constants.describe(node.inputs[index], what).dtype
    search.plan.map(node, index, axis, part, dtype, what, values)


RULE = Rule(
    "concat",
    ("Concat",),
    backward,
    forward,
    any_input=True,
    forms="Concat",
    behind="along the channels the map splits; along another axis all operands take it",
    front="along the channels: identity for the others",
)
