"""Add, Sub, Sum, Mul and Div with constants, and Neg, read as a ChannelAffine.

The constant broadcasts from the right. It is per channel when all its dimensions are 1 but the one
that meets the channel axis - a vector of shape (C,) meets the last axis, whatever C is.

Before opset 7 only the second operand broadcasts, if `broadcast` is 1, and its dimensions meet those of the
data from `axis` on, where that is given.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.graph.nodes import get_int, input_at, is_standard, only_attributes
from bnexport.graph.refusal import Refused

SUMS = ("Add", "Sub", "Sum")
OP_TYPES = (*SUMS, "Mul", "Div", "Neg")


class Operands(NamedTuple):
    """Indices of a node's inputs."""

    data: int
    constants: tuple[int, ...]


def data_and_constants(node: ir.Node, context: Context) -> Operands | None:
    """Return the indices of the data and of the constants; None unless a single input is no constant."""
    if not is_standard(node, *OP_TYPES) or (context.opset >= 7 and node.attributes):
        return None
    values = [input_at(node, index) for index in range(len(node.inputs))]
    if None in values or (node.op_type not in ("Sum", "Neg") and len(values) != 2):
        return None
    constant = [context.constants.is_constant(value) for value in values]
    if constant.count(False) != 1 or (context.opset < 7 and constant[0]):
        return None
    return Operands(constant.index(False), tuple(index for index, held in enumerate(constant) if held))


def read_elementwise(node: ir.Node, axis: int, channels: int, context: Context) -> ChannelAffine:
    """Return the map of an elementwise node on `channels` channels along `axis`. Raise Refused if it is none."""
    only_attributes(node, () if context.opset >= 7 else ("axis", "broadcast", "consumed_inputs"))
    operands = data_and_constants(node, context)
    if operands is None:
        raise Refused("not-affine", f"{node.op_type} has no constant operand")
    data, constants = operands
    vector = np.zeros(channels)
    for index in constants:
        vector = vector + _vector(constant_operand(node, data, index, context), node, data, axis, channels, context)
    one, zero = np.ones(channels), np.zeros(channels)
    if node.op_type == "Neg":
        return ChannelAffine(-one, zero, zero)
    if node.op_type in ("Add", "Sum"):
        return ChannelAffine(one, zero, vector)
    if node.op_type == "Sub":
        return ChannelAffine(one, vector, zero) if data == 0 else ChannelAffine(-one, zero, vector)
    if node.op_type == "Mul":
        return ChannelAffine(vector, zero, zero)
    if data == 1:
        raise Refused("not-affine", "it divides a constant by the data")
    if (vector == 0).any():
        raise Refused("not-finite", "it divides by zero")
    return ChannelAffine(one / vector, zero, zero)


def _vector(values: np.ndarray, node: ir.Node, data: int, axis: int, channels: int, context: Context) -> np.ndarray:
    """Return the value that a constant has for each channel."""
    if values.size == 1 and values.ndim <= 1:
        return np.full(channels, values.reshape(()))
    source = input_at(node, data)
    return per_channel(values, axis, channels, None if source is None else context.rank(source))


def constant_operand(node: ir.Node, data: int, constant: int, context: Context) -> np.ndarray:
    """Return the constant at one index in a shape that broadcasts from the right. data: index of the data."""
    values = context.current(node, constant, "constant operand")
    if context.opset < 7 and get_int(node, "broadcast", 0) and "axis" in node.attributes:
        source = input_at(node, data)
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
