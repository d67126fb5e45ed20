"""Cones: the nodes above a value, down from values at which a region begins."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from bnexport.model_io import walk
from bnexport.verification.local.regions import Mismatch, Side, name_of

# Inputs that hold sizes: what computes them is part of the region, so that they fit the sizes that it is run with.
SIZES = {
    "Reshape": (1,), "Expand": (1,), "Tile": (1,), "Pad": (1, 3), "Slice": (1, 2, 3, 4), "Split": (1,), "Resize": (1, 2, 3),
    "Upsample": (1,), "Squeeze": (1,), "Unsqueeze": (1,), "ReduceMean": (1,), "ReduceMax": (1,), "ReduceSum": (1,),
}  # fmt: skip


def cone(value: ir.Value, side: Side, is_inside: Callable[[ir.Value], bool]) -> tuple[list[ir.Node], list[ir.Value]]:
    """Return the nodes above a value that are inside, in order, and the values that enter. Raises Mismatch."""
    found: set[ir.Node] = set()
    entering: dict[ir.Value, None] = {}
    pending = [(value, False)]
    while pending:
        each, is_size = pending.pop()
        node = each.producer()
        if node is None or node.graph is not value.graph or not (is_size or is_inside(each)):
            entering[each] = None
            continue
        if node in found:
            continue
        if node not in side.order:
            raise Mismatch(f"{name_of(node)} ({node.op_type}) is constant in one model only")
        if walk.node_bodies(node):
            raise Mismatch(f"{name_of(node)} ({node.op_type}) holds a body and is part of a fold")
        found.add(node)
        computes = is_size and node.op_type != "Shape"
        pending += [(operand, computes or index in SIZES.get(node.op_type, ())) for index, operand in side.data(node)]
    return sorted(found, key=side.order.__getitem__), list(entering)
