"""Add, Sub, Sum, Mul, Div and Neg between a map and its place, along one axis.

    k (u + v - c) + t = [k (u - c) + t] + [k v]          behind a sum: one operand takes the shift, each the scale
    k (u - v - c) + t = [k (u - c) + t] - [k v]
    k (u * v)         = [k u] * v = u * [k v]            behind a product: either operand takes a scale
    k (u / v)         = [k u] / v
    k (-u - c) + t    = -[k (u + c) - t]
    (k u + h) + d     = k (u + (d + h) / k)              in front: constants d, one of which takes the shift
    (u + h) + v       = (u + v) + h                      a shift passes a sum
    (k u) * v         = k (u * v),  (k u) / v = k (u / v)
    -(k u + h)        = k (-u) - h

A constant operand takes its share in place if it stays as small as it was or as the channels; the other operands take only
the scale. A shift alone (k = 1) goes into one operand of a sum, the others stay. Operands of different rank do not share the
axis: refused. One that is broadcast along it has fewer channels than the map, which whatever would take it refuses.
"""

from __future__ import annotations

import contextlib

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.folding.placing import Rule, Search
from bnexport.folding.sites import SUMS, keeps_channels
from bnexport.graph.nodes import Refused, input_at, label, only_attributes, required_input


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    context = search.context
    _check_attributes(node, context)
    operands = [required_input(node, index) for index in range(len(node.inputs))]
    rank = context.known_rank(node.outputs[0], node)
    if node.op_type == "Neg":
        _operand(node, 0, axis, _negated(affine), rank, search)
        return
    constant = [context.constants.is_constant(value) for value in operands]
    if all(constant):
        raise Refused("constant", f"{label(node)} is a constant itself")
    if node.op_type in SUMS:
        _sum_backward(node, constant, axis, affine, rank, search)
        return
    if not affine.is_scaling:
        raise Refused("shift", f"{label(node)} multiplies, so it cannot take a shift")
    if search.context.options.layers is not None and node.op_type == "Mul" and any(constant):
        _operand(node, constant.index(False), axis, affine, rank, search)
    elif constant[0] or (constant[1] and node.op_type == "Mul"):
        _scale_constant(node, constant.index(True), axis, affine.scale, rank, search)
    elif constant[1] or node.op_type == "Div":
        _operand(node, 0, axis, affine, rank, search)
    else:
        _either(node, axis, affine, rank, search)


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    context = search.context
    _check_attributes(node, context)
    rank = context.known_rank(node.outputs[0], node)
    operands = [required_input(node, place) for place in range(len(node.inputs))]
    if context.rank(operands[index]) != rank:
        raise Refused("rank", f"the rank of {label(node)} is not that of its operand")
    if node.op_type == "Neg":
        search.forward(node.outputs[0], axis, _negated(affine))
    elif node.op_type in SUMS:
        _sum_forward(node, index, axis, affine, rank, search)
    elif not affine.is_scaling or (node.op_type == "Div" and index == 1):
        raise Refused("shift", f"{label(node)} multiplies, so only a scale passes, and no divisor")
    else:
        search.forward(node.outputs[0], axis, affine)


def _check_attributes(node: ir.Node, context: Context) -> None:
    if context.opset < 7 and node.op_type not in ("Sum", "Neg"):
        raise Refused("opset", f"{node.op_type} before opset 7 broadcasts by an attribute")
    only_attributes(node, ())


def _negated(affine: ChannelAffine) -> ChannelAffine:
    """Return the map of -x whose result is that of x, negated."""
    return ChannelAffine(affine.scale, -affine.center, -affine.shift)


def _signs(node: ir.Node) -> list[float]:
    return [-1.0 if node.op_type == "Sub" and index == 1 else 1.0 for index in range(len(node.inputs))]


def _sum_backward(
    node: ir.Node, constant: list[bool], axis: int, affine: ChannelAffine, rank: int, search: Search
) -> None:
    """Give the whole map to a constant, or else the first operand, and its scale to all others."""
    if affine.is_shift and not any(constant):
        _either(node, axis, affine, rank, search)
        return
    taker = constant.index(True) if any(constant) else 0
    for index, sign in enumerate(_signs(node)):
        share = affine if index == taker else affine.only_scale()
        if share.is_shift and index != taker:
            continue
        if constant[index]:
            _constant_takes(node, index, sign, axis, share, rank, search)
        else:
            _operand(node, index, axis, share, rank, search)


def _constant_takes(
    node: ir.Node, index: int, sign: float, axis: int, affine: ChannelAffine, rank: int, search: Search
) -> None:
    """Apply the map to a constant, which stands for sign * constant in its sum."""
    values = search.plan.value(node, index, f"{node.op_type} constant")
    _refuse_more_channels(node, index, axis, affine.channels, values, search)
    scale, center, shift = (_aligned(part, axis, rank) for part in (affine.scale, affine.center, affine.shift))
    total = sign * ((sign * values - center) * scale + shift)
    size = (np.abs(values) + np.abs(center)) * np.abs(scale) + np.abs(shift)
    _store(node, index, total, size, values.size, affine.channels, search)


def _sum_forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, rank: int, search: Search) -> None:
    signs = _signs(node)
    others = [place for place in range(len(signs)) if place != index]
    constant = [place for place in others if search.context.constants.is_constant(input_at(node, place))]
    if not affine.is_shift and len(constant) < len(others):
        raise Refused("no-rule", f"{label(node)} adds something that is not scaled")
    offset = signs[index] * affine.offset
    if not constant:
        passed = ChannelAffine.shifting(offset) if others else affine
        search.forward(node.outputs[0], axis, passed)
        return
    inverse = _aligned(affine.inverse_scale(search.context.options.max_scale), axis, rank)
    for place in constant if not affine.is_shift else constant[:1]:
        values = search.plan.value(node, place, f"{node.op_type} constant")
        shift = _aligned(signs[place] * offset, axis, rank) if place == constant[0] else np.zeros(1)
        size = (np.abs(values) + np.abs(shift)) * np.abs(inverse)
        _store(node, place, (values + shift) * inverse, size, values.size, affine.channels, search)
    if not affine.is_shift:
        search.forward(node.outputs[0], axis, affine.only_scale())


def _scale_constant(node: ir.Node, index: int, axis: int, scale: np.ndarray, rank: int, search: Search) -> None:
    values = search.plan.value(node, index, f"{node.op_type} constant")
    _refuse_more_channels(node, index, axis, scale.size, values, search)
    total = values * _aligned(scale, axis, rank)
    _store(node, index, total, np.abs(total), values.size, scale.size, search)


def _refuse_more_channels(
    node: ir.Node, index: int, axis: int, channels: int, values: np.ndarray, search: Search
) -> None:
    """Refuse to give a constant of one element a value for each channel unless other data has as many channels."""
    others = [place for place in range(len(node.inputs)) if place != index]
    if values.size == 1 < channels and not any(
        keeps_channels(node, place, axis, channels, search.context) for place in others
    ):
        raise Refused("shape", f"the data of {label(node)} is not known to have {channels} channels")


def _store(
    node: ir.Node,
    index: int,
    total: np.ndarray,
    size: np.ndarray,
    before: int,
    channels: int,
    search: Search,
) -> None:
    if total.size > max(before, channels):
        raise Refused("too-large", f"the constant of {label(node)} would grow from {before} to {total.size} elements")
    dtype = search.context.constants.describe(input_at(node, index), "constant").dtype
    search.plan.replace(node, index, total, dtype, f"{node.op_type} constant", size)


def _operand(node: ir.Node, index: int, axis: int, affine: ChannelAffine, rank: int, search: Search) -> None:
    value = required_input(node, index)
    if search.context.rank(value) != rank:
        raise Refused("rank", f"an operand of {label(node)} broadcasts from another rank")
    search.backward(value, axis, affine)


def _either(node: ir.Node, axis: int, affine: ChannelAffine, rank: int, search: Search) -> None:
    """Move the map into the first operand that takes it. A subtrahend is shifted with the opposite sign."""
    signs = _signs(node)
    for index, sign in enumerate(signs):
        share = affine if sign > 0 else ChannelAffine.shifting(-affine.offset)
        if index == len(signs) - 1:
            _operand(node, index, axis, share, rank, search)
            return
        with contextlib.suppress(Refused), search.plan.trial():
            _operand(node, index, axis, share, rank, search)
            return


def _aligned(vector: np.ndarray, axis: int, rank: int) -> np.ndarray:
    """Reshape the vector along `axis`, without leading dimensions of size 1."""
    return vector.reshape(-1, *[1] * (rank - axis - 1))


RULE = Rule(
    "elementwise",
    (*SUMS, "Mul", "Div", "Neg"),
    backward,
    forward,
    any_input=True,
    into="sums and products",
    forms="Add, Sub, Sum, Mul, Div, Neg",
    behind="all operands of a sum take k, one takes the shift; a shift alone goes into one; a product passes a scaling; "
    "Neg passes, its shift negated",
    front="d + (k u + h) = k (u + (d + h) / k), d constants; sums pass a shift, products a scaling, Neg both",
)
