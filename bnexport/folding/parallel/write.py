"""Write merged branches into the graph: one operator in the place of each, and what is left of the sum behind it.

The new operator takes the name and the parameters' names of the largest that it replaces. A weight is rounded once, and
refused where its type cannot hold what the branches' weights held (`affine.check_range`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import round_vector
from bnexport.folding.context import Context
from bnexport.folding.editing.edits import Exact
from bnexport.folding.editing.plan import Plan
from bnexport.folding.editing.rewrite import take_over
from bnexport.folding.parallel.evaluate import Frame
from bnexport.folding.parallel.kernels import Kernel
from bnexport.folding.parallel.sums import Term
from bnexport.graph.nodes import get_int, input_at, label, used
from bnexport.graph.refusal import Refused
from bnexport.graph.scopes import new_constant


@dataclasses.dataclass(frozen=True)
class Operator:
    """The operator to write for `terms`. carrier: the source node that it replaces.

    weight, bias: in float64 and rounded; bias is None where the operator has none.
    """

    terms: tuple[Term, ...]
    carrier: ir.Node
    kernel: Kernel
    weight: Exact
    bias: Exact | None


def plan_operator(
    terms: tuple[Term, ...], carriers: Sequence[ir.Node], kernel: Kernel, frame: Frame, context: Context
) -> Operator:
    """Raises Refused where the type of the weights cannot hold their sum."""
    described = {node: context.constants.describe(input_at(node, 1), "weight") for node in carriers}
    types = {each.dtype for each in described.values()}
    if len(types) > 1:
        raise Refused("type", f"the weights of its branches have types {', '.join(sorted(map(str, types)))}")
    # A bias goes into the operator itself, if one of the branches has it.
    carrier = max(carriers, key=lambda node: (node.op_type != "MatMul", int(np.prod(described[node].shape))))
    (dtype,) = types
    kernel.check_type(dtype)
    values = kernel.weight.reshape(kernel.outputs, *kernel.weight.shape[2:])
    if not frame.positions and carrier.op_type != "Conv" and not get_int(carrier, "transB", 0):
        values = np.ascontiguousarray(values.T)
    weight = Exact(values, values.astype(dtype))
    bias = None
    if kernel.bias.any() or input_at(carrier, 2) is not None:
        rounded = round_vector(kernel.bias, dtype, f"{carrier.op_type} bias", kernel.bias_size)
        bias = Exact(kernel.bias, rounded)
    return Operator(terms, carrier, kernel, weight, bias)


def write(
    value: ir.Value,
    operators: Sequence[Operator],
    bases: Sequence[ir.Value],
    others: Sequence[tuple[float, ir.Value]],
    gone: Sequence[ir.Node],
    context: Context,
) -> list[ir.Node]:
    """Puts the operators, and the others of the sum, in the place of `value`; the last of the new nodes makes it.

    bases: what the operators read. others: signed values that are added behind. gone: nodes that are removed.
    """
    place = value.producer()
    assert place is not None and place.graph is not None
    written: list[ir.Node] = []
    others = list(others)
    parts: list[ir.Value] = []
    for operator, base in zip(operators, bases, strict=True):
        node = _insert(operator, base, place, context)
        written.append(node)
        parts.append(node.outputs[0])
        if operator.bias is not None and node.op_type == "MatMul":
            wish = f"{label(node)}.bias"
            others.append((1.0, new_constant(context, place.graph, place, operator.bias.rounded, wish)))
    total = parts[0]
    for sign, other in (*((1.0, part) for part in parts[1:]), *others):
        op_type = "Add" if sign > 0 else "Sub"
        node = ir.Node("", op_type, [total, other], name=context.names.fresh(f"{label(place)}.{op_type}"))
        place.graph.insert_before(place, node)
        written.append(node)
        total = node.outputs[0]
        total.name, total.type = context.names.fresh(f"{value.name}.sum"), value.type
    if not value.is_graph_output():
        # As that of a graph output, the name stays with what it means.
        value.name, total.name = total.name, value.name
        take_over(value, total, context)
    else:
        take_over(value, total, context)
    _remove(gone, context)
    context.created += written
    return written


def _insert(operator: Operator, base: ir.Value, place: ir.Node, context: Context) -> ir.Node:
    """Insert the operator in front of `place`; its parameters are those of the carrier, with edits."""
    carrier, like = operator.carrier, operator.terms[0].value
    assert place.graph is not None
    inputs = [base, *carrier.inputs[1:]]
    node = ir.Node("", carrier.op_type, inputs, _attributes(operator), name=carrier.name or None)
    if not node.name:
        node.name = context.names.fresh(f"{label(place)}.{carrier.op_type}")
    node.metadata_props.update(carrier.metadata_props)
    place.graph.insert_before(place, node)
    result = node.outputs[0]
    result.name = context.names.fresh(f"{label(node)}.merged")
    result.type, result.shape = like.type, like.shape
    context.same_shape(result, like)
    plan = Plan(context)
    plan.edits[node, 1] = operator.weight
    if operator.bias is not None and node.op_type != "MatMul":
        plan.edits[node, 2] = operator.bias
    plan.commit()
    return node


def _attributes(operator: Operator) -> list[ir.Attr]:
    carrier, window = operator.carrier, operator.kernel.window
    if carrier.op_type == "MatMul":
        return []
    if carrier.op_type == "Gemm":
        return [ir.AttrInt64("transB", get_int(carrier, "transB", 0))]
    return [
        ir.AttrInt64("group", operator.kernel.groups),
        ir.AttrInt64s("kernel_shape", window.sizes),
        ir.AttrInt64s("pads", (*window.begins, *window.ends)),
        ir.AttrInt64s("strides", window.strides),
        ir.AttrInt64s("dilations", window.dilations),
    ]


def _remove(nodes: Sequence[ir.Node], context: Context) -> None:
    # A Pad that others read stays: what merged branches read of it, they have no more.
    pads = [node for node in nodes if node.op_type == "Pad"]
    others = [node for node in nodes if node.op_type != "Pad"]
    _take_out(others, context)
    _take_out([node for node in pads if not used(node.outputs[0])], context)


def _take_out(nodes: Sequence[ir.Node], context: Context) -> None:
    gone = set(nodes)
    for node in nodes:
        for value in node.inputs:
            if value is not None and value.producer() not in gone:
                context.surgery.may_be_unused(value)
        context.surgery.remove(node)
