"""Add, Sub, Mul and Div between a map and its place. k: scale, c: center, t: shift, h: offset, along one axis.

Backward:

    k (u + v - c) + t = [k (u - c) + t] + [k v]          both operands take their share
    k (u - v - c) + t = [k (u - c) + t] - [k v]
    k (u * v)         = [k u] * v = u * [k v]            a scale goes into either operand
    k (u / v)         = [k u] / v

A constant operand takes its share in place, if it stays as small as it was or as the channels; the
other operand takes only the scale. A shift alone (k = 1) goes into one operand of a sum, the other stays.
Operands of different rank do not share the axis, and one that is broadcast along it has other channels: refused,
since its values would be more than they were, for all that declares or asks their sizes.

Forward, u being the mapped operand:

    (k u + h) + d = k (u + (d + h) / k)                  d a constant, which takes the shift
    (u + h) + v = (u + v) + h                            a shift passes a sum
    (k u) * v = k (u * v),  (k u) / v = k (u / v)        a scale passes a product
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.placing.search import Rule, Search
from bnexport.folding.reading.site import keeps_channels
from bnexport.graph.nodes import input_at, label, only_attributes
from bnexport.graph.refusal import Refused


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    context = search.context
    if context.opset < 7:
        raise Refused("opset", f"{node.op_type} before opset 7 broadcasts by an attribute")
    only_attributes(node, ())
    first, second = input_at(node, 0), input_at(node, 1)
    rank = context.rank(node.outputs[0])
    if first is None or second is None or rank is None:
        raise Refused("rank", f"the rank of {label(node)} is not known")
    constant = [context.constants.is_constant(value) for value in (first, second)]
    if all(constant):
        raise Refused("constant", f"{label(node)} is a constant itself")
    if node.op_type in ("Add", "Sub"):
        if any(constant):
            _sum_with_constant(node, axis, affine, rank, constant.index(True), search)
            return
        if affine.is_shift:
            _either(node, axis, affine, rank, search)
            return
        _operand(node, 0, axis, affine, rank, search)
        _operand(node, 1, axis, affine.only_scale(), rank, search)
        return
    if not affine.is_scaling:
        raise Refused("shift", f"{label(node)} multiplies, so it cannot take a shift")
    if constant[0] or (constant[1] and node.op_type == "Mul"):
        _scale_constant(node, constant.index(True), axis, affine.scale, rank, search)
    elif constant[1] or node.op_type == "Div":
        _operand(node, 0, axis, affine, rank, search)
    else:
        _either(node, axis, affine, rank, search)


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    context = search.context
    if context.opset < 7:
        raise Refused("opset", f"{node.op_type} before opset 7 broadcasts by an attribute")
    only_attributes(node, ())
    rank = context.rank(node.outputs[0])
    data, other = input_at(node, index), input_at(node, 1 - index)
    if data is None or other is None or rank is None or context.rank(data) != rank:
        raise Refused("rank", f"the rank of {label(node)} is not known, or is not that of its operand")
    if node.op_type in ("Mul", "Div"):
        if not affine.is_scaling or (node.op_type == "Div" and index == 1):
            raise Refused("shift", f"{label(node)} multiplies, so only a scale passes, and no divisor")
        search.forward(node.outputs[0], axis, affine)
    elif context.constants.is_constant(other):
        _sum_takes_shift(node, index, axis, affine, rank, search)
    elif affine.is_shift:
        sign = -1.0 if node.op_type == "Sub" and index == 1 else 1.0
        search.forward(node.outputs[0], axis, ChannelAffine.shifting(sign * affine.offset))
    else:
        raise Refused("no-rule", f"{label(node)} adds something that is not scaled")


def _sum_takes_shift(node: ir.Node, index: int, axis: int, affine: ChannelAffine, rank: int, search: Search) -> None:
    """Move the shift into the constant d of (k u + h) + d, (k u + h) - d or d - (k u + h); k moves on."""
    inverse = affine.inverse_scale(search.context.options.max_scale)
    values = search.plan.value(node, 1 - index, f"{node.op_type} constant")
    sign = 1.0 if node.op_type == "Add" else -1.0
    shift, scale = (_aligned(part, axis, rank) for part in (sign * affine.offset, inverse))
    total = (values + shift) * scale
    size = (np.abs(values) + np.abs(shift)) * np.abs(scale)
    _store(node, 1 - index, total, size, values.size, affine.channels, rank, search)
    if not affine.is_shift:
        search.forward(node.outputs[0], axis, affine.only_scale())


def _sum_with_constant(node: ir.Node, axis: int, affine: ChannelAffine, rank: int, index: int, search: Search) -> None:
    """Move center and shift into the constant of u + v or u - v; the other operand takes the scale."""
    values = search.plan.value(node, index, f"{node.op_type} constant")
    _refuse_more_channels(node, index, axis, affine.channels, values, search)
    scale, center, shift = (_aligned(part, axis, rank) for part in (affine.scale, affine.center, affine.shift))
    # As the subtrahend the constant v stands for -v.
    sign = -1.0 if node.op_type == "Sub" and index == 1 else 1.0
    total = sign * ((sign * values - center) * scale + shift)
    size = (np.abs(values) + np.abs(center)) * np.abs(scale) + np.abs(shift)
    _store(node, index, total, size, values.size, affine.channels, rank, search)
    if not affine.is_shift:
        _operand(node, 1 - index, axis, affine.only_scale(), rank, search)


def _scale_constant(node: ir.Node, index: int, axis: int, scale: np.ndarray, rank: int, search: Search) -> None:
    values = search.plan.value(node, index, f"{node.op_type} constant")
    _refuse_more_channels(node, index, axis, scale.size, values, search)
    total = values * _aligned(scale, axis, rank)
    _store(node, index, total, np.abs(total), values.size, scale.size, rank, search)


def _refuse_more_channels(
    node: ir.Node, index: int, axis: int, channels: int, values: np.ndarray, search: Search
) -> None:
    """Refuse to give a constant of one element a value for each channel unless the data has as many channels."""
    if values.size == 1 < channels and not keeps_channels(node, 1 - index, axis, channels, search.context):
        raise Refused("shape", f"the data of {label(node)} is not known to have {channels} channels")


def _store(
    node: ir.Node,
    index: int,
    total: np.ndarray,
    size: np.ndarray,
    before: int,
    channels: int,
    rank: int,
    search: Search,
) -> None:
    if total.ndim > rank or total.size > max(before, channels):
        raise Refused("too-large", f"the constant of {label(node)} would grow from {before} to {total.size} elements")
    dtype = search.context.constants.describe(input_at(node, index), "constant").dtype
    search.plan.replace(node, index, total, dtype, f"{node.op_type} constant", size)


def _operand(node: ir.Node, index: int, axis: int, affine: ChannelAffine, rank: int, search: Search) -> None:
    value = input_at(node, index)
    assert value is not None
    if search.context.rank(value) != rank:
        raise Refused("rank", f"an operand of {label(node)} broadcasts from another rank")
    if search.context.size(value, axis) not in (None, affine.channels):
        raise Refused("shape", f"an operand of {label(node)} is broadcast to the {affine.channels} channels of the map")
    search.backward(value, axis, affine)


def _either(node: ir.Node, axis: int, affine: ChannelAffine, rank: int, search: Search) -> None:
    """Move the shift into the first operand, or else the second. A subtrahend is shifted with the opposite sign."""
    try:
        with search.plan.trial():
            _operand(node, 0, axis, affine, rank, search)
    except Refused:
        if node.op_type == "Sub":
            affine = ChannelAffine.shifting(-affine.offset)
        _operand(node, 1, axis, affine, rank, search)


def _aligned(vector: np.ndarray, axis: int, rank: int) -> np.ndarray:
    """Reshape the vector along `axis`, without leading dimensions of size 1."""
    return vector.reshape(-1, *[1] * (rank - axis - 1))


RULE = Rule("elementwise", ("Add", "Sub", "Mul", "Div"), backward, forward)
