"""Replacement of a call by a copy of its function's body."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from bnexport.graph.names import Names
from bnexport.graph.nodes import label
from bnexport.model_io import walk


class Expansion:
    """Calls of one model's functions, each replaced by nodes with names of their own."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._names: Names | None = None

    def expand(self, call: ir.Node) -> list[ir.Node]:
        """Replace the call by a copy of the function's body; return the copied nodes."""
        function, graph = self._model.functions[call.op_identifier()], call.graph
        assert graph is not None
        copy = function.clone()
        results = _own_results(copy)
        copy.outputs.clear()
        nodes = list(copy.graph)
        copy.graph.remove(nodes)
        for place, formal in enumerate(copy.inputs):
            actual = call.inputs[place] if place < len(call.inputs) else None
            for use in formal.uses():
                use.node.replace_input_with(use.idx, actual)
        inside = [node for top in nodes for node in (top, *walk.inner_nodes(top))]
        for node in inside:
            _resolve_attributes(node, call, function)
        self._rename(label(call), inside)
        for domain, version in function.opset_imports.items():
            self._model.opset_imports.setdefault(domain, version)
        graph.insert_before(call, nodes)
        for output, value in zip(call.outputs, results, strict=False):
            value.type, value.shape = output.type or value.type, output.shape or value.shape
            output.replace_all_uses_with(value, replace_graph_outputs=True)
            if output.name:  # an output that the call leaves out has none
                value.name, output.name = output.name, None
        graph.remove(call, safe=True)
        return nodes

    def _rename(self, prefix: str, nodes: Iterable[ir.Node]) -> None:
        bodies: dict[ir.Graph, None] = {}
        for node in nodes:
            node.name = self._fresh(f"{prefix}.{node.name or node.op_type}")
            for value in node.outputs:
                if value.name:
                    value.name = self._fresh(f"{prefix}.{value.name}")
            bodies.update(dict.fromkeys(walk.node_bodies(node)))
        for graph in bodies:
            for value in (*graph.inputs, *tuple(graph.initializers.values())):
                value.name = self._fresh(f"{prefix}.{value.name}")

    def _fresh(self, wish: str) -> str:
        if self._names is None:
            self._names = Names(self._model)
        return self._names.fresh(wish)


def _own_results(function: ir.Function) -> list[ir.Value]:
    """Return the outputs, each a node's own: an input, or one value twice, goes through Identity."""
    results: list[ir.Value] = []
    for output in function.outputs:
        value = output
        if value.producer() is None or value in results:
            identity = ir.node("Identity", [value])
            function.graph.append(identity)
            value = identity.outputs[0]
            value.name = "returned"
        results.append(value)
    return results


def _resolve_attributes(node: ir.Node, call: ir.Node, function: ir.Function) -> None:
    """Replace references to the call's attributes by the given value or the function's default; drop the others."""
    for name, attribute in tuple(node.attributes.items()):
        if not attribute.is_ref():
            continue
        source = str(attribute.ref_attr_name)
        given = call.attributes.get(source) or function.attributes.get(source)
        if given is None or given.value is None:
            del node.attributes[name]
        else:
            node.attributes[name] = ir.Attr(name, given.type, given.value)
