"""Insertion of changed parameters into a model: each computed once, shared ones copied where results differ, unused ones removed."""

from __future__ import annotations

import onnx_ir as ir

from bnexport.folding.affine import round_vector
from bnexport.folding.context import Context
from bnexport.folding.editing.edits import Addend, Edit, Exact, Raw, Scaled, Slot
from bnexport.folding.editing.scaled_tensor import ScaledTensor
from bnexport.graph.nodes import input_at, label
from bnexport.graph.scopes import new_constant


def write_parameters(context: Context, *, keep: bool = False) -> None:
    """Write every edited parameter into the model. keep: their exact values, for later folds."""
    groups: dict[object, list[Slot]] = {}
    for (node, index), edit in context.edits.items():
        if not context.surgery.is_dead(node) and not _is_written(node, index, edit):
            groups.setdefault(_result(context, node, index, edit), []).append((node, index))
    readers: dict[ir.Value, int] = {}
    for slots in groups.values():
        _put(context, slots, _edited(context, *slots[0], context.edits[slots[0]]), readers)
    if not keep:
        context.edits.clear()


def _result(context: Context, node: ir.Node, index: int, edit: Edit) -> object:
    """Return what tells the results of edits apart: equal ones of one parameter, as of a head for several levels, are one.

    A new bias counts as a result of the weight.
    """
    source = input_at(node, index) or input_at(node, 1)
    # A function has Constant nodes, which stand in front of one reader.
    if context.in_function or source is None or len(source.uses()) < 2:
        return node, index
    array = edit.factor if isinstance(edit, Scaled) else edit.rounded if isinstance(edit, Exact) else edit.values
    view = edit.view if isinstance(edit, Scaled) else None
    return source, node.graph, index, view, array.shape, array.dtype, array.tobytes()


def _is_written(node: ir.Node, index: int, edit: Edit) -> bool:
    """Whether the input is what the edit says, as the addend of a new Add is until it is changed."""
    value = input_at(node, index)
    if not isinstance(edit, Exact) or value is None:
        return False
    maker = value.producer()
    held = None if maker is None else maker.attributes.get("value")
    tensor = value.const_value if maker is None else None if held is None else held.value
    return isinstance(tensor, ir.Tensor) and tensor.raw is edit.rounded


def _edited(context: Context, node: ir.Node, index: int, edit: Edit) -> ir.TensorProtocol:
    if isinstance(edit, Exact):
        return ir.Tensor(edit.rounded)
    if isinstance(edit, Raw):
        return ir.Tensor(edit.values)
    if edit.result is not None:
        return ir.Tensor(edit.result)
    base = context.constants.tensor(input_at(node, index), "parameter")
    checked = context.options.check_early
    return ScaledTensor(base, edit.factor, edit.view, checked=checked, outputs=edit.outputs)


def _put(context: Context, slots: list[Slot], tensor: ir.TensorProtocol, readers: dict[ir.Value, int]) -> None:
    """Make `tensor` the input of all slots, which read one value now. readers: remaining readers of a value, if known.

    The initializer that only these inputs use keeps its name; anything shared with others is left alone.
    """
    node, index = slots[0]
    old, graph = input_at(node, index), node.graph
    assert graph is not None
    if old is not None and old not in readers:
        readers[old] = len(old.uses())
    if (
        old is not None
        and old.is_initializer()
        and not old.is_graph_output()
        and readers[old] == len(slots)
        and old.graph is graph
        and old.const_value is not None
        and old.const_value.dtype == tensor.dtype
    ):
        tensor.name = old.name
        old.const_value = tensor
        if old.shape != tensor.shape:
            old.shape = ir.Shape(tensor.shape.numpy())
        return
    wish = f"{label(node)}.bias" if old is None else f"{old.name}.folded"
    value = new_constant(context, graph, node, tensor, wish)
    for node, index in slots:
        if index >= len(node.inputs):
            node.resize_inputs(index + 1)
        node.replace_input_with(index, value)
    if old is not None:
        readers[old] -= len(slots)
        context.surgery.may_be_unused(old)


def insert_add(context: Context, value: ir.Value, addend: Addend) -> ir.Node:
    """Insert an Add so that readers of `value` read value + addend; a graph output keeps its name."""
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
    context.created.append(node)
    node.resize_inputs(2)
    node.replace_input_with(1, new_constant(context, graph, node, array, f"{name}.addend"))
    # A later fold that changes it starts from the exact values: each number is rounded once.
    context.edits[node, 1] = Exact(addend.vector.reshape(shape), array)
    total = node.outputs[0]
    context.same_shape(total, value)
    total.name, total.type, total.shape = context.names.fresh(f"{value.name}.shifted"), value.type, value.shape
    for use in uses:
        use.node.replace_input_with(use.idx, total)
    if value.is_graph_output():
        context.surgery.replace_output(value, total)
        value.name, total.name = total.name, value.name
    return node
