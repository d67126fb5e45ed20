"""Add, Sub, Mul and Div on the way to a producer. k: scale, c: center, t: shift, along one axis.

    k (u + v - c) + t = [k (u - c) + t] + [k v]          both operands take their share
    k (u - v - c) + t = [k (u - c) + t] - [k v]
    k (u * v)         = [k u] * v = u * [k v]            a scale goes into either operand
    k (u / v)         = [k u] / v

A constant operand takes its share in place, if it stays as small as it was or as the channels; the
other operand takes only the scale. Operands of different rank do not share the axis: refused.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.nodes import input_at, label, only_attributes
from bnexport.folding.refusal import Refused
from bnexport.folding.search import Rule, Search


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


def _sum_with_constant(node: ir.Node, axis: int, affine: ChannelAffine, rank: int, index: int, search: Search) -> None:
    """u + v or u - v with one constant, which takes center and shift; the other operand takes the scale."""
    values = search.plan.value(node, index, f"{node.op_type} constant")
    scale, center, shift = (_aligned(part, axis, rank) for part in (affine.scale, affine.center, affine.shift))
    # As the subtrahend the constant v stands for -v.
    sign = -1.0 if node.op_type == "Sub" and index == 1 else 1.0
    total = sign * ((sign * values - center) * scale + shift)
    size = (np.abs(values) + np.abs(center)) * np.abs(scale) + np.abs(shift)
    _store(node, index, total, size, values.size, affine.channels, rank, search)
    _operand(node, 1 - index, axis, affine.only_scale(), rank, search)


def _scale_constant(node: ir.Node, index: int, axis: int, scale: np.ndarray, rank: int, search: Search) -> None:
    values = search.plan.value(node, index, f"{node.op_type} constant")
    total = values * _aligned(scale, axis, rank)
    _store(node, index, total, np.abs(total), values.size, scale.size, rank, search)


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
    search.backward(value, axis, affine)


def _either(node: ir.Node, axis: int, affine: ChannelAffine, rank: int, search: Search) -> None:
    state = search.plan.snapshot()
    try:
        _operand(node, 0, axis, affine, rank, search)
    except Refused:
        search.plan.restore(state)
        _operand(node, 1, axis, affine, rank, search)


def _aligned(vector: np.ndarray, axis: int, rank: int) -> np.ndarray:
    """The vector along `axis`, without leading dimensions of size 1."""
    return vector.reshape(-1, *[1] * (rank - axis - 1))


RULE = Rule("elementwise", ("Add", "Sub", "Mul", "Div"), backward)
