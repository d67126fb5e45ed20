"""Scopes of a model: each graph that imports its own opset, with its subgraphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import onnx_ir as ir

from bnexport.graph.constants import Constants
from bnexport.graph.nodes import Names, Refused, is_portable_body, label
from bnexport.graph.shapes import Shape, Shapes
from bnexport.graph.surgery import Surgery


class GraphContext:
    """Lookups for the nodes of one scope, under one opset."""

    def __init__(
        self, model: ir.Model, opset: int, names: Names, shapes: Shapes, surgery: Surgery, in_function: bool
    ) -> None:
        self.model = model
        self._shapes = shapes
        self.opset = opset
        self.names = names
        self.in_function = in_function
        self.constants = Constants(model, shapes)
        self.surgery = surgery

    def shape(self, value: ir.Value) -> Shape | None:
        """Return sizes, names of sizes, or None for an unknown size; None if the rank is unknown."""
        return self._shapes.of(value)

    def same_shape(self, new: ir.Value, old: ir.Value) -> None:
        self._shapes.same(new, old)

    def drop_stale_shapes(self) -> tuple[str, ...]:
        return self._shapes.drop_stale()

    def dtype(self, value: ir.Value) -> ir.DataType | None:
        return self._shapes.dtype(value)

    def rank(self, value: ir.Value) -> int | None:
        shape = self.shape(value)
        return None if shape is None else len(shape)

    def known_rank(self, value: ir.Value, node: ir.Node) -> int:
        """Return the rank of an operand or result of `node`. Raises Refused where it is not known."""
        rank = self.rank(value)
        if rank is None:
            raise Refused("rank", f"the rank of {label(node)} is not known")
        return rank

    def size(self, value: ir.Value, axis: int) -> int | None:
        """Return one dimension if it is a known number."""
        shape = self.shape(value)
        if shape is None or not 0 <= axis < len(shape):
            return None
        size = shape[axis]
        return size if isinstance(size, int) else None


C = TypeVar("C", bound=GraphContext)


@dataclasses.dataclass(frozen=True)
class Scope(Generic[C]):
    """A graph with its subgraphs, under one opset: the main graph, or a function."""

    name: str
    graphs: tuple[ir.Graph, ...]
    context: C


def scopes(model: ir.Model, surgery: Surgery, kind: Callable[..., C]) -> tuple[Scope[C], ...]:
    """Return the main graph, then the functions; portable bodies are left out. kind: makes a GraphContext."""
    names, shapes = Names(model), Shapes(model, surgery)

    def scope(name: str, graph: ir.Graph, in_function: bool) -> Scope[C]:
        # The standard domain has two names.
        opset = graph.opset_imports.get("", graph.opset_imports.get("ai.onnx", 0))
        context = kind(model, opset, names, shapes, surgery, in_function)
        return Scope(name, (graph, *graph.subgraphs()), context)

    functions = (function for function in model.functions.values() if not is_portable_body(function))
    return (
        scope("main graph", model.graph, False),
        *(scope(f"function {function.name}", function.graph, True) for function in functions),
    )


def new_constant(
    context: GraphContext, graph: ir.Graph, before: ir.Node, data: np.ndarray | ir.TensorProtocol, wish: str
) -> ir.Value:
    """Create a constant visible at `before`: an initializer, or a Constant node inside a function.

    Before IR version 4 an initializer is an input of its graph as well; the body of a node gets a Constant node.
    """
    name = context.names.fresh(wish)
    tensor = ir.Tensor(data) if isinstance(data, np.ndarray) else data
    tensor.name = name
    is_old = context.model.ir_version < 4
    if context.in_function or (is_old and graph is not context.model.graph):
        node = ir.Node(
            "", "Constant", [], [ir.AttrTensor("value", tensor)], name=context.names.fresh(f"{wish}.constant")
        )
        node.outputs[0].name = name
        graph.insert_before(before, node)
        value = node.outputs[0]
        value.dtype, value.shape = tensor.dtype, ir.Shape(tensor.shape.numpy())
        return value
    value = ir.val(name, const_value=tensor)
    graph.register_initializer(value)
    if is_old:
        graph.inputs.append(value)
    return value
