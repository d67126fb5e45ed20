"""Removal and replacement of nodes and values, in time linear in their number.

A graph's own methods look through all its outputs for each node that is removed, and through all its
inputs for each input. Here a removed node loses its inputs at once, so that nothing sees it as a reader,
and leaves its graph with all others in `sweep`; constants are looked at once, when all readers are known.
"""

from __future__ import annotations

import onnx_ir as ir


class Surgery:
    """Pending changes of a graph and its subgraphs, completed by `sweep`."""

    def __init__(self) -> None:
        self._dead: dict[ir.Node, None] = {}
        self._orphans: dict[ir.Value, None] = {}
        self._places: dict[ir.Graph, dict[ir.Value, list[int]]] = {}

    def is_dead(self, node: ir.Node) -> bool:
        return node in self._dead

    def remove(self, node: ir.Node) -> None:
        """Remove a node whose outputs have been replaced."""
        node.resize_inputs(0)
        self._dead[node] = None

    def may_be_unused(self, value: ir.Value) -> None:
        """Mark a constant that lost a reader; `sweep` removes it, and the nodes that computed it, if no reader is left."""
        self._orphans[value] = None

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Redirect the readers of `old`, graph outputs included, to `new`; names stay as they are."""
        for use in old.uses():
            use.node.replace_input_with(use.idx, new)
        if old.is_graph_output():
            self.replace_output(old, new)

    def replace_output(self, old: ir.Value, new: ir.Value) -> None:
        """Replace the graph output `old` by `new`."""
        graph = old.graph
        assert graph is not None
        if graph not in self._places:
            self._places[graph] = {}
            for index, value in enumerate(graph.outputs):
                self._places[graph].setdefault(value, []).append(index)
        places = self._places[graph].pop(old)
        for index in places:
            graph.outputs[index] = new
        self._places[graph].setdefault(new, []).extend(places)

    def sweep(self) -> None:
        """Apply all pending changes."""
        inputs: dict[ir.Graph, set[ir.Value]] = {}
        while self._orphans:
            value, _ = self._orphans.popitem()
            self._remove_constant(value, inputs)
        for graph, gone in inputs.items():
            graph.inputs[:] = [value for value in graph.inputs if value not in gone]
        nodes: dict[ir.Graph, list[ir.Node]] = {}
        for node in self._dead:
            assert node.graph is not None
            nodes.setdefault(node.graph, []).append(node)
        for graph, dead in nodes.items():
            graph.remove(dead, safe=True)
        self._dead.clear()

    def _remove_constant(self, value: ir.Value, inputs: dict[ir.Graph, set[ir.Value]]) -> None:
        graph = value.graph
        if value.uses() or value.is_graph_output() or graph is None:
            return
        if value.is_initializer():
            del graph.initializers[str(value.name)]
            if value.is_graph_input():
                inputs.setdefault(graph, set()).add(value)
            return
        node = value.producer()
        if node is None or node in self._dead or any(output.uses() for output in node.outputs):
            return
        if any(output.is_graph_output() for output in node.outputs):
            return
        self._orphans.update((operand, None) for operand in node.inputs if operand is not None)
        self.remove(node)
