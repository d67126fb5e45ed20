"""DepthToSpace and SpaceToDepth with blocks of b x b.

    x -> DepthToSpace -> map (C)          =    x -> map repeated b^2 times (C b^2) -> DepthToSpace
    x -> map (C) -> SpaceToDepth          =    x -> SpaceToDepth -> map repeated b^2 times (C b^2)

DepthToSpace, mode CRD: output channel c comes from the input channels c b^2 ... c b^2 + b^2 - 1;
mode DCR: from c, C + c, 2 C + c, ... with C the number of output channels. A map of the output is the map
of the input with each channel repeated, or with all channels repeated as a block.

SpaceToDepth spreads channel c to the channels that these modes name, CRD from opset 28 on. The other directions would need a
map that is equal on all channels that come together: not followed.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.placing import Rule, Search, check_axis
from bnexport.graph.nodes import Refused, get_int, get_string, label, only_attributes, required_input


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    value, block = _check(node, axis)
    if node.op_type == "SpaceToDepth":
        raise Refused("no-rule", f"{label(node)} brings positions of one channel onto several")
    search.backward(value, axis, _spread(node, affine, block))


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    _value, block = _check(node, axis)
    if node.op_type == "DepthToSpace":
        raise Refused("no-rule", f"{label(node)} brings several channels onto positions of one")
    search.forward(node.outputs[0], axis, _spread(node, affine, block))


def _spread(node: ir.Node, affine: ChannelAffine, count: int) -> ChannelAffine:
    """Return the map for the side with `count` times the channels."""
    mode = get_string(node, "mode", "DCR")
    if mode not in ("DCR", "CRD"):
        raise Refused("unknown-mode", f"{label(node)} has the unknown mode {mode!r}")
    return affine.repeat(count) if mode == "CRD" else affine.take(np.tile(np.arange(affine.channels), count))


def _check(node: ir.Node, axis: int) -> tuple[ir.Value, int]:
    only_attributes(node, ("blocksize", "mode"))
    block = get_int(node, "blocksize", 0)
    if block < 1:
        raise Refused("bad-node", f"{label(node)} has no block size")
    check_axis(node, axis)
    return required_input(node), block * block


RULE = Rule(
    "depth_to_space",
    ("DepthToSpace", "SpaceToDepth"),
    backward,
    forward,
    forms="DepthToSpace, SpaceToDepth",
    behind="DepthToSpace: channels repeated (CRD) or tiled (DCR)",
    front="SpaceToDepth: repeated or tiled",
)
