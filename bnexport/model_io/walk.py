"""Iteration over graphs, nodes and tensors of a model: main graph, functions and their subgraphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeGuard

import onnx_ir as ir

# Types of attributes that hold graphs, and those that tensors are in.
GRAPH_TYPES = frozenset((ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS))
_HOLDERS = GRAPH_TYPES | {ir.AttributeType.TENSOR, ir.AttributeType.TENSORS}


def graphs(model: ir.Model) -> Iterator[ir.Graph]:
    """Yield every graph, outer before inner. A function is represented by its own graph."""
    yield from _with_bodies(model.graph)
    for function in model.functions.values():
        yield from _with_bodies(function.graph)


def _with_bodies(graph: ir.Graph) -> Iterator[ir.Graph]:
    yield graph
    for node in graph:
        for body in node_bodies(node):
            yield from _with_bodies(body)


def bodies(attribute: ir.Attr) -> Iterable[ir.Graph]:
    """Return the graphs that an attribute holds; none for a reference."""
    if attribute.is_ref():
        return ()
    if attribute.type is ir.AttributeType.GRAPH:
        return (attribute.as_graph(),)
    return attribute.as_graphs() if attribute.type is ir.AttributeType.GRAPHS else ()


def node_bodies(node: ir.Node) -> list[ir.Graph]:
    """Return the graphs that the attributes of a node hold."""
    held = [attribute for attribute in _plain(node.attributes).values() if attribute.type in GRAPH_TYPES]
    return [body for attribute in held for body in bodies(attribute)]


def inner_nodes(node: ir.Node) -> Iterator[ir.Node]:
    """Yield the nodes of a node's bodies, at any depth."""
    for body in node_bodies(node):
        yield from body.all_nodes()


def _attributes(node: ir.Node) -> tuple[ir.Attr, ...]:
    """Return a node's attributes, which may be replaced during iteration."""
    return tuple(_plain(node.attributes).values())


def _plain(mapping: Any) -> Any:
    """Return the dictionary inside a UserDict: its own views would dominate the cost of a walk."""
    return getattr(mapping, "data", mapping)


def nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Yield every node of every graph."""
    for graph in graphs(model):
        yield from graph


class TensorSlot(NamedTuple):
    """A place that holds a tensor: the initializer `value`, or an attribute of `node`, with its place for one of a list."""

    value: ir.Value | None
    node: ir.Node | None = None
    name: str = ""
    place: int | None = None

    def get(self) -> ir.TensorProtocol:
        tensor: Any = self.value.const_value if self.value is not None else self._attribute.value
        return tensor if self.place is None else tensor[self.place]

    def set(self, tensor: ir.TensorProtocol) -> None:
        if self.value is not None:
            self.value.const_value = tensor
            return
        old = self._attribute
        if self.place is None:
            new = ir.AttrTensor(old.name, tensor, doc_string=old.doc_string)
        else:
            tensors = list(old.value)
            tensors[self.place] = tensor
            new = ir.AttrTensors(old.name, tensors, doc_string=old.doc_string)
        self.node.attributes[self.name] = new  # type: ignore[union-attr]

    @property
    def _attribute(self) -> ir.Attr:
        return self.node.attributes[self.name]  # type: ignore[union-attr]


def tensors(model: ir.Model, wanted: Callable[[ir.TensorProtocol], bool] | None = None) -> Iterator[TensorSlot]:
    """Yield a slot for every tensor; for those `wanted` alone, most initializers need no slot."""
    yield from _tensors(model.graph, wanted)
    for function in model.functions.values():
        yield from _tensors(function.graph, wanted)


def _tensors(graph: ir.Graph, wanted: Callable[[ir.TensorProtocol], bool] | None) -> Iterator[TensorSlot]:
    for value in _plain(graph.initializers).values():
        tensor = value.const_value
        if tensor is not None and (wanted is None or wanted(tensor)):
            yield TensorSlot(value)
    for node in graph:
        for attribute in _attributes(node):
            kind = attribute.type
            if kind not in _HOLDERS or attribute.is_ref():
                continue
            if kind is ir.AttributeType.TENSOR:
                if wanted is None or wanted(attribute.value):
                    yield TensorSlot(None, node, attribute.name)
            elif kind is ir.AttributeType.TENSORS:
                for index, tensor in enumerate(attribute.value):
                    if wanted is None or wanted(tensor):
                        yield TensorSlot(None, node, attribute.name, index)
            else:
                for body in bodies(attribute):
                    yield from _tensors(body, wanted)


def external(model: ir.Model) -> Iterator[tuple[TensorSlot, ir.ExternalTensor]]:
    """Yield a slot for every tensor stored in a file, and that tensor."""
    for slot in tensors(model, lies_in_file):
        yield slot, slot.get()  # type: ignore[misc] # `lies_in_file` has looked


def lies_in_file(tensor: ir.TensorProtocol) -> TypeGuard[ir.ExternalTensor]:
    """Test whether the tensor lies in a file: isinstance, slow for protocols, cached for each class."""
    return _is_external(type(tensor))


@functools.cache
def _is_external(kind: type) -> bool:
    return issubclass(kind, ir.ExternalTensor)
