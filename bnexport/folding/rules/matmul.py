"""MatMul with one constant operand: Z = X W (W (..., K, N)) or Z = W X (W (..., M, K)), batched by broadcasting.

Backward: the map acts on N, the last axis of X W, or on M, the last but one of W X; the scale goes into
W along that axis. MatMul has no bias, so a shift needs a place behind it (the engine leaves an Add).

Forward: the map acts on K: W' has its K axis scaled, and the product gains the constant vector
offset W (length N) or W offset (length M). It is added to the constant of an Add that alone reads the
product, or by an Add of its own; a W with batch axes has no single such vector.

A map on another axis - as after a Transpose or Reshape that nobody followed - is never folded, whether
or not the sizes happen to agree.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine, along
from bnexport.folding.context import Context
from bnexport.folding.editing.edits import Addend
from bnexport.folding.placing.search import Rule, Search
from bnexport.folding.reading.elementwise import data_and_constants
from bnexport.folding.reading.site import sole_use
from bnexport.graph.constants import Described
from bnexport.graph.nodes import input_at, is_standard, only_attributes
from bnexport.graph.refusal import Refused


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    constant, weight, rank = _check(node, search.context)
    place, in_weight = (rank - 1, weight.ndim - 1) if constant == 1 else (rank - 2, weight.ndim - 2)
    if axis != place:
        raise Refused("axis", f"the map acts on axis {axis} of rank {rank}, the MatMul weight on axis {place}")
    if weight.shape[in_weight] != affine.channels:
        raise Refused("shape", f"MatMul makes {weight.shape[in_weight]} channels, the map has {affine.channels}")
    if not affine.is_scaling:
        raise Refused("shift", "MatMul has no bias to take the shift")
    search.plan.scale(node, constant, along(affine.scale, in_weight, weight.ndim), "MatMul weight")


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    constant, weight, rank = _check(node, search.context)
    if index == constant:
        raise Refused("not-data", "the map reaches the constant of a MatMul")
    data = input_at(node, index)
    assert data is not None
    data_rank = search.context.rank(data)
    if data_rank is None or data_rank < 2:
        raise Refused("rank", "the rank of the MatMul's data is not known or below 2")
    place, in_weight = (data_rank - 1, weight.ndim - 2) if constant == 1 else (data_rank - 2, weight.ndim - 1)
    if axis != place:
        raise Refused("axis", f"the map acts on axis {axis} of rank {data_rank}, MatMul sums over axis {place}")
    if weight.shape[in_weight] != affine.channels:
        raise Refused("shape", f"MatMul sums over {weight.shape[in_weight]} channels, the map has {affine.channels}")
    if not affine.is_scaling:
        if weight.ndim != 2:
            raise Refused("shift", "the shift would differ between the batches of a MatMul weight")
        offset = along(affine.offset, in_weight, 2)
        vector, size = search.plan.sums(node, constant, offset, weight.shape, (1 - in_weight,), "MatMul weight")
        out_axis = rank - 1 if constant == 1 else rank - 2
        _place_shift(node, vector, size, out_axis, rank, weight.dtype, search)
    search.plan.scale(node, constant, along(affine.scale, in_weight, weight.ndim), "MatMul weight")


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


def _check(node: ir.Node, context: Context) -> tuple[int, Described, int]:
    """Return the index of the constant input, its value, and the rank of the product."""
    only_attributes(node, ())
    constant = [context.constants.is_constant(input_at(node, index)) for index in (0, 1)]
    if constant[0] == constant[1]:
        raise Refused("not-constant", "no operand, or both, of the MatMul is constant")
    index = 0 if constant[0] else 1
    weight = context.constants.describe(input_at(node, index), "MatMul weight")
    data = input_at(node, 1 - index)
    data_rank = None if data is None else context.rank(data)
    if weight.ndim < 2 or data_rank is None or data_rank < 2:
        raise Refused("rank", "the ranks of the MatMul's operands are not known or below 2")
    return index, weight, max(weight.ndim, data_rank)


RULE = Rule("matmul", ("MatMul",), backward, forward)
