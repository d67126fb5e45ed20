"""Add, Sub, Mul and Div with a constant, read as a ChannelAffine.

The constant broadcasts from the right. It is per channel when all its dimensions are 1 but the one
that meets the channel axis - a vector of shape (C,) meets the last axis, whatever C is.

Before opset 7 only the second operand broadcasts, if `broadcast` is 1, and its dimensions meet those of the
data from `axis` on, where that is given.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.graph.nodes import get_int, input_at, is_standard, only_attributes
from bnexport.graph.refusal import Refused

OP_TYPES = ("Add", "Sub", "Mul", "Div")


def data_and_constant(node: ir.Node, context: Context) -> tuple[int, int] | None:
    """Return the index of the data and of the constant; None unless there is one of each."""
    if not is_standard(node, *OP_TYPES) or len(node.inputs) != 2 or (context.opset >= 7 and node.attributes):
        return None
    constant = [context.constants.is_constant(input_at(node, index)) for index in (0, 1)]
    if constant[0] == constant[1] or input_at(node, 0) is None or input_at(node, 1) is None:
        return None
    if context.opset < 7 and constant[0]:
        return None
    return (1, 0) if constant[0] else (0, 1)


def read_elementwise(node: ir.Node, axis: int, channels: int, context: Context) -> ChannelAffine:
    """Return the map of an elementwise node on `channels` channels along `axis`. Raise Refused if it is none."""
    only_attributes(node, () if context.opset >= 7 else ("axis", "broadcast", "consumed_inputs"))
    operands = data_and_constant(node, context)
    if operands is None:
        raise Refused("not-affine", f"{node.op_type} has no constant operand")
    data, constant = operands
    values = constant_operand(node, operands, context)
    if values.size == 1 and values.ndim <= 1:
        vector = np.full(channels, values.reshape(()))
    else:
        rank = context.rank(node.inputs[data]) if node.inputs[data] is not None else None  # type: ignore[arg-type]
        vector = per_channel(values, axis, channels, rank)
    one, zero = np.ones(channels), np.zeros(channels)
    if node.op_type == "Add":
        return ChannelAffine(one, zero, vector)
    if node.op_type == "Sub":
        return ChannelAffine(one, vector, zero) if constant == 1 else ChannelAffine(-one, zero, vector)
    if node.op_type == "Mul":
        return ChannelAffine(vector, zero, zero)
    if constant == 0:
        raise Refused("not-affine", "it divides a constant by the data")
    if (vector == 0).any():
        raise Refused("not-finite", "it divides by zero")
    return ChannelAffine(one / vector, zero, zero)


def constant_operand(node: ir.Node, operands: tuple[int, int], context: Context) -> np.ndarray:
    """Return the constant in a shape that broadcasts from the right."""
    values = context.current(node, operands[1], "constant operand")
    if context.opset < 7 and get_int(node, "broadcast", 0) and "axis" in node.attributes:
        source = input_at(node, operands[0])
        rank = None if source is None else context.rank(source)
        axis = get_int(node, "axis", 0)
        if rank is None or not 0 <= axis <= rank - values.ndim:
            raise Refused("rank", f"{node.op_type} broadcasts from axis {axis} on, in data of unknown or smaller rank")
        values = values.reshape(values.shape + (1,) * (rank - values.ndim - axis))
    return values


def per_channel(values: np.ndarray, axis: int, channels: int, rank: int | None) -> np.ndarray:
    """Return the vector of a constant that varies along `axis` only. Raise Refused otherwise."""
    if rank is None:
        raise Refused("rank", "the rank of the data is not known, so the constant's axis is not either")
    if values.ndim > rank:
        raise Refused("shape", f"a constant of rank {values.ndim} enlarges data of rank {rank}")
    shape = (1,) * (rank - values.ndim) + values.shape
    if any(size != 1 for place, size in enumerate(shape) if place != axis):
        raise Refused("not-per-channel", f"the constant of shape {values.shape} varies along another axis than {axis}")
    vector = values.reshape(-1)
    if vector.size == 1:
        return np.full(channels, vector[0])
    if vector.size != channels:
        raise Refused("shape", f"the constant has {vector.size} values, the channel axis {channels}")
    return vector


def varying_axis(values: np.ndarray, rank: int) -> int | None:
    """Return the only axis along which a constant varies, in data of `rank`; None if there is none or several."""
    if values.ndim > rank:
        return None
    places = [rank - values.ndim + place for place, size in enumerate(values.shape) if size != 1]
    return places[0] if len(places) == 1 else None
