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

from bnexport.folding.affine import ChannelAffine, along
from bnexport.folding.placing import Rule, Search
from bnexport.folding.sites import read_batch_norm
from bnexport.graph.nodes import Refused, get_int, input_at, label, only_attributes

_LAST = ("LayerNormalization", "RMSNormalization")
_ATTRIBUTES = {
    "InstanceNormalization": ("epsilon", "consumed_inputs"),
    "GroupNormalization": ("epsilon", "num_groups", "stash_type"),
    "LayerNormalization": ("axis", "epsilon", "stash_type"),
    "RMSNormalization": ("axis", "epsilon", "stash_type"),
}


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    only_attributes(node, _ATTRIBUTES[node.op_type])
    what = f"{node.op_type} scale"
    scale = search.plan.value(node, 1, what)
    place = _place(node, scale, axis, search)
    if scale.shape[place] != affine.channels:
        raise Refused(
            "shape", f"the scale of {label(node)} has shape {scale.shape}, the map {affine.channels} channels"
        )
    if not affine.is_scaling:
        _map_bias(node, scale.shape, place, affine, search)
    elif input_at(node, 2) is not None or (node, 2) in search.context.edits:
        bias = search.plan.value(node, 2, what)
        _replace(node, 2, bias * along(affine.scale, place, scale.ndim), None, search)
    _replace(node, 1, scale * along(affine.scale, place, scale.ndim), None, search)


def _place(node: ir.Node, scale: np.ndarray, axis: int, search: Search) -> int:
    """Return the axis of the scale along which a map on `axis` of the result runs."""
    if node.op_type == "GroupNormalization" and search.context.opset < 21:
        raise Refused("opset", f"{label(node)} has a scale for each group, not for each channel")
    if node.op_type not in _LAST:
        if axis != 1 or scale.ndim != 1:
            raise Refused("axis", f"the map acts on axis {axis}, the channels of {label(node)} are axis 1")
        return 0
    rank = search.context.known_rank(node.outputs[0], node)
    first = get_int(node, "axis", -1)
    place = axis - (rank - scale.ndim)
    if axis < (first + rank if first < 0 else first) or place < 0:
        raise Refused("axis", f"the map acts on axis {axis}, which {label(node)} does not scale")
    return place


def _map_bias(node: ir.Node, shape: tuple[int, ...], place: int, affine: ChannelAffine, search: Search) -> None:
    if node.op_type == "RMSNormalization":
        raise Refused("shift", f"{label(node)} has no bias to take the shift")
    absent = input_at(node, 2) is None and (node, 2) not in search.context.edits and (node, 2) not in search.plan.edits
    bias = np.zeros(shape) if absent else search.plan.value(node, 2, f"{node.op_type} bias")
    if bias.shape != shape:
        raise Refused("shape", f"the bias of {label(node)} has shape {bias.shape}, its scale {shape}")
    scale, center, shift = (along(part, place, len(shape)) for part in (affine.scale, affine.center, affine.shift))
    size = np.abs(scale) * (np.abs(bias) + np.abs(center)) + np.abs(shift)
    _replace(node, 2, (bias - center) * scale + shift, size, search)


def _replace(node: ir.Node, index: int, values: np.ndarray, size: np.ndarray | None, search: Search) -> None:
    dtype = search.context.constants.describe(input_at(node, 1), f"{node.op_type} scale").dtype
    search.plan.replace(node, index, values, dtype, f"{node.op_type} parameter", size)


def _batch_norm_backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    own = read_batch_norm(node, search.context)
    if axis != 1 or own.channels != affine.channels:
        raise Refused("axis", f"the map acts on axis {axis}, the channels of {label(node)} are axis 1")
    scale, bias = (search.plan.value(node, index, "batch norm parameter") for index in (1, 2))
    size = np.abs(affine.scale) * (np.abs(bias) + np.abs(affine.center)) + np.abs(affine.shift)
    for index, values, magnitude in ((1, scale * affine.scale, None), (2, affine.apply(bias), size)):
        dtype = search.context.constants.describe(input_at(node, index), "batch norm parameter").dtype
        search.plan.replace(node, index, values, dtype, "batch norm parameter", magnitude)


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
