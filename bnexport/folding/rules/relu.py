"""Relu, LeakyRelu and PRelu: they keep the sign, so only a positive scale passes.

    x -> Relu -> k y           =    x -> k x -> Relu                     k > 0
    x -> k x + h -> Relu       =    x -> x + h / k -> Relu -> k y        k > 0

Forward, the scale moves on, through padding as well, where the shift finds a place before f (the engine splits the map).
"""

from __future__ import annotations

import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.placing import Rule, Search
from bnexport.graph.nodes import Refused, get_float, label, only_attributes, required_input

_ATTRIBUTES = {"Relu": ("consumed_inputs",), "LeakyRelu": ("alpha", "consumed_inputs"), "PRelu": ("consumed_inputs",)}


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    search.backward(_check(node, affine, search), axis, affine)


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    _check(node, affine, search)
    search.forward(node.outputs[0], axis, affine)


def _check(node: ir.Node, affine: ChannelAffine, search: Search) -> ir.Value:
    only_attributes(node, _ATTRIBUTES[node.op_type])
    value = required_input(node)
    get_float(node, "alpha", 0.01)
    if node.op_type == "PRelu":
        # A slope must not enlarge the data: the map counts the axes of the result.
        rank, own = (search.context.known_rank(operand, node) for operand in (value, required_input(node, 1)))
        if own > rank:
            raise Refused("rank", f"the slope of {label(node)} has more axes than the data")
    if not affine.is_scaling:
        raise Refused("order", f"an offset cannot move through {node.op_type} ({label(node)})")
    if not (affine.scale > 0).all():
        raise Refused("order", f"a scale of 0 or below cannot move through {node.op_type} ({label(node)})")
    return value


RULE = Rule(
    "relu",
    tuple(_ATTRIBUTES),
    backward,
    forward,
    forms="Relu, LeakyRelu, PRelu",
    behind="passes a scaling with k > 0",
    front="f(k x + h) = k f(x + h / k): k passes, h / k goes up",
)
