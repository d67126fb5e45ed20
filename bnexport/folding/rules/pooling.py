"""Pooling of positions within a channel.

Means:  mean(k x + b) = k mean(x) + b. Where padding zeros are counted, or a window may hang over the
        border (ceil_mode, whose divisor runtimes do not agree on), b would be divided wrongly: only a scale.
Maxima: max(k x + b) = k max(x) + b for k > 0: order is kept, and padding is -infinity on both sides.
        For k <= 0 the maximum becomes a minimum: refused.
"""

from __future__ import annotations

import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.folding.placing.search import Rule, Search
from bnexport.folding.rules.conv import padded
from bnexport.graph.nodes import get_int, get_ints, input_at, label, only_attributes, used
from bnexport.graph.refusal import Refused

_ATTRIBUTES = {
    "AveragePool": ("auto_pad", "ceil_mode", "count_include_pad", "dilations", "kernel_shape", "pads", "strides"),
    "GlobalAveragePool": (),
    "GlobalMaxPool": (),
    "MaxPool": ("auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "storage_order", "strides"),
}


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    value = input_at(node, 0)
    if value is None:
        raise Refused("bad-node", f"{label(node)} has no input")
    if node.op_type == "ReduceMean":
        axis = _before_reduction(node, value, axis, search.context)
    else:
        _check(node, axis, affine, search.context)
    search.backward(value, axis, affine)


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    value = input_at(node, 0)
    if index != 0 or value is None:
        raise Refused("not-data", f"the map reaches input {index} of {label(node)}")
    if node.op_type == "ReduceMean":
        axis = _behind_reduction(node, value, axis, search.context)
    else:
        _check(node, axis, affine, search.context)
    search.forward(node.outputs[0], axis, affine)


def _check(node: ir.Node, axis: int, affine: ChannelAffine, context: Context) -> None:
    only_attributes(node, _ATTRIBUTES[node.op_type])
    if axis != 1:
        raise Refused("axis", f"the map acts on axis {axis}, the channels of {label(node)} are axis 1")
    if any(used(output) for output in node.outputs[1:]):
        raise Refused("indices", f"the indices of {label(node)} are used")
    if node.op_type in ("MaxPool", "GlobalMaxPool"):
        if not (affine.scale > 0).all():
            raise Refused("order", f"a maximum ({label(node)}) passes positive scales only")
        return
    if node.op_type == "AveragePool" and not affine.is_scaling:
        counts_padding = context.opset < 7 or get_int(node, "count_include_pad", 0) != 0
        if (counts_padding and padded(node)) or get_int(node, "ceil_mode", 0):
            raise Refused("shift", f"{label(node)} averages over padding, so it passes a scale only")


def _reduced(node: ir.Node, value: ir.Value, context: Context) -> tuple[tuple[int, ...], bool]:
    """Return the axes that the mean reduces, and whether they stay with size 1."""
    rank = context.rank(value)
    if rank is None:
        raise Refused("rank", f"the rank of {label(node)} is not known")
    only_attributes(node, ("axes", "keepdims", "noop_with_empty_axes"))
    axes = get_ints(node, "axes") or ()
    if context.opset >= 18:
        axes = context.constants.ints(input_at(node, 1), f"axes of {label(node)}")
    if not axes:
        raise Refused("axis", f"{label(node)} reduces over every axis")
    return tuple(sorted(axis + rank if axis < 0 else axis for axis in axes)), get_int(node, "keepdims", 1) != 0


def _behind_reduction(node: ir.Node, value: ir.Value, axis: int, context: Context) -> int:
    axes, keep = _reduced(node, value, context)
    if axis in axes:
        raise Refused("axis", f"{label(node)} takes the mean over the channels")
    return axis if keep else axis - sum(reduced < axis for reduced in axes)


def _before_reduction(node: ir.Node, value: ir.Value, axis: int, context: Context) -> int:
    axes, keep = _reduced(node, value, context)
    if not keep:
        for reduced in axes:
            if reduced <= axis:
                axis += 1
    if axis in axes:
        raise Refused("axis", f"{label(node)} takes the mean over the channels")
    return axis


RULE = Rule("pooling", (*_ATTRIBUTES, "ReduceMean"), backward, forward)
