"""Expand and Tile: copies of a value.

    x -> Expand -> map        =        x -> map -> Expand

Where the channels are as many before and behind, in place, each copy has the map of what it is copied from.
"""

from __future__ import annotations

import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.folding.placing.search import Rule, Search
from bnexport.graph.nodes import input_at, label, only_attributes
from bnexport.graph.refusal import Refused


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    value, moved = _check(node, affine, search.context)
    search.backward(value, _of_channels(node, axis - moved, affine, search.context), affine)


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    if index != 0:
        raise Refused("not-data", f"the map reaches input {index} of {label(node)}")
    _, moved = _check(node, affine, search.context)
    search.forward(node.outputs[0], _of_channels(node, axis, affine, search.context) + moved, affine)


def _check(node: ir.Node, affine: ChannelAffine, context: Context) -> tuple[ir.Value, int]:
    """Return the data, and how many axes are put in front of theirs."""
    only_attributes(node, ())
    value = input_at(node, 0)
    before = None if value is None else context.rank(value)
    behind = context.rank(node.outputs[0])
    if value is None or before is None or behind is None:
        raise Refused("rank", f"the rank of {label(node)} is not known")
    return value, behind - before


def _of_channels(node: ir.Node, axis: int, affine: ChannelAffine, context: Context) -> int:
    """Return `axis` of the data if it has the channels of the map, and so has the result."""
    value = input_at(node, 0)
    assert value is not None
    behind, before = context.rank(node.outputs[0]), context.rank(value)
    assert behind is not None and before is not None
    sizes = (context.size(value, axis) if axis >= 0 else None, context.size(node.outputs[0], axis + behind - before))
    if sizes != (affine.channels, affine.channels):
        raise Refused("shape", f"{label(node)} repeats the channels, or their number is not known")
    return axis


RULE = Rule("expand", ("Expand", "Tile"), backward, forward)
