"""Constants in and out of a model: computed once, shared ones left alone, unused ones removed."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import round_scaled, round_vector
from bnexport.folding.context import Context
from bnexport.folding.edits import Addend, Exact, Raw, Scaled
from bnexport.folding.nodes import input_at, label
from bnexport.model_io import ContainedTensor


def write_parameters(context: Context) -> None:
    """Computes every edited parameter once and puts it into the model."""
    for (node, index), edit in context.edits.items():
        if node.graph is None:
            continue
        old = input_at(node, index)
        if isinstance(edit, Exact):
            array = round_vector(edit.values, edit.dtype, "parameter", edit.magnitude)
        elif isinstance(edit, Raw):
            array = edit.values
        elif old is not None and old.is_initializer() and isinstance(old.const_value, ContainedTensor):
            put_constant(context, node, index, _scaled_when_read(old.const_value, edit), label(node))
            continue
        else:
            weight = context.constants.array(old, "parameter")
            array = round_scaled(weight.reshape(edit.view), edit.factor).reshape(weight.shape)
        put_constant(context, node, index, ir.Tensor(array), label(node))


def _scaled_when_read(base: ContainedTensor, edit: Scaled) -> ir.LazyTensor:
    """A weight that stays in its file: scaled each time it is asked for, never held."""

    def compute() -> ir.Tensor:
        weight = base.numpy()
        return ir.Tensor(round_scaled(weight.reshape(edit.view), edit.factor).reshape(weight.shape))

    return ir.LazyTensor(compute, base.dtype, ir.Shape(base.shape.numpy()))


def put_constant(context: Context, node: ir.Node, index: int, tensor: ir.TensorProtocol, hint: str) -> None:
    """Makes `tensor` input `index` of `node`.

    The initializer that only this input uses keeps its name; anything shared is left alone.
    """
    old = input_at(node, index)
    graph = node.graph
    assert graph is not None
    if (
        old is not None
        and old.is_initializer()
        and not old.is_graph_output()
        and len(old.uses()) == 1
        and old.graph is graph
        and old.const_value is not None
        and old.const_value.dtype == tensor.dtype
    ):
        tensor.name = old.name
        old.const_value = tensor
        old.shape = ir.Shape(tensor.shape.numpy())
        return
    wish = f"{old.name if old is not None else hint}.folded" if old is not None else f"{hint}.bias"
    value = new_constant(context, graph, node, tensor, wish)
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)
    if old is not None:
        remove_unused_constant(old)


def new_constant(
    context: Context, graph: ir.Graph, before: ir.Node, data: np.ndarray | ir.TensorProtocol, wish: str
) -> ir.Value:
    """A constant visible at `before`: an initializer, or a Constant node inside a function."""
    name = context.names.fresh(wish)
    tensor = ir.Tensor(data) if isinstance(data, np.ndarray) else data
    tensor.name = name
    shape = ir.Shape(tensor.shape.numpy())
    if context.in_function:
        node = ir.Node(
            "", "Constant", [], [ir.AttrTensor("value", tensor)], name=context.names.fresh(f"{wish}.constant")
        )
        node.outputs[0].name = name
        graph.insert_before(before, node)
        value = node.outputs[0]
        value.dtype, value.shape = tensor.dtype, shape
        return value
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
    graph.register_initializer(value)
    if context.model.ir_version < 4 and graph is context.model.graph:
        graph.inputs.append(value)
    return value


def insert_add(context: Context, value: ir.Value, addend: Addend) -> ir.Node:
    """Whatever read `value` reads value + addend; a graph output keeps its name."""
    producer = value.producer()
    assert producer is not None and producer.graph is not None
    graph = producer.graph
    uses = tuple(value.uses())
    # Leading dimensions of size 1 say nothing.
    shape = (-1, *[1] * (addend.rank - addend.axis - 1))
    array = round_vector(addend.vector, addend.dtype, "shift").reshape(shape)
    name = context.names.fresh(f"{value.name}.shift")
    node = ir.Node("", "Add", [value], name=name)
    graph.insert_after(producer, node)
    node.resize_inputs(2)
    node.replace_input_with(1, new_constant(context, graph, node, array, f"{name}.addend"))
    total = node.outputs[0]
    context.same_shape(total, value)
    total.name, total.type, total.shape = context.names.fresh(f"{value.name}.shifted"), value.type, value.shape
    for use in uses:
        use.node.replace_input_with(use.idx, total)
    if value.is_graph_output():
        for index, output in enumerate(graph.outputs):
            if output is value:
                graph.outputs[index] = total
        value.name, total.name = total.name, value.name
    return node


def remove_unused_constant(value: ir.Value, depth: int = 32) -> None:
    """Removes a constant that nothing reads any more, with the constant nodes that made it."""
    if value.uses() or value.is_graph_output() or depth == 0:
        return
    graph = value.graph
    if value.is_initializer() and graph is not None:
        del graph.initializers[str(value.name)]
        if value.is_graph_input():
            graph.inputs.remove(value)
        return
    node = value.producer()
    if node is None or node.graph is None or any(output.uses() for output in node.outputs):
        return
    operands = [operand for operand in node.inputs if operand is not None]
    node.graph.remove(node, safe=True)
    for operand in operands:
        remove_unused_constant(operand, depth - 1)
