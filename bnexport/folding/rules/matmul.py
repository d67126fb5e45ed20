"""MatMul and Einsum with one constant operand.

    X W -> map along N    =    X (W k)              W (..., K, N); in W X the last axis but one
    map along K -> X W    =    X (k W) + h W
    Einsum(X, W) -> map   =    Einsum(X, W k)       the axis of W with the letter that the map acts on

There is no bias. So a shift behind needs a place of its own (the engine leaves an Add), and h W is added to the constant of an
Add that alone reads the product, or by an Add of its own. A W of more than two axes has no single such vector.

A map along another axis, as after a Transpose or Reshape that nobody followed, is never folded, whether or not the sizes
happen to agree.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine, along
from bnexport.folding.context import Addend, Context
from bnexport.folding.placing import Rule, Search
from bnexport.folding.sites import data_and_constants, sole_use
from bnexport.graph.constants import Described
from bnexport.graph.nodes import Refused, get_string, input_at, is_standard, label, only_attributes, required_input

# One for each axis of "...", counted from the last.
_BATCH = "0123456789"


class _Product(NamedTuple):
    """constant: the place of the weight. letters: one for each axis, of the data, of the weight and of the result."""

    constant: int
    weight: Described
    letters: tuple[str, str, str]


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    constant, weight, (_, own, made) = _read(node, search.context)
    in_weight = _along(own, made, axis, weight, affine, node)
    if not affine.is_scaling:
        raise Refused("shift", f"{node.op_type} has no bias to take the shift")
    search.plan.scale(node, constant, along(affine.scale, in_weight, weight.ndim), f"{node.op_type} weight")


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    constant, weight, (read, own, made) = _read(node, search.context)
    if index == constant:
        raise Refused("not-data", f"the map reaches the constant of {label(node)}")
    in_weight = _along(own, read, axis, weight, affine, node)
    if not affine.is_scaling:
        summed = set(read) - set(made)
        if weight.ndim != 2 or summed != {read[axis]} or own[1 - in_weight] not in made:
            raise Refused("shift", f"the shift is not one number for each channel of the result of {label(node)}")
        offset = along(affine.offset, in_weight, 2)
        vector, size = search.plan.sums(
            node, constant, offset, weight.shape, (1 - in_weight,), f"{node.op_type} weight"
        )
        _place_shift(node, vector, size, made.index(own[1 - in_weight]), len(made), weight.dtype, search)
    search.plan.scale(node, constant, along(affine.scale, in_weight, weight.ndim), f"{node.op_type} weight")


def _along(own: str, other: str, axis: int, weight: Described, affine: ChannelAffine, node: ir.Node) -> int:
    """Return the axis of the weight that is `axis` of the other value. Raises Refused where none is, or of another size."""
    if axis >= len(other) or other[axis] not in own:
        raise Refused(
            "axis", f"the map acts on axis {axis} of rank {len(other)}, which the {node.op_type} weight does not share"
        )
    shared = own.index(other[axis])
    if weight.shape[shared] != affine.channels:
        size = weight.shape[shared]
        raise Refused(
            "shape", f"axis {shared} of the {node.op_type} weight has {size} channels, the map has {affine.channels}"
        )
    return shared


def _place_shift(
    node: ir.Node, vector: np.ndarray, size: np.ndarray, axis: int, rank: int, dtype: np.dtype, search: Search
) -> None:
    output = node.outputs[0]
    reader = sole_use(output, node.graph)
    is_sum = reader is not None and is_standard(reader, "Add", "Sum")
    operands = data_and_constants(reader, search.context) if reader is not None and is_sum else None
    if reader is not None and operands is not None and operands.constants:
        index = operands.constants[0]
        constant = search.plan.value(reader, index, f"{reader.op_type} constant")
        shape = (-1, *[1] * (rank - axis - 1))
        total = constant + vector.reshape(shape)
        if total.ndim <= rank and total.size <= max(constant.size, vector.size):
            magnitude = np.abs(constant) + size.reshape(shape)
            search.plan.replace(reader, index, total, dtype, f"{reader.op_type} constant", magnitude)
            return
    search.plan.add_behind(node, Addend(vector, axis, rank, dtype))


def _read(node: ir.Node, context: Context) -> _Product:
    """Raises Refused where no operand, or both, are constant, or the axes are not known."""
    only_attributes(node, ("equation",) if node.op_type == "Einsum" else ())
    constant = [context.constants.is_constant(each) for each in node.inputs]
    if sorted(constant) != [False, True]:
        raise Refused("not-constant", f"no operand, or both, of {label(node)} is constant")
    place = constant.index(True)
    weight = context.constants.describe(input_at(node, place), f"{node.op_type} weight")
    rank = context.known_rank(required_input(node, 1 - place), node)
    if node.op_type == "MatMul" and min(rank, weight.ndim) < 2:
        raise Refused("rank", f"a rank of the operands of {label(node)} is below 2")
    letters = _letters(node, (weight.ndim, rank) if place == 0 else (rank, weight.ndim))
    return _Product(place, weight, (letters[1 - place], letters[place], letters[2]))


def _letters(node: ir.Node, ranks: tuple[int, int]) -> list[str]:
    """Return the letters of both operands and of the result. Raises Refused for a diagonal or axes that an ellipsis sums."""
    equation = "...ij,...jk->...ik"
    if node.op_type == "Einsum":
        equation = get_string(node, "equation", "").replace(" ", "")
    operands, _, made = equation.partition("->")
    parts = operands.split(",")
    spare = [rank - len(part.replace("...", "")) for rank, part in zip(ranks, parts, strict=False)]
    fits = all(count in range(11 if "..." in part else 1) for count, part in zip(spare, parts, strict=False))
    if len(parts) != 2 or not made or not fits:
        raise Refused("unknown-mode", f"{label(node)} has an equation of another form: {equation}")
    counts = [*spare, max(spare)]
    letters = [part.replace("...", _BATCH[10 - n :]) for part, n in zip([*parts, made], counts, strict=True)]
    if any(len(set(each)) != len(each) for each in letters):
        raise Refused("unknown-mode", f"{label(node)} takes a diagonal: {equation}")
    return letters


RULE = Rule(
    "matmul",
    ("MatMul", "Einsum"),
    backward,
    forward,
    any_input=True,
    into="matrix products",
    forms="MatMul with one constant, either side, batched; Einsum of one constant, as `bi,io->bo`",
    behind="W' = W k along the mapped axis; the shift becomes an Add",
    front="W' = k W; h W goes into the Add behind, or a new one",
)
