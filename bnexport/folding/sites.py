"""Sites: a batch norm, or what an exporter wrote in its place, with the per-channel operations next to it, read as one map."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.folding.reading import (
    OP_TYPES,
    SUMS,
    constant_operand,
    data_and_constants,
    read_batch_norm,
    read_elementwise,
    varying_axis,
)
from bnexport.graph.nodes import Refused, get_ints, input_at, is_standard

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
    if len(uses) != 1 or value.is_graph_output() or uses[0].node.graph is not graph:
        return None
    return uses[0].node


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


# Batch norm in training mode written out by an exporter as a batch mean and a difference.
#
#     m = ReduceMean(x, axes), d = Sub(x, m)
#
# The axes hold the batch and every other but one, that of the channels; m may come through operators that
# only reshape it. Its statistics are those of the batch, so nothing can be folded. It is reported, since a
# user who looks for a batch norm should find out why it is still there. A layer norm (the last axes) and an
# instance norm (the batch is not among the axes) are none.

REASON = Refused("training", "it subtracts the mean of the batch: a batch norm in training, written out")

# What an exporter may put between the mean and the difference.
_RESHAPING = ("Identity", "Cast", "CastLike", "Reshape", "Squeeze", "Unsqueeze", "Expand")
_STEPS = 4


def training_sites(nodes: Iterable[ir.Node], context: Context) -> list[ir.Node]:
    """Return the Sub nodes of batch norms in training mode that are written out."""
    return [node for node in nodes if is_standard(node, "Sub") and _subtracts_batch_mean(node, context)]


def _subtracts_batch_mean(node: ir.Node, context: Context) -> bool:
    data, value = input_at(node, 0), input_at(node, 1)
    if data is None or value is None:
        return False
    producer = _origin(value, _RESHAPING).producer()
    if producer is None or not is_standard(producer, "ReduceMean"):
        return False
    reduced = input_at(producer, 0)
    casts = ("Identity", "Cast", "CastLike")
    if reduced is None or _origin(reduced, casts) is not _origin(data, casts):
        return False
    return _over_batch(producer, reduced, context)


def _origin(value: ir.Value, op_types: tuple[str, ...]) -> ir.Value:
    """Return the value from which `value` was made by at most a few of these operators."""
    for _ in range(_STEPS):
        node = value.producer()
        source = None if node is None or not is_standard(node, *op_types) else input_at(node, 0)
        if source is None:
            break
        value = source
    return value


def _over_batch(node: ir.Node, data: ir.Value, context: Context) -> bool:
    try:
        axes = get_ints(node, "axes") or ()
        if context.opset >= 18:
            axes = context.constants.ints(input_at(node, 1), "axes")
    except Refused:
        return False
    rank = context.rank(data)
    if rank is None:
        return 0 in axes and 1 not in axes and not any(axis < 0 for axis in axes)
    kept = set(range(rank)) - {axis + rank if axis < 0 else axis for axis in axes}
    return len(kept) == 1 and 0 not in kept
