"""Pad of the positions within a channel.

    x -> Pad -> map    =    x -> map -> Pad        zeros: h = 0

The modes reflect, edge and wrap repeat values of the channel, and cropping removes some: any map passes.
A constant is not mapped, so through zeros only a scaling passes, since k 0 = 0.
"""

from __future__ import annotations

import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.folding.placing import Rule, Search
from bnexport.folding.sites import read_fill, read_pads
from bnexport.graph.nodes import Refused, get_string, label, required_input


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    search.backward(_check(node, axis, affine, search.context), axis, affine)


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    _check(node, axis, affine, search.context)
    search.forward(node.outputs[0], axis, affine)


def _check(node: ir.Node, axis: int, affine: ChannelAffine, context: Context) -> ir.Value:
    value = required_input(node)
    rank = context.known_rank(value, node)
    pads = read_pads(node, rank, context)
    if any(map(any, pads[axis : axis + 1])):
        raise Refused("axis", f"{label(node)} pads the channel axis")
    mode = get_string(node, "mode", "constant")
    if mode in ("reflect", "edge", "wrap") or all(before <= 0 and behind <= 0 for before, behind in pads):
        return value
    if mode != "constant":
        raise Refused("unknown-mode", f"{label(node)} has the unknown mode {mode!r}")
    fill = read_fill(node, context)
    if fill != 0:
        raise Refused("padding", f"{label(node)} pads with {fill:g}, which a map would change")
    if not affine.is_scaling:
        raise Refused("shift", f"{label(node)} pads with zeros, which the shift would change")
    return value


RULE = Rule(
    "pad",
    ("Pad",),
    backward,
    forward,
    forms="Pad",
    behind="reflect, edge, wrap and cropping pass any map; zeros a scaling",
    front="as backward",
)
