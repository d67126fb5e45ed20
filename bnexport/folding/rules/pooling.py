"""Pooling of positions within a channel.

    x -> mean -> map         =    x -> map -> mean
    x -> sum -> scale        =    x -> scale -> sum
    x -> maximum -> map      =    x -> map -> maximum        k > 0

Means:  where padding zeros are counted, or a window may hang over the border (ceil_mode, whose divisor runtimes do not agree
        on), the offset would be divided wrongly: only a scale.
Sums:   how often an offset would be added depends on the sizes: only a scale.
Maxima: for k > 0 order is kept, and padding is -infinity on both sides. For k <= 0 the maximum becomes a minimum: refused.

A window of padding alone, which dilation allows, has a fixed value: 0, or the lowest number in a maximum. Where there
may be one, a maximum passes no map and a mean only a scale.
"""

from __future__ import annotations

import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.folding.placing import Rule, Search, check_axis
from bnexport.graph.nodes import (
    Refused,
    from_front,
    get_flag,
    get_ints,
    label,
    only_attributes,
    padded,
    required_input,
    used,
)

_ATTRIBUTES = {
    "AveragePool": ("auto_pad", "ceil_mode", "count_include_pad", "dilations", "kernel_shape", "pads", "strides"),
    "GlobalAveragePool": (),
    "GlobalMaxPool": (),
    "MaxPool": ("auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "storage_order", "strides"),
}
_REDUCTIONS = ("ReduceMean", "ReduceSum")


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    value = required_input(node)
    if node.op_type in _REDUCTIONS:
        _refuse_shift(node, affine)
        axis = _before_reduction(node, value, axis, search.context)
    else:
        _check(node, axis, affine, search.context)
    search.backward(value, axis, affine)


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    value = required_input(node)
    if node.op_type in _REDUCTIONS:
        _refuse_shift(node, affine)
        axis = _behind_reduction(node, value, axis, search.context)
    else:
        _check(node, axis, affine, search.context)
    search.forward(node.outputs[0], axis, affine)


def _refuse_shift(node: ir.Node, affine: ChannelAffine) -> None:
    if node.op_type == "ReduceSum" and not affine.is_scaling:
        raise Refused("shift", f"{label(node)} adds as many shifts as it adds elements, so it passes a scale only")


def _check(node: ir.Node, axis: int, affine: ChannelAffine, context: Context) -> None:
    only_attributes(node, _ATTRIBUTES[node.op_type])
    check_axis(node, axis)
    if any(used(output) for output in node.outputs[1:]):
        raise Refused("indices", f"the indices of {label(node)} are used")
    if node.op_type in ("MaxPool", "GlobalMaxPool"):
        if not (affine.scale > 0).all():
            raise Refused("order", f"a maximum ({label(node)}) passes positive scales only")
        _refuse_empty_windows(node, context)
        return
    if node.op_type == "AveragePool" and not affine.is_scaling:
        counts_padding = context.opset < 7 or get_flag(node, "count_include_pad")
        if (counts_padding and padded(node)) or get_flag(node, "ceil_mode"):
            raise Refused("shift", f"{label(node)} averages over padding, so it passes a scale only")
        _refuse_empty_windows(node, context)


def _refuse_empty_windows(node: ir.Node, context: Context) -> None:
    """Refuse a pooling of which a window may lie in padding alone: its elements may be on both sides of the data."""
    value = required_input(node)
    kernel, dilations = get_ints(node, "kernel_shape") or (), get_ints(node, "dilations") or ()
    if not padded(node):
        return
    pads = get_ints(node, "pads") or (0,) * (2 * len(kernel))
    for place, (count, step) in enumerate(zip(kernel, dilations, strict=False)):
        size = context.size(value, 2 + place)
        reach = (count - 1) * step
        beyond = max(pads[place], pads[place + len(kernel)]) > reach
        if step > 1 and (beyond or not isinstance(size, int) or size < step):
            raise Refused("padding", f"a window of {label(node)} may lie in its padding alone")


def _reduced(node: ir.Node, value: ir.Value, context: Context) -> tuple[tuple[int, ...], bool]:
    """Return the axes that are reduced, and whether they stay with size 1."""
    rank = context.known_rank(value, node)
    only_attributes(node, ("axes", "keepdims", "noop_with_empty_axes"))
    axes = context.constants.axes(node, 18 if node.op_type == "ReduceMean" else 13)
    if not axes:
        raise Refused("axis", f"{label(node)} reduces over every axis")
    axes = tuple(sorted(from_front(axes, rank)))
    if any(context.size(value, axis) == 0 for axis in axes):
        raise Refused("shape", f"{label(node)} reduces no elements")
    return axes, get_flag(node, "keepdims", True)


def _behind_reduction(node: ir.Node, value: ir.Value, axis: int, context: Context) -> int:
    axes, keep = _reduced(node, value, context)
    if axis in axes:
        raise Refused("axis", f"{label(node)} reduces the channels")
    return axis if keep else axis - sum(reduced < axis for reduced in axes)


def _before_reduction(node: ir.Node, value: ir.Value, axis: int, context: Context) -> int:
    axes, keep = _reduced(node, value, context)
    if not keep:
        for reduced in axes:
            if reduced <= axis:
                axis += 1
    if axis in axes:
        raise Refused("axis", f"{label(node)} reduces the channels")
    return axis


RULE = Rule(
    "pooling",
    (*_ATTRIBUTES, *_REDUCTIONS),
    backward,
    forward,
    forms="AveragePool, GlobalAveragePool, ReduceMean, ReduceSum, MaxPool, GlobalMaxPool",
    behind="means pass; only a scaling where padding is counted, and through sums; maxima pass k > 0",
    front="as backward",
)
