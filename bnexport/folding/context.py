"""Everything a rule may look at, and the book of parameters that will change.

A rule never edits a parameter. It asks a `Plan` for "input 1 of this node times this factor" or "input
2 becomes this vector"; the plan checks that the type can hold the result. Only when all edits that one
batch norm needs have been accepted is the plan committed, and only at the end is each parameter
computed, from its original and the product of all factors, with one rounding.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport.folding.affine import FLOAT_TYPES, check_scaled, round_scaled, round_vector
from bnexport.folding.constants import Constants
from bnexport.folding.names import Names
from bnexport.folding.nodes import input_at, label
from bnexport.folding.refusal import Refused
from bnexport.folding.shapes import Shape, Shapes

Slot = tuple[ir.Node, int]


@dataclasses.dataclass(frozen=True)
class Options:
    """What a caller may ask of the engine.

    max_scale: largest |gamma| / sqrt(var + eps) that is folded. only, skip: names of nodes.
    training_to_inference: also turn BatchNormalization with training_mode=1 into inference.
    rules: names of the rules that may be used; None for all.
    """

    max_scale: float = 1e6
    only: frozenset[str] | None = None
    skip: frozenset[str] = frozenset()
    training_to_inference: bool = False
    rules: frozenset[str] | None = None


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A parameter, reshaped to `view`, times a factor that broadcasts to it."""

    factor: np.ndarray
    view: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Exact:
    """A parameter with a new value, known in float64 (any shape), and the type it is kept in."""

    values: np.ndarray
    dtype: np.dtype
    magnitude: np.ndarray | None = None


Edit = Scaled | Exact


@dataclasses.dataclass(frozen=True)
class Addend:
    """A vector to be added along `axis` of a value of `rank` dimensions."""

    vector: np.ndarray
    axis: int
    rank: int
    dtype: np.dtype


class Context:
    """One graph family (the main graph and its bodies, or a function and its bodies) under one opset."""

    def __init__(
        self, model: ir.Model, opset: int, names: Names, shapes: Shapes, options: Options, *, in_function: bool
    ) -> None:
        self.model = model
        self._shapes = shapes
        self.opset = opset
        self.names = names
        self.options = options
        self.in_function = in_function
        self.constants = Constants(model.ir_version)
        self.edits: dict[Slot, Edit] = {}
        self.dead: list[ir.Node] = []

    def shape(self, value: ir.Value) -> Shape | None:
        """Sizes, names of sizes, or None for an unknown size; None altogether where not even the rank is known."""
        return self._shapes.of(value)

    def rank(self, value: ir.Value) -> int | None:
        shape = self.shape(value)
        return None if shape is None else len(shape)

    def size(self, value: ir.Value, axis: int) -> int | None:
        """One dimension where it is a known number."""
        shape = self.shape(value)
        if shape is None or not 0 <= axis < len(shape):
            return None
        size = shape[axis]
        return size if isinstance(size, int) else None

    def current(self, node: ir.Node, index: int, what: str, edits: dict[Slot, Edit] | None = None) -> np.ndarray:
        """A parameter as float64 with all edits so far, not rounded."""
        edit = (edits or {}).get((node, index)) or self.edits.get((node, index))
        if isinstance(edit, Exact):
            return edit.values
        values = self.constants.floats(input_at(node, index), what)
        return values if edit is None else (values.reshape(edit.view) * edit.factor).reshape(values.shape)


class Plan:
    """The edits of one site, checked as they are added and committed together or not at all."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.edits: dict[Slot, Edit] = {}
        self.attributes: dict[tuple[ir.Node, str], ir.Attr] = {}
        self.targets: list[ir.Node] = []
        # Shifts that find no bias: an Add behind the node's first output.
        self.adds: dict[ir.Node, Addend] = {}

    def scale(
        self, node: ir.Node, index: int, factor: np.ndarray, what: str, view: tuple[int, ...] | None = None
    ) -> None:
        """Multiplies parameter `index` of `node` by `factor`, which broadcasts to it.

        view: a shape in which the parameter is looked at, as (groups, rows, ...); every factor of one
        parameter must use the same one.
        """
        edit = self.edits.get((node, index)) or self.context.edits.get((node, index))
        if isinstance(edit, Exact):
            values = edit.values if view is None else edit.values.reshape(view)
            self.replace(node, index, (values * factor).reshape(edit.values.shape), edit.dtype, what)
            return
        weight = self.context.constants.array(input_at(node, index), what)
        if weight.dtype not in FLOAT_TYPES.values():
            raise Refused("type", f"the {what} has type {weight.dtype}, expected a float type")
        view = view or weight.shape
        if edit is None:
            check_scaled(weight.reshape(view), factor, weight.dtype)
        elif edit.view != view:
            raise Refused("conflict", f"the {what} is scaled in two ways that do not go together")
        else:
            check_scaled(weight.reshape(view) * edit.factor, factor, weight.dtype)
            factor = edit.factor * factor
        self.edits[node, index] = Scaled(factor, view)
        self.target(node)

    def replace(
        self,
        node: ir.Node,
        index: int,
        values: np.ndarray,
        dtype: np.dtype,
        what: str,
        magnitude: np.ndarray | None = None,
    ) -> None:
        """Gives parameter `index` of `node` a new value, or its first one."""
        round_vector(values, dtype, what, magnitude)
        self.edits[node, index] = Exact(values, dtype, magnitude)
        self.target(node)

    def value(self, node: ir.Node, index: int, what: str) -> np.ndarray:
        """The parameter as float64, with the edits of this plan."""
        return self.context.current(node, index, what, self.edits)

    def set_attribute(self, node: ir.Node, attribute: ir.Attr) -> None:
        self.attributes[node, attribute.name] = attribute

    def target(self, node: ir.Node) -> None:
        if node not in self.targets:
            self.targets.append(node)

    def check_add(self, addend: Addend) -> None:
        """Refuses a shift that its type cannot hold."""
        round_vector(addend.vector, addend.dtype, "shift")

    def add_behind(self, node: ir.Node, addend: Addend) -> None:
        """Adds a vector to the node's first output, by an Add of its own."""
        self.check_add(addend)
        if node in self.adds:
            raise Refused("conflict", "two shifts meet behind one node")
        self.adds[node] = addend
        self.target(node)

    def snapshot(self) -> tuple[dict[Any, Any], ...]:
        return dict(self.edits), dict(self.attributes), dict.fromkeys(self.targets), dict(self.adds)

    def restore(self, state: tuple[dict[Any, Any], ...]) -> None:
        self.edits, self.attributes, self.adds = dict(state[0]), dict(state[1]), dict(state[3])
        self.targets = list(state[2])

    def commit(self) -> None:
        self.context.edits.update(self.edits)
        for (node, name), attribute in self.attributes.items():
            node.attributes[name] = attribute
        for node, addend in self.adds.items():
            insert_add(self.context, node.outputs[0], addend)


def dtype_of(array: np.ndarray) -> np.dtype:
    """The parameter type of an array, or Refused."""
    if array.dtype not in FLOAT_TYPES.values():
        raise Refused("type", f"a parameter has type {array.dtype}, expected a float type")
    return array.dtype


def write_parameters(context: Context) -> None:
    """Computes every edited parameter once and puts it into the model."""
    for (node, index), edit in context.edits.items():
        if node.graph is None:
            continue
        old = input_at(node, index)
        if isinstance(edit, Exact):
            array = round_vector(edit.values, edit.dtype, "parameter", edit.magnitude)
        else:
            weight = context.constants.array(old, "parameter")
            array = round_scaled(weight.reshape(edit.view), edit.factor).reshape(weight.shape)
        put_constant(context, node, index, array, label(node))


def put_constant(context: Context, node: ir.Node, index: int, array: np.ndarray, hint: str) -> None:
    """Makes `array` input `index` of `node`.

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
        and old.const_value.dtype == ir.DataType.from_numpy(array.dtype)
    ):
        old.const_value = ir.Tensor(array, name=old.name)
        old.shape = ir.Shape(array.shape)
        return
    wish = f"{old.name if old is not None else hint}.folded" if old is not None else f"{hint}.bias"
    value = new_constant(context, graph, node, array, wish)
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)
    if old is not None:
        remove_unused_constant(old)


def new_constant(context: Context, graph: ir.Graph, before: ir.Node, array: np.ndarray, wish: str) -> ir.Value:
    """A constant visible at `before`: an initializer, or a Constant node inside a function."""
    name = context.names.fresh(wish)
    tensor = ir.Tensor(array, name=name)
    if context.in_function:
        node = ir.Node(
            "", "Constant", [], [ir.AttrTensor("value", tensor)], name=context.names.fresh(f"{wish}.constant")
        )
        node.outputs[0].name = name
        graph.insert_before(before, node)
        value = node.outputs[0]
        value.dtype, value.shape = tensor.dtype, ir.Shape(array.shape)
        return value
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
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
