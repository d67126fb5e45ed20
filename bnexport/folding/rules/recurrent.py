"""LSTM, GRU and RNN take a map at their input sequence.

    x -> map -> LSTM(W, R, [Wb, Rb])    =    x -> LSTM(W k, R, [Wb + W h, Rb])

Each gate reads W x + Wb before anything else is done with it. The features are the last axis of x, in either layout.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.placing import Rule, Search
from bnexport.graph.nodes import Refused, input_at, label


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    if axis != 2:
        raise Refused("axis", f"the map acts on axis {axis}, the features of {label(node)} are axis 2")
    weight = search.context.constants.describe(input_at(node, 1), f"{node.op_type} weight")
    if weight.shape[2:] != (affine.channels,):
        raise Refused(
            "shape", f"a {node.op_type} weight of shape {weight.shape}, the map has {affine.channels} channels"
        )
    if not affine.is_scaling:
        _add_to_bias(node, affine, weight.shape, weight.dtype, search)
    search.plan.scale(node, 1, affine.scale.reshape(1, 1, -1), f"{node.op_type} weight")


def _add_to_bias(node: ir.Node, affine: ChannelAffine, shape: tuple[int, ...], dtype: np.dtype, search: Search) -> None:
    directions, gates, _ = shape
    total, size = search.plan.sums(node, 1, affine.offset.reshape(1, 1, -1), shape, (0, 1), f"{node.op_type} weight")
    has = search.plan.has(node, 3)
    bias = search.plan.value(node, 3, f"{node.op_type} bias").copy() if has else np.zeros((directions, 2 * gates))
    if bias.shape != (directions, 2 * gates):
        raise Refused("shape", f"the {node.op_type} bias has shape {bias.shape}, expected {(directions, 2 * gates)}")
    magnitude = np.abs(bias)
    bias[:, :gates] += total
    magnitude[:, :gates] += size
    search.plan.replace(node, 3, bias, dtype, f"{node.op_type} bias", magnitude)


RULE = Rule(
    "recurrent",
    ("LSTM", "GRU", "RNN"),
    None,
    forward,
    into="recurrent layers",
    forms="LSTM, GRU, RNN",
    behind="",
    front="W' = W k, Wb' = Wb + W h",
)
