"""All graphs, nodes and tensors of a model: main graph, bodies, functions and their bodies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir


def graphs(model: ir.Model) -> Iterator[ir.Graph]:
    """Every graph, outer before inner. A function is represented by its own graph."""
    yield from _with_bodies(model.graph)
    for function in model.functions.values():
        yield from _with_bodies(function.graph)


def _with_bodies(graph: ir.Graph) -> Iterator[ir.Graph]:
    yield graph
    for node in graph:
        for attribute in _attributes(node):
            for body in _bodies(attribute):
                yield from _with_bodies(body)


def _bodies(attribute: ir.Attr) -> Iterable[ir.Graph]:
    if attribute.is_ref():
        return ()
    if attribute.type is ir.AttributeType.GRAPH:
        return (attribute.as_graph(),)
    return attribute.as_graphs() if attribute.type is ir.AttributeType.GRAPHS else ()


def _attributes(node: ir.Node) -> tuple[ir.Attr, ...]:
    """A node's attributes, which may be replaced meanwhile. A UserDict's views cost more than all the rest."""
    held = node.attributes
    return tuple(getattr(held, "data", held).values())


def nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Every node of every graph."""
    for graph in graphs(model):
        yield from graph


class TensorSlot:
    """A place that holds a tensor: an initializer, or an attribute (of one tensor or of a list)."""

    def __init__(self, holder: ir.Value | ir.Node, attribute: str = "", index: int | None = None) -> None:
        self._holder = holder
        self._attribute = attribute
        self._index = index

    @property
    def is_attribute(self) -> bool:
        return isinstance(self._holder, ir.Node)

    @property
    def value(self) -> ir.Value | None:
        """The initializer that this place belongs to, None for an attribute."""
        return None if isinstance(self._holder, ir.Node) else self._holder

    def get(self) -> ir.TensorProtocol:
        if isinstance(self._holder, ir.Value):
            tensor = self._holder.const_value
        else:
            value = self._holder.attributes[self._attribute].value
            tensor = value if self._index is None else value[self._index]
        assert tensor is not None
        return tensor

    def set(self, tensor: ir.TensorProtocol) -> None:
        if isinstance(self._holder, ir.Value):
            self._holder.const_value = tensor
            return
        old = self._holder.attributes[self._attribute]
        if self._index is None:
            new = ir.AttrTensor(old.name, tensor, doc_string=old.doc_string)
        else:
            tensors = list(old.value)
            tensors[self._index] = tensor
            new = ir.AttrTensors(old.name, tensors, doc_string=old.doc_string)
        self._holder.attributes[self._attribute] = new


def tensors(model: ir.Model) -> Iterator[TensorSlot]:
    """Every place that holds a tensor."""
    yield from _tensors(model.graph)
    for function in model.functions.values():
        yield from _tensors(function.graph)


def _tensors(graph: ir.Graph) -> Iterator[TensorSlot]:
    for value in graph.initializers.values():
        if value.const_value is not None:
            yield TensorSlot(value)
    for node in graph:
        for attribute in _attributes(node):
            kind = attribute.type
            if kind is ir.AttributeType.TENSOR:
                if not attribute.is_ref():
                    yield TensorSlot(node, attribute.name)
            elif kind is ir.AttributeType.TENSORS:
                if not attribute.is_ref():
                    for index in range(len(attribute.value)):
                        yield TensorSlot(node, attribute.name, index)
            elif kind is ir.AttributeType.GRAPH or kind is ir.AttributeType.GRAPHS:
                for body in _bodies(attribute):
                    yield from _tensors(body)
