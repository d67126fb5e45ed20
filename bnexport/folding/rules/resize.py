"""Resize and Upsample of the positions within a channel.

    x -> Resize -> map    =    x -> map -> Resize

Nearest, linear and cubic interpolation form each value as sum_i w_i x_i with sum_i w_i = 1, so

    sum_i w_i (k x_i + h) = k sum_i w_i x_i + h

The crop mode tf_crop_and_resize writes a fixed value outside the image, and a resized channel axis mixes
channels: both are refused.
"""

from __future__ import annotations

import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.folding.placing import Rule, Search
from bnexport.graph.nodes import (
    Refused,
    from_front,
    get_float,
    get_floats,
    get_ints,
    get_string,
    input_at,
    label,
    only_attributes,
    required_input,
)

_MODES = ("nearest", "linear", "bilinear", "cubic")
_ATTRIBUTES = (
    "antialias",
    "axes",
    "coordinate_transformation_mode",
    "cubic_coeff_a",
    "exclude_outside",
    "extrapolation_value",
    "height_scale",
    "keep_aspect_ratio_policy",
    "mode",
    "nearest_mode",
    "scales",
    "width_scale",
)


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    value = _check(node, axis, search.context)
    search.backward(value, axis, affine)


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    _check(node, axis, search.context)
    search.forward(node.outputs[0], axis, affine)


def _check(node: ir.Node, axis: int, context: Context) -> ir.Value:
    only_attributes(node, _ATTRIBUTES)
    value = required_input(node)
    if get_string(node, "mode", "nearest") not in _MODES:
        raise Refused("unknown-mode", f"{label(node)} has the unknown mode {get_string(node, 'mode', '')!r}")
    if get_string(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        raise Refused("crop", f"{label(node)} writes a fixed value outside the image")
    if get_string(node, "keep_aspect_ratio_policy", "stretch") != "stretch" and "axes" not in node.attributes:
        raise Refused("axis", f"{label(node)} resizes all axes by one factor, the channels too")
    if not _keeps_axis(node, value, axis, context):
        raise Refused("axis", f"{label(node)} resizes the channel axis, or it is not known whether it does")
    return value


def _keeps_axis(node: ir.Node, value: ir.Value, axis: int, context: Context) -> bool:
    if "height_scale" in node.attributes:  # Upsample of opset 1 scales the last two axes only.
        get_float(node, "height_scale", 1.0)
        return context.rank(value) == 4 and axis == 1
    axes = get_ints(node, "axes")
    if axes is not None:
        if any(place < 0 for place in axes):
            rank = context.rank(value)
            if rank is None:
                return False
            axes = from_front(axes, rank)
        return axis not in axes
    if (scales := get_floats(node, "scales")) is not None:  # Upsample of opset 7 and 8.
        return scales[axis : axis + 1] == (1.0,)
    places = {"Upsample": (1, None), "Resize": (1, None) if context.opset < 11 else (2, 3)}[node.op_type]
    if (operand := input_at(node, places[0])) is not None:
        factors = context.constants.floats(operand, "scales").reshape(-1)
        if factors.size:
            return factors[axis : axis + 1].tolist() == [1.0]
    if places[1] is not None and (operand := input_at(node, places[1])) is not None:
        sizes = context.constants.ints(operand, "sizes")
        return sizes[axis : axis + 1] == (context.size(value, axis),)
    return False


RULE = Rule(
    "resize",
    ("Resize", "Upsample"),
    backward,
    forward,
    forms="Resize, Upsample; nearest, linear, cubic",
    behind="passes (weights sum to 1)",
    front="passes",
)
