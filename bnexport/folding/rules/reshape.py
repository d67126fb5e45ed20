"""Operators that rearrange positions: Transpose, Reshape, Flatten, Squeeze, Unsqueeze.

    x -> Reshape -> map along its channels    =    x -> map along the same channels -> Reshape

    y[p(i)] = x[i]

A map along axis a of x is a map along one axis of y when that axis enumerates the same channels in the same order: the sizes
before it multiply to the same number, and so do the sizes behind it. That is decided from sizes known as numbers or by name;
equal sizes alone prove nothing (a Reshape of (N L, C) to (N, L, C) has L on axis 1, also where L = C).

Forward, (..., C, S, ...) may become (..., C S, ...): each channel's scale is repeated S times.

A channel shuffle is three of them, and moves the map of each channel with it:

    (N, C, H, W) -> Reshape (N, G, C / G, H, W) -> Transpose (0, 2, 1, 3, 4) -> Reshape (N, C, H, W)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.folding.placing import Rule, Search
from bnexport.folding.sites import sole_use
from bnexport.graph.nodes import (
    Refused,
    from_front,
    get_flag,
    get_int,
    get_ints,
    input_at,
    is_standard,
    label,
    only_attributes,
    required_input,
)
from bnexport.graph.shapes import Shape


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    value = required_input(node)
    try:
        source = _TO_INPUT[node.op_type](node, value, axis, search.context)
    except Refused:
        shuffle = _shuffle_above(node, axis, search.context)
        if shuffle is None or shuffle.channels.size != affine.channels:
            raise
        search.plan.passed.update(dict.fromkeys(shuffle.nodes))
        search.backward(shuffle.input, axis, affine.take(np.argsort(shuffle.channels)))
        return
    search.backward(value, source, affine)


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    value = required_input(node)
    try:
        place, repeat = _TO_OUTPUT[node.op_type](node, value, axis, search.context)
    except Refused:
        shuffle = _shuffle_below(node, axis, search.context)
        if shuffle is None or shuffle.channels.size != affine.channels:
            raise
        search.plan.passed.update(dict.fromkeys(shuffle.nodes))
        search.forward(shuffle.nodes[-1].outputs[0], axis, affine.take(shuffle.channels))
        return
    search.forward(node.outputs[0], place, affine if repeat == 1 else affine.repeat(repeat))


class _Shuffle(NamedTuple):
    """Reshape, Transpose and Reshape. channels: which one of the input each of the result is."""

    nodes: tuple[ir.Node, ir.Node, ir.Node]
    input: ir.Value
    channels: np.ndarray


def _shuffle_above(last: ir.Node, axis: int, context: Context) -> _Shuffle | None:
    """Return the shuffle of `axis` that ends with a node."""
    nodes = [last]
    for op_type in ("Transpose", "Reshape"):
        value = input_at(nodes[-1], 0)
        node = None if value is None else value.producer()
        if value is None or node is None or not is_standard(node, op_type) or sole_use(value, last.graph) is None:
            return None
        nodes.append(node)
    return _shuffle(nodes[2], nodes[1], nodes[0], axis, context)


def _shuffle_below(first: ir.Node, axis: int, context: Context) -> _Shuffle | None:
    """Return the shuffle of `axis` that starts with a node."""
    second = sole_use(first.outputs[0], first.graph)
    third = None if second is None else sole_use(second.outputs[0], first.graph)
    if second is None or third is None or not is_standard(second, "Transpose") or not is_standard(third, "Reshape"):
        return None
    return _shuffle(first, second, third, axis, context)


def _shuffle(first: ir.Node, second: ir.Node, third: ir.Node, axis: int, context: Context) -> _Shuffle | None:
    value, middle, turned = (input_at(node, 0) for node in (first, second, third))
    if value is None or middle is None or turned is None or first.op_type != "Reshape" or third.op_type != "Reshape":
        return None
    try:
        before, parts, zeros = _reshape_shapes(first, value, context)
        permutation = _permutation(second, middle, context)
        _, after, later = _reshape_shapes(third, turned, context)
    except Refused:
        return None
    end = axis + len(parts) - len(before) + 1
    inner = permutation[axis:end]
    moved = tuple(parts[place] for place in permutation) if sorted(permutation) == list(range(len(parts))) else ()
    keeps = all(place == index for index, place in enumerate(permutation) if not axis <= index < end)
    sizes = [size for size in parts[axis:end] if isinstance(size, int)]
    fits = (
        len(moved) == len(parts) and keeps and end > axis + 1 and len(after) == len(before) and len(sizes) == len(inner)
    )
    if not fits or not all(
        _aligned(before, axis + far, parts, end if far else axis, zeros)
        and _aligned(moved, end if far else axis, after, axis + far, later)
        for far in (0, 1)
    ):
        return None
    order = np.arange(math.prod(sizes)).reshape(sizes).transpose([place - axis for place in inner])
    return _Shuffle((first, second, third), value, order.reshape(-1))


def _permutation(node: ir.Node, value: ir.Value, context: Context) -> tuple[int, ...]:
    only_attributes(node, ("perm",))
    permutation = get_ints(node, "perm")
    if permutation is not None:
        return permutation
    return tuple(reversed(range(context.known_rank(value, node))))


def _transpose_to_input(node: ir.Node, value: ir.Value, axis: int, context: Context) -> int:
    permutation = _permutation(node, value, context)
    if axis >= len(permutation):
        raise Refused("axis", f"{label(node)} has no axis {axis}")
    return permutation[axis]


def _transpose_to_output(node: ir.Node, value: ir.Value, axis: int, context: Context) -> tuple[int, int]:
    permutation = _permutation(node, value, context)
    if axis not in permutation:
        raise Refused("axis", f"{label(node)} has no axis {axis}")
    return permutation.index(axis), 1


def _axes(node: ir.Node, rank: int, context: Context) -> tuple[int, ...]:
    """Return the axes of Squeeze and Unsqueeze, an attribute before opset 13 and an input since."""
    only_attributes(node, () if context.opset >= 13 else ("axes",))
    axes = context.constants.axes(node, 13)
    if not axes:
        raise Refused("axis", f"{label(node)} names no axes")
    if context.opset < 11 and min(axes) < 0:
        # ONNX Runtime takes them; ONNX does not, and its inference gives another rank.
        raise Refused("opset", f"{label(node)} has a negative axis, which opset {context.opset} does not define")
    return tuple(sorted(from_front(axes, rank)))


def _without(axes: tuple[int, ...], axis: int, node: ir.Node) -> int:
    """Return the position of `axis` after `axes` have been removed."""
    if axis in axes:
        raise Refused("axis", f"{label(node)} drops the channel axis")
    return axis - sum(removed < axis for removed in axes)


def _with(axes: tuple[int, ...], axis: int) -> int:
    """Return the position of `axis` after `axes` have been inserted."""
    for inserted in axes:
        if inserted <= axis:
            axis += 1
    return axis


def _squeeze_to_input(node: ir.Node, value: ir.Value, axis: int, context: Context) -> int:
    return _with(_axes(node, context.known_rank(value, node), context), axis)


def _squeeze_to_output(node: ir.Node, value: ir.Value, axis: int, context: Context) -> tuple[int, int]:
    return _without(_axes(node, context.known_rank(value, node), context), axis, node), 1


def _unsqueeze_axes(node: ir.Node, value: ir.Value, context: Context) -> tuple[int, ...]:
    count = len(_axes(node, 0, context))
    return _axes(node, context.known_rank(value, node) + count, context)


def _unsqueeze_to_input(node: ir.Node, value: ir.Value, axis: int, context: Context) -> int:
    return _without(_unsqueeze_axes(node, value, context), axis, node)


def _unsqueeze_to_output(node: ir.Node, value: ir.Value, axis: int, context: Context) -> tuple[int, int]:
    return _with(_unsqueeze_axes(node, value, context), axis), 1


def _reshape_shapes(node: ir.Node, value: ir.Value, context: Context) -> tuple[Shape, Shape, int]:
    """Return both shapes, and the number of leading sizes that are copied."""
    before, after = context.shape(value), context.shape(node.outputs[0])
    if node.op_type == "Flatten":
        only_attributes(node, ("axis",))
        if before is None:
            raise Refused("shape", f"the shape before {label(node)} is not known")
        split = get_int(node, "axis", 1)
        split += len(before) if split < 0 else 0
        return before, (_product(before[:split]), _product(before[split:])), 0
    only_attributes(node, ("allowzero",))
    if context.opset < 5:
        raise Refused("opset", "Reshape before opset 5 takes its shape from an attribute")
    try:
        target = context.constants.ints(input_at(node, 1), f"shape of {label(node)}")
    except Refused:
        target = ()
    zeros = 0
    if not get_flag(node, "allowzero"):
        while zeros < len(target) and target[zeros] == 0:
            zeros += 1
    if after is None and target:
        after = tuple(size if size > 0 else None for size in target)
    if before is None and zeros:
        before = (None,) * zeros
    if before is None or after is None:
        raise Refused("shape", f"the shapes around {label(node)} are not known")
    return before, after, zeros


def _product(sizes: Sequence[int | str | None]) -> int | None:
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None  # type: ignore[arg-type]


def same_product(first: Sequence[int | str | None], second: Sequence[int | str | None]) -> bool:
    """Whether two lists of sizes certainly multiply to the same number."""
    if any(size is None for size in (*first, *second)):
        return False
    names = [sorted(size for size in sizes if isinstance(size, str)) for sizes in (first, second)]
    numbers = [math.prod(size for size in sizes if isinstance(size, int)) for sizes in (first, second)]
    return names[0] == names[1] and numbers[0] == numbers[1]


def _aligned(before: Shape, i: int, after: Shape, j: int, zeros: int) -> bool:
    """Whether the first i sizes of `before` and the first j of `after` certainly hold equally many positions."""
    if i == j and i <= zeros:
        return True
    return same_product(before[:i], after[:j]) or same_product(before[i:], after[j:])


def _reshape_to_input(node: ir.Node, value: ir.Value, axis: int, context: Context) -> int:
    before, after, zeros = _reshape_shapes(node, value, context)
    if axis < zeros:
        return axis
    for source in range(len(before)):
        if _aligned(before, source, after, axis, zeros) and _aligned(before, source + 1, after, axis + 1, zeros):
            return source
    raise Refused("reshape", f"{label(node)} does not keep the channels on one axis: {_show(before)} to {_show(after)}")


def _reshape_to_output(node: ir.Node, value: ir.Value, axis: int, context: Context) -> tuple[int, int]:
    before, after, zeros = _reshape_shapes(node, value, context)
    if axis < zeros:
        return axis, 1
    for place in range(len(after)):
        if not _aligned(before, axis, after, place, zeros):
            continue
        for end in range(axis + 1, len(before) + 1):
            inner = _product(before[axis + 1 : end])
            if inner is not None and _aligned(before, end, after, place + 1, zeros):
                return place, inner
    raise Refused("reshape", f"{label(node)} does not keep the channels on one axis: {_show(before)} to {_show(after)}")


def _show(shape: Shape) -> str:
    return "(" + ", ".join("?" if size is None else str(size) for size in shape) + ")"


_TO_INPUT: dict[str, Callable[[ir.Node, ir.Value, int, Context], int]] = {
    "Flatten": _reshape_to_input,
    "Reshape": _reshape_to_input,
    "Squeeze": _squeeze_to_input,
    "Transpose": _transpose_to_input,
    "Unsqueeze": _unsqueeze_to_input,
}
_TO_OUTPUT: dict[str, Callable[[ir.Node, ir.Value, int, Context], tuple[int, int]]] = {
    "Flatten": _reshape_to_output,
    "Reshape": _reshape_to_output,
    "Squeeze": _squeeze_to_output,
    "Transpose": _transpose_to_output,
    "Unsqueeze": _unsqueeze_to_output,
}

RULE = Rule(
    "reshape",
    tuple(_TO_INPUT),
    backward,
    forward,
    forms="Transpose, Reshape, Flatten, Squeeze, Unsqueeze",
    behind="passes, if one axis holds the channels on both sides; a channel shuffle (Reshape, Transpose, Reshape) moves it",
    front="passes; (C, S) to C S repeats each channel S times",
)
