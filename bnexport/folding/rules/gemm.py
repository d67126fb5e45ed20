"""Gemm: Z = alpha * A' B' + beta * C, with A' (M, K), B' (K, N) and C that broadcasts to (M, N).

    Gemm(A, B, C) -> map along N    =    Gemm(A, B k, k (beta C - c) + t)        beta becomes 1
    map along K -> Gemm(A, B, C)    =    Gemm(A, k B, beta C + alpha h B)        beta becomes 1

The new C has the shape to which C and N broadcast, so that every legal shape of C stays legal. (Before opset 7 a smaller C
needs the attribute broadcast.)
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import ChannelAffine
from bnexport.folding.context import Context
from bnexport.folding.placing import Rule, Search
from bnexport.graph.constants import Described
from bnexport.graph.nodes import Refused, get_flag, get_float, input_at, only_attributes

_ATTRIBUTES = ("alpha", "beta", "transA", "transB")


def backward(node: ir.Node, axis: int, affine: ChannelAffine, search: Search) -> None:
    weight, k_axis = _check(node, search.context)
    n_axis = 1 - k_axis
    if axis != 1:
        raise Refused("axis", f"the map acts on axis {axis}, Gemm's columns are axis 1")
    if weight.shape[n_axis] != affine.channels:
        raise Refused("shape", f"Gemm makes {weight.shape[n_axis]} columns, the map has {affine.channels}")
    scale, shift = _along(affine.scale, n_axis), _along(affine.shift, n_axis)
    products = weight.shape[k_axis] * get_float(node, "alpha", 1.0) ** 2
    search.plan.scale(node, 1, scale, "Gemm weight", shift=shift, products=products)
    constant = _constant(node, search, weight.shape[n_axis])
    size = np.abs(affine.scale) * (np.abs(constant) + np.abs(affine.center)) + np.abs(affine.shift)
    _set_constant(node, affine.apply(constant), size, weight.dtype, search)


def forward(node: ir.Node, index: int, axis: int, affine: ChannelAffine, search: Search) -> None:
    weight, k_axis = _check(node, search.context)
    inner = 0 if get_flag(node, "transA") else 1
    if axis != inner:
        raise Refused("axis", f"the map acts on axis {axis}, Gemm sums over axis {inner}")
    if weight.shape[k_axis] != affine.channels:
        raise Refused("shape", f"Gemm sums over {weight.shape[k_axis]} columns, the map has {affine.channels}")
    if not affine.is_scaling:
        offset = _along(get_float(node, "alpha", 1.0) * affine.offset, k_axis)
        total, size = search.plan.sums(node, 1, offset, weight.shape, (1 - k_axis,), "Gemm weight")
        constant = _constant(node, search, weight.shape[1 - k_axis])
        _set_constant(node, constant + total, np.abs(constant) + size, weight.dtype, search)
    search.plan.scale(node, 1, _along(affine.scale, k_axis), "Gemm weight")


def _along(vector: np.ndarray, axis: int) -> np.ndarray:
    return vector.reshape(-1, 1) if axis == 0 else vector.reshape(1, -1)


def _check(node: ir.Node, context: Context) -> tuple[Described, int]:
    """Return the weight B as stored, and the index of its axis K."""
    only_attributes(node, _ATTRIBUTES if context.opset >= 7 else (*_ATTRIBUTES, "broadcast"))
    weight = context.constants.describe(input_at(node, 1), "Gemm weight")
    if weight.ndim != 2:
        raise Refused("shape", f"a Gemm weight of shape {weight.shape}")
    return weight, 1 if get_flag(node, "transB") else 0


def _constant(node: ir.Node, search: Search, columns: int) -> np.ndarray:
    """Return beta * C in float64; zero if C is absent."""
    if not search.plan.has(node, 2):
        return np.zeros(columns)
    constant = search.plan.value(node, 2, "Gemm constant")
    if constant.ndim > 2 or (constant.ndim and constant.shape[-1] not in (1, columns)):
        raise Refused("shape", f"a Gemm constant of shape {constant.shape} for {columns} columns")
    planned = search.plan.attributes.get((node, "beta"))
    beta = get_float(node, "beta", 1.0) if planned is None else planned.as_float()
    return constant * beta


def _set_constant(node: ir.Node, values: np.ndarray, size: np.ndarray, dtype: np.dtype, search: Search) -> None:
    search.plan.replace(node, 2, values, dtype, "Gemm constant", np.broadcast_to(size, values.shape))
    if get_float(node, "beta", 1.0) != 1.0:
        search.plan.set_attribute(node, ir.AttrFloat32("beta", 1.0))
    if search.context.opset < 7:
        search.plan.set_attribute(node, ir.AttrInt64("broadcast", 1))


RULE = Rule(
    "gemm",
    ("Gemm",),
    backward,
    forward,
    into="linear layers",
    forms="Gemm, all transposes, alpha, beta",
    behind="B' = B k, beta' = 1, C' = k (beta C - c) + t, any legal shape of C",
    front="B' = k B, C' = beta C + alpha h B",
)
