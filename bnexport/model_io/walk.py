"""All graphs, nodes and tensors of a model: main graph, bodies, functions and their bodies."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir


def graphs(model: ir.Model) -> Iterator[ir.Graph]:
    """Every graph, outer before inner. A function is represented by its own graph."""
    yield model.graph
    yield from model.graph.subgraphs()
    for function in model.functions.values():
        yield function.graph
        yield from function.subgraphs()


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
    for graph in graphs(model):
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield TensorSlot(value)
        for node in graph:
            for name, attribute in tuple(node.attributes.items()):
                if attribute.is_ref():
                    continue
                if attribute.type is ir.AttributeType.TENSOR:
                    yield TensorSlot(node, name)
                elif attribute.type is ir.AttributeType.TENSORS:
                    for index in range(len(attribute.value)):
                        yield TensorSlot(node, name, index)
