"""Operators that pass values on unchanged: Identity, Dropout in inference, Cast to the same type.

    x -> Identity -> map    =    x -> map -> Identity

The same holds in the other direction.
"""

from __future__ import annotations

import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.folding.placing import Rule, Search
from bnexport.graph.nodes import Refused, get_int, input_at, label, only_attributes, required_input, used


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    search.backward(passed(node, search.context), axis, affine)


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    passed(node, search.context)
    search.forward(node.outputs[0], axis, affine)


def passed(node: ir.Node, context: Context) -> ir.Value:
    """Return the input that the node returns unchanged. Raise Refused otherwise."""
    value = required_input(node)
    if node.op_type == "Identity":
        only_attributes(node, ())
    elif node.op_type == "Dropout":
        _check_dropout(node, context)
    else:
        only_attributes(node, ("to", "saturate", "round_mode"))
        dtype = context.dtype(value)
        if dtype is None or get_int(node, "to", 0) != dtype.value:
            raise Refused("cast", f"{label(node)} changes the type, and rounding does not commute with a map")
    return value


def _check_dropout(node: ir.Node, context: Context) -> None:
    only_attributes(node, ("ratio", "seed", "is_test", "consumed_inputs"))
    if context.opset < 7 and get_int(node, "is_test", 0) == 0:
        raise Refused("training", f"{label(node)} drops values, is_test is 0")
    mode = input_at(node, 2) if context.opset >= 12 else None
    if mode is not None and context.constants.array(mode, "Dropout training mode").any():
        raise Refused("training", f"{label(node)} drops values, its training mode is on")
    if any(used(output) for output in node.outputs[1:]):
        raise Refused("mask", f"the mask of {label(node)} is used")


RULE = Rule(
    "transparent",
    ("Identity", "Dropout", "Cast"),
    backward,
    forward,
    forms="Identity, Dropout in inference, Cast to its own type",
    behind="passes",
    front="passes",
)
