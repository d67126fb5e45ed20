"""Read the attributes or inputs of a Pad, of any opset."""

from __future__ import annotations

import onnx_ir as ir

from bnexport.folding.context import Context
from bnexport.graph.nodes import get_float, get_ints, input_at, label, only_attributes
from bnexport.graph.refusal import Refused


def read_pads(node: ir.Node, rank: int, context: Context) -> list[tuple[int, int]]:
    """Return what a Pad adds before and behind each axis; raise Refused if it is malformed or not constant."""
    only_attributes(node, ("mode", "pads", "paddings", "value"))
    pads = get_ints(node, "pads") or get_ints(node, "paddings")
    if (operand := input_at(node, 1)) is not None:
        pads = context.constants.ints(operand, f"pads of {label(node)}")
    axes = tuple(range(rank))
    if (operand := input_at(node, 3)) is not None:
        axes = tuple(axis + rank if axis < 0 else axis for axis in context.constants.ints(operand, "axes"))
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
        fill = float(context.constants.floats(operand, f"value of {label(node)}").reshape(-1)[0])
    return fill
