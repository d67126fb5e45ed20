"""BatchNormalization, InstanceNormalization, LayerNormalization, GroupNormalization and RMSNormalization take a map in their
own scale and bias.

    x -> norm(s, b) -> map    =    x -> norm(k s, k (b - c) + t)

    y = s * normalised(x) + b

A batch norm with nothing before it that takes its map has them, too. (Adjacent maps are composed as one site before any rule
is asked; this is for maps that arrive through other operators, as in batch norm - Reshape - batch norm.)

Backward only: what they read is normalised, so a map in front of them is another function. Before opset 21 a
GroupNormalization has one scale for each group. An RMSNormalization has no bias, so it takes a scale only.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.placing import Rule, Search, check_axis
from bnexport.folding.sites import read_batch_norm
from bnexport.graph.nodes import Refused, input_at, label, only_attributes

_LAST = ("LayerNormalization", "RMSNormalization")
_ATTRIBUTES = {
    "InstanceNormalization": ("epsilon", "consumed_inputs"),
    "GroupNormalization": ("epsilon", "num_groups", "stash_type"),
    "LayerNormalization": ("axis", "epsilon", "stash_type"),
    "RMSNormalization": ("axis", "epsilon", "stash_type"),
}


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    only_attributes(node, _ATTRIBUTES[node.op_type])
    scale = search.plan.value(node, 1, f"{node.op_type} scale")
    _map(node, _place(node, scale, axis, search), affine, scale, search)


def _map(node: ir.Node, place: int, affine: ChannelAffine, scale: np.ndarray, search: Search) -> None:
    """Apply the map along one axis of the scale and the bias, which is created if absent and not 0."""
    if scale.shape[place : place + 1] != (affine.channels,):
        raise Refused(
            "shape", f"the scale of {label(node)} has shape {scale.shape}, the map {affine.channels} channels"
        )
    plan, what = search.plan, f"{node.op_type} parameter"
    dtype = search.context.constants.describe(input_at(node, 1), f"{node.op_type} scale").dtype
    if plan.has(node, 2) or not affine.is_scaling:
        if node.op_type == "RMSNormalization":
            raise Refused("shift", f"{label(node)} has no bias to take the shift")
        bias = plan.value(node, 2, what) if plan.has(node, 2) else np.zeros(scale.shape)
        if bias.shape != scale.shape:
            raise Refused("shape", f"the bias of {label(node)} has shape {bias.shape}, its scale {scale.shape}")
        plan.map(node, 2, place, affine, dtype, what, bias)
    plan.map(node, 1, place, affine.only_scale(), dtype, what, scale)


def _place(node: ir.Node, scale: np.ndarray, axis: int, search: Search) -> int:
    """Return the axis of the scale along which a map on `axis` of the result runs."""
    if node.op_type == "GroupNormalization" and search.context.opset < 21:
        raise Refused("opset", f"{label(node)} has a scale for each group, not for each channel")
    if node.op_type not in _LAST:
        check_axis(node, axis)
        if scale.ndim != 1:
            raise Refused(
                "shape", f"the scale of {label(node)} has shape {scale.shape}, expected one value for each channel"
            )
        return 0
    rank = search.context.known_rank(node.outputs[0], node)
    place = axis - (rank - scale.ndim)
    if place < 0:
        raise Refused("axis", f"the map acts on axis {axis}, which {label(node)} does not scale")
    return place


def _batch_norm_backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    read_batch_norm(node, search.context)
    check_axis(node, axis)
    _map(node, 0, affine, search.plan.value(node, 1, "batch norm scale"), search)


BATCH_NORM = Rule(
    "batch_norm",
    ("BatchNormalization",),
    _batch_norm_backward,
    into="other batch norms",
    forms="BatchNormalization that stays",
    behind="s' = k s, b' = k (b - c) + t",
    front="(neighbours join the site)",
)
RULE = Rule(
    "normalization",
    tuple(_ATTRIBUTES),
    backward,
    into="normalisations",
    forms="InstanceNormalization, LayerNormalization, RMSNormalization, GroupNormalization from opset 21",
    behind="s' = k s, b' = k (b - c) + t; RMSNormalization only a scaling",
)
