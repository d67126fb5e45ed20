"""Gather, Expand and Tile: rows of a constant table (an embedding), a choice of channels or of other slices, and copies.

    Gather(T, i) -> map       =    Gather(k T + h, i)              the map along another axis of the table
    Gather(x, 2 0 1) -> map   =    map in the order 2 0 1 -> Gather
    x -> Expand -> map        =    x -> map -> Expand              where the channels are as many before and behind

Backward through a choice of channels, x gets the identity where no index points, and an index may be there once.
A table that another node reads would have to be there twice: it stays.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine, along
from bnexport.folding.context import Context
from bnexport.folding.placing import Rule, Search
from bnexport.graph.constants import ELEMENTS
from bnexport.graph.nodes import Refused, get_int, input_at, label, only_attributes, read_once, required_input


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    if node.op_type != "Gather":
        moved = _check_copies(node, axis, affine, search.context, from_output=True)
        search.backward(required_input(node), axis - moved, affine)
        return
    value, chosen, rank = _read(node, search.context)
    before = _before(axis, chosen, rank)
    if search.context.constants.is_constant(value):
        _scale_table(node, value, before, affine, search)
        return
    if before is not None:
        search.backward(value, before, affine)
        return
    size, indices = _indices(node, value, chosen, search.context)
    if len(set(indices.tolist())) != indices.size or indices.size != affine.channels:
        raise Refused("shape", f"{label(node)} takes a channel twice, or not as many as the map has")
    search.backward(value, chosen, affine.spread(indices, size))


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    if node.op_type != "Gather":
        moved = _check_copies(node, axis, affine, search.context, from_output=False)
        search.forward(node.outputs[0], axis + moved, affine)
        return
    value, chosen, rank = _read(node, search.context)
    if axis != chosen:
        search.forward(node.outputs[0], axis if axis < chosen else axis - 1 + rank, affine)
        return
    size, indices = _indices(node, value, chosen, search.context)
    if size != affine.channels:
        raise Refused("shape", f"{label(node)} reads {size} channels, the map has {affine.channels}")
    search.forward(node.outputs[0], axis, affine.take(indices))


def _read(node: ir.Node, context: Context) -> tuple[ir.Value, int, int]:
    """Return the data, the axis along which it is gathered, and the rank of the indices."""
    only_attributes(node, ("axis",))
    value, indices = required_input(node), required_input(node, 1)
    rank, own = context.known_rank(indices, node), context.known_rank(value, node)
    axis = get_int(node, "axis", 0)
    return value, axis + own if axis < 0 else axis, rank


def _before(axis: int, chosen: int, rank: int) -> int | None:
    """Return the axis of the data that is `axis` of the result; None for those that the indices make."""
    if axis < chosen:
        return axis
    return axis - rank + 1 if axis >= chosen + rank else None


def _indices(node: ir.Node, value: ir.Value, axis: int, context: Context) -> tuple[int, np.ndarray]:
    """Return the number of channels of the data, and which of them are gathered."""
    indices = context.constants.array(input_at(node, 1), f"indices of {label(node)}")
    size = context.size(value, axis)
    if size is None or indices.ndim != 1:
        raise Refused("shape", f"the channels of {label(node)} are not known, or it takes a single one")
    if ((indices < -size) | (indices >= size)).any():
        raise Refused("shape", f"{label(node)} takes a channel that its data do not have")
    return size, np.where(indices < 0, indices + size, indices)


def _scale_table(node: ir.Node, value: ir.Value, axis: int | None, affine: ChannelAffine, search: Search) -> None:
    if axis is None:
        raise Refused("axis", f"the map acts on the rows that {label(node)} takes")
    if not read_once(value):
        raise Refused("shared", f"the table of {label(node)} is read elsewhere, too")
    table = search.context.constants.describe(value, "table")
    if table.shape[axis : axis + 1] != (affine.channels,):
        raise Refused(
            "shape", f"the table of {label(node)} has shape {table.shape}, the map {affine.channels} channels"
        )
    if affine.is_scaling:
        search.plan.scale(node, 0, along(affine.scale, axis, table.ndim), "table")
        return
    if np.prod(table.shape) > ELEMENTS:
        raise Refused("too-large", f"the table of {label(node)} has shape {table.shape}, too large to be shifted")
    search.plan.map(node, 0, axis, affine, table.dtype, "table")


def _check_copies(node: ir.Node, axis: int, affine: ChannelAffine, context: Context, *, from_output: bool) -> int:
    """Return how many axes are put in front of those of the data. Raises Refused unless both have the channels of the map.

    axis: of the data, or of the output.
    """
    only_attributes(node, ())
    value, output = required_input(node), node.outputs[0]
    moved = context.known_rank(output, node) - context.known_rank(value, node)
    own = axis - moved if from_output else axis
    sizes = (context.size(value, own) if own >= 0 else None, context.size(output, own + moved))
    if sizes != (affine.channels, affine.channels):
        raise Refused("shape", f"{label(node)} repeats the channels, or their number is not known")
    return moved


RULE = Rule(
    "gather",
    ("Gather", "Expand", "Tile"),
    backward,
    forward,
    into="embedding tables",
    forms="Gather, Expand, Tile",
    behind="a constant table takes it: T' = k T + h; a choice of channels passes the map of those that are chosen, each once; "
    "copies pass it",
    front="each chosen channel its own; copies pass it",
)
