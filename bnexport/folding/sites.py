"""Sites: a batch norm, or what an exporter wrote in its place, with the per-channel operations next to it, read as one map."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.graph.nodes import (
    Refused,
    from_front,
    get_float,
    get_int,
    get_ints,
    input_at,
    is_standard,
    is_training,
    label,
    only_attributes,
    read_once,
    used,
)

# Batch norms, element-wise operators and pads, read as per-channel affine maps.

# BatchNormalization in every opset, read as a ChannelAffine or refused with a reason.
#
# Opset 1 to 8 carry spatial (0: one mean for each position). In newer ones no engine takes it; 1 is what they mean.
# `graph.batch_norm` has the modes.

_ATTRIBUTES = {
    1: ("epsilon", "momentum", "is_test", "spatial", "consumed_inputs"),
    6: ("epsilon", "momentum", "is_test", "spatial"),
    7: ("epsilon", "momentum", "spatial"),
    9: ("epsilon", "momentum", "spatial"),
    14: ("epsilon", "momentum", "spatial", "training_mode"),
}

_TRAINS = (
    "it is in training mode: it normalises with the statistics of the batch"
    " (training_to_inference=True, --training-to-inference use the stored ones)"
)

PARAMETERS = (("scale", 1), ("bias", 2), ("mean", 3), ("variance", 4))


def read_batch_norm(node: ir.Node, context: Context) -> ChannelAffine:
    """Return the map of an inference batch norm with constant parameters. Raise Refused otherwise."""
    opset = context.opset
    since = max(version for version in _ATTRIBUTES if version <= opset)
    only_attributes(node, _ATTRIBUTES[since])
    if is_training(node, opset):
        raise Refused("training", _TRAINS)
    if any(used(output) for output in node.outputs[1:]):
        raise Refused("statistics-used", "its statistics outputs are used")
    if get_int(node, "spatial", 1) != 1:
        raise Refused(
            "not-per-channel", "spatial=0: it has a mean for every position; where channels are meant, write 1"
        )
    if len(node.inputs) != 5:
        raise Refused("bad-node", f"it has {len(node.inputs)} inputs, expected 5")
    source = node.inputs[0]
    if source is None:
        raise Refused("bad-node", "it has no input")
    # Inference takes time: it is asked only where the file declares less.
    if source.shape is not None and len(source.shape) < 2 and (context.rank(source) or 2) < 2:
        raise Refused("rank", f"its input has rank {context.rank(source)}: one channel, without an axis of its own")
    gamma, beta, mean, var = (_checked_vector(context.current(node, index, name), name) for name, index in PARAMETERS)
    if len({vector.size for vector in (gamma, beta, mean, var)}) != 1:
        raise Refused("shape", f"its parameters have {gamma.size}, {beta.size}, {mean.size} and {var.size} elements")
    affine = ChannelAffine.from_batch_norm(gamma, beta, mean, var, get_float(node, "epsilon", 1e-5))
    largest = float(np.abs(affine.scale).max(initial=0.0))
    if largest > context.options.max_scale:
        raise Refused(
            "scale", f"gamma / std reaches {largest:.3g}, the bound is {context.options.max_scale:.3g} (max_scale)"
        )
    return affine


def _checked_vector(array: np.ndarray, what: str) -> np.ndarray:
    if array.ndim != 1:
        raise Refused("shape", f"the {what} has shape {array.shape}, expected one value for each channel")
    return array


# Add, Sub, Sum, Mul and Div with constants, and Neg, read as a ChannelAffine.
#
# The constant broadcasts from the right. It is per channel when all its dimensions are 1 but the one
# that meets the channel axis - a vector of shape (C,) meets the last axis, whatever C is.
#
# Before opset 7 only the second operand broadcasts, if `broadcast` is 1, and its dimensions meet those of the
# data from `axis` on, where that is given.

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


# Read the attributes or inputs of a Pad, of any opset.


def read_pads(node: ir.Node, rank: int, context: Context) -> list[tuple[int, int]]:
    """Return what a Pad adds before and behind each axis; raise Refused if it is malformed or not constant."""
    only_attributes(node, ("mode", "pads", "paddings", "value"))
    pads = get_ints(node, "pads") or get_ints(node, "paddings")
    if (operand := input_at(node, 1)) is not None:
        pads = context.constants.ints(operand, f"pads of {label(node)}")
    axes = tuple(range(rank))
    if (operand := input_at(node, 3)) is not None:
        axes = from_front(context.constants.ints(operand, "axes"), rank)
    if pads is None or len(pads) != 2 * len(axes) or len(set(axes)) != len(axes) or not {*axes} <= {*range(rank)}:
        raise Refused("bad-node", f"{label(node)} has no pads, or not two for each axis")
    found = [(0, 0)] * rank
    for place, axis in enumerate(axes):
        found[axis] = pads[place], pads[place + len(axes)]
    return found


def read_fill(node: ir.Node, context: Context) -> float:
    """Return the value that a Pad of mode constant inserts."""
    fill = get_float(node, "value", 0.0)
    if (operand := input_at(node, 2)) is not None:
        values = context.constants.floats(operand, f"value of {label(node)}")
        if not values.size:
            raise Refused("bad-node", f"the value of {label(node)} is empty")
        fill = float(values.reshape(-1)[0])
    return fill


# Sites: chains of per-channel maps, each read only by the next one, and their composition.
#
# Every batch norm starts a site. Neighbouring batch norms and elementwise operations with per-channel
# constants join it, so that their product is rounded once and they leave together. A Mul and Add pair
# with per-channel constants and no batch norm is what exporters make of one, and is a site as well. A lone Mul
# or Add is a site only where it leaves the model.

# Operators whose own rule checks the number of channels, so that unknown shapes do no harm: along axis 1, or the last one.
_CHECK_CHANNELS = ("Conv", "ConvTranspose", "Gemm", "BatchNormalization")


@dataclasses.dataclass(frozen=True)
class Site:
    """nodes: top to bottom. data: index of the data among the first node's inputs. axis: of the channels."""

    nodes: tuple[ir.Node, ...]
    affine: ChannelAffine
    axis: int
    data: int

    @property
    def input(self) -> ir.Value:
        value = self.nodes[0].inputs[self.data]
        assert value is not None
        return value

    @property
    def output(self) -> ir.Value:
        return self.nodes[-1].outputs[0]


def batch_norm_site(node: ir.Node, context: Context) -> Site:
    """Return the site around a BatchNormalization. Raise Refused if the node itself cannot be read, or must stay."""
    context.check_refused(node)
    affine = read_batch_norm(node, context)
    return _grow(Site((node,), affine, axis=1, data=0), context)


def elementwise_site(node: ir.Node, context: Context) -> Site | None:
    """Return the site that starts at a Mul, Add, Sub or Div and both scales and shifts; None if there is none."""
    site = next(_per_channel_sites(node, context), None)
    if site is None:
        return None
    scales = any(step.op_type in ("Mul", "Div", "BatchNormalization") for step in site.nodes)
    shifts = any(step.op_type in (*SUMS, "BatchNormalization") for step in site.nodes)
    return site if scales and shifts else None


def lone_sites(node: ir.Node, context: Context) -> Iterator[Site]:
    """Yield what an operation with constants may be read as that is no part of a pair: a scalar is a map along any axis."""
    for site in _per_channel_sites(node, context, scalars=True):
        if not any(is_standard(step, "BatchNormalization") for step in site.nodes):
            yield site


def _per_channel_sites(node: ir.Node, context: Context, *, scalars: bool = False) -> Iterator[Site]:
    """Yield the sites around an operation with per-channel constants. scalars: with scalars, too, along each likely axis."""
    operands = data_and_constants(node, context)
    if operands is None or not operands.constants:
        return
    source = input_at(node, operands.data)
    rank = None if source is None else context.rank(source)
    if source is None or rank is None:
        return
    with contextlib.suppress(Refused):
        several = [constant_operand(node, operands.data, index, context) for index in operands.constants]
        axes = {axis: values.size for values in several if (axis := varying_axis(values, rank)) is not None}
        if scalars and not axes and all(values.size == 1 and values.ndim <= rank for values in several):
            # Of a convolution, of a product, and of a product from the left.
            sizes = {axis: context.size(source, axis) for axis in (1, rank - 1, rank - 2) if 0 <= axis < rank}
            for axis, channels in sizes.items():
                if channels is not None and channels > 0:
                    yield _site_around(node, operands.data, axis, channels, context)
        elif len(axes) == 1:
            axis, channels = axes.popitem()
            if keeps_channels(node, operands.data, axis, channels, context):
                yield _site_around(node, operands.data, axis, channels, context)


def _site_around(node: ir.Node, data: int, axis: int, channels: int, context: Context) -> Site:
    return _grow(Site((node,), read_elementwise(node, axis, channels, context), axis, data), context)


def sole_use(value: ir.Value, graph: ir.Graph | None) -> ir.Node | None:
    """Return the only node that reads `value`, if it reads it once and lies in the same graph."""
    uses = tuple(value.uses())
    return uses[0].node if read_once(value) and uses[0].node.graph is graph else None


def _grow(site: Site, context: Context) -> Site:
    nodes = collections.deque(site.nodes)
    affine, data = site.affine, site.data
    while (step := _above(nodes[0], data, site.axis, affine.channels, context)) is not None:
        node, before, data = step
        nodes.appendleft(node)
        affine = before.then(affine)
    while (below := _below(nodes[-1], site.axis, affine.channels, context)) is not None:
        node, after = below
        nodes.append(node)
        affine = affine.then(after)
    return site if len(nodes) == len(site.nodes) else Site(tuple(nodes), affine, site.axis, data)


def _step(node: ir.Node, axis: int, channels: int, context: Context) -> ChannelAffine | None:
    try:
        if is_standard(node, "BatchNormalization"):
            context.check_refused(node)
            affine = read_batch_norm(node, context) if axis == 1 else None
            return affine if affine is not None and affine.channels == channels else None
        if is_standard(node, *OP_TYPES) and context.options.layers is None:
            return read_elementwise(node, axis, channels, context)
    except Refused:
        return None
    return None


def _above(
    first: ir.Node, data: int, axis: int, channels: int, context: Context
) -> tuple[ir.Node, ChannelAffine, int] | None:
    """Return the node that makes the input of `first`, its map, and its data index; None if it does not join."""
    value = first.inputs[data]
    node = None if value is None else value.producer()
    if value is None or node is None or sole_use(value, first.graph) is not first or node.graph is not first.graph:
        return None
    affine = _step(node, axis, channels, context)
    if affine is None or is_standard(node, "BatchNormalization"):
        return None if affine is None else (node, affine, 0)
    operands = data_and_constants(node, context)
    if operands is None:
        return None
    if operands.constants and not keeps_channels(node, operands.data, axis, channels, context):
        return None
    return node, affine, operands.data


def _below(last: ir.Node, axis: int, channels: int, context: Context) -> tuple[ir.Node, ChannelAffine] | None:
    """Return the only reader of `last` and its map; None if it does not join."""
    output = last.outputs[0]
    node = sole_use(output, last.graph)
    if node is None or (is_standard(node, "BatchNormalization") and node.inputs[0] is not output):
        return None
    affine = _step(node, axis, channels, context)
    return None if affine is None else (node, affine)


def keeps_channels(node: ir.Node, data: int, axis: int, channels: int, context: Context) -> bool:
    """Whether the node's data already has `channels` channels: a constant may broadcast it."""
    source = input_at(node, data)
    assert source is not None
    size = context.size(source, axis)
    if size is not None:
        return size == channels
    producer, rank = source.producer(), context.rank(source)
    if producer is None:
        return False
    return (
        is_standard(producer, *_CHECK_CHANNELS) if axis == 1 else is_standard(producer, "MatMul") and rank == axis + 1
    )
