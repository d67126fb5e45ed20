"""Split and Slice: parts of a value.

    x -> Split along channels, part i -> map    =    x -> map of the channels of part i, identity elsewhere -> Split
    x -> map -> Split along channels            =    x -> Split, part i -> its part of the map
    x -> Slice along another axis -> map        =    x -> map -> Slice

Along another axis than the channels' a part has all channels, and the map passes - backward only when no
other part is read, since it would be mapped, too.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.folding.placing import Rule, Search
from bnexport.graph.nodes import (
    Refused,
    from_front,
    get_int,
    get_ints,
    input_at,
    label,
    only_attributes,
    required_input,
    used,
)


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    value = required_input(node)
    channels = _channels(node, value, axis, search.context)
    if channels is None:
        if any(used(output) for output in node.outputs if output is not search.asked):
            raise Refused("shared", f"another part of {label(node)} is read, which the map would change")
        search.backward(value, axis, affine)
        return
    size, parts = channels
    assert search.asked is not None
    own = parts[node.outputs.index(search.asked)]
    if own.size != affine.channels:
        raise Refused("shape", f"{label(node)} gives {own.size} channels, the map has {affine.channels}")
    search.backward(value, axis, affine.spread(own, size))


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    channels = _channels(node, required_input(node), axis, search.context)
    if channels is not None and channels[0] != affine.channels:
        raise Refused("shape", f"{label(node)} reads {channels[0]} channels, the map has {affine.channels}")
    for place, output in enumerate(node.outputs):
        if used(output):
            search.forward(output, axis, affine if channels is None else affine.take(channels[1][place]))


def _channels(node: ir.Node, value: ir.Value, axis: int, context: Context) -> tuple[int, list[np.ndarray]] | None:
    """Return the number of channels and the channels of each part; None if every part has all."""
    rank = context.known_rank(value, node)
    size = context.size(value, axis)
    parts = (
        _split(node, axis, rank, size, context) if node.op_type == "Split" else _slice(node, axis, rank, size, context)
    )
    if parts is None:
        return None
    if size is None:
        raise Refused("shape", f"the channels of {label(node)} are not known")
    return size, parts


def _split(node: ir.Node, axis: int, rank: int, size: int | None, context: Context) -> list[np.ndarray] | None:
    only_attributes(node, ("axis", "split", "num_outputs"))
    along = get_int(node, "axis", 0)
    if from_front((along,), rank) != (axis,):
        return None
    if size is None:
        return []
    sizes = get_ints(node, "split")
    if (operand := input_at(node, 1)) is not None:
        sizes = context.constants.ints(operand, f"sizes of {label(node)}")
    if sizes is None:
        # From opset 18 on, the last of `num_outputs` parts may be smaller.
        part = max(1, math.ceil(size / len(node.outputs)))
        sizes = tuple(min(part, size - start) for start in range(0, size, part))
    if sum(sizes) != size or len(sizes) != len(node.outputs) or any(count < 0 for count in sizes):
        raise Refused("shape", f"the parts of {label(node)} do not add up to {size} channels")
    ends = np.cumsum(sizes)
    return [np.arange(end - count, end) for end, count in zip(ends, sizes, strict=True)]


def _slice(node: ir.Node, axis: int, rank: int, size: int | None, context: Context) -> list[np.ndarray] | None:
    only_attributes(node, ("starts", "ends", "axes"))

    def field(index: int) -> tuple[int, ...] | None:
        name, operand = ("starts", "ends", "axes", "steps")[index - 1], input_at(node, index)
        return get_ints(node, name) if operand is None else context.constants.ints(operand, f"{name} of {label(node)}")

    axes = field(3)
    axes = None if axes is None else from_front(axes, rank)
    if axes is not None and axis not in axes:  # starts and ends may be computed
        return None
    starts, ends, steps = field(1), field(2), field(4)
    if starts is None or ends is None:
        raise Refused("bad-node", f"{label(node)} has no starts or no ends")
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise Refused("bad-node", f"{label(node)} has {len(starts)} starts, {len(ends)} ends and {len(axes)} axes")
    if axis not in axes:
        return None
    place = axes.index(axis)
    if steps[place] < 1:
        raise Refused("axis", f"{label(node)} reverses the channels")
    # ONNX counts and cuts off starts and ends as Python does.
    return [] if size is None else [np.arange(size)[starts[place] : ends[place] : steps[place]]]


RULE = Rule(
    "split",
    ("Split", "Slice"),
    backward,
    forward,
    all_outputs=True,
    forms="Split, Slice",
    behind="along the channels the other parts get the identity; along another axis only if no other part is read",
    front="along the channels each part has its share",
)
