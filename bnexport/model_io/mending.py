"""Mending of files that break a rule on which ONNX Runtime does not insist, each with a note.

nodes in no topological order     sorted; a node depends on the nodes that make its inputs and on what its bodies
                                  read from outside. Stable: of the nodes whose dependencies are met, the first in
                                  the file comes first
initializers of one name          the last one is kept, which ONNX Runtime takes
initializers without a name       left out: nothing can read them
training_info                     left out: it adds no output to the graph
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import Any

import onnx

from bnexport.errors import MalformedModelError, UnsafeModelError
from bnexport.model_io.limits import Limits, way_out
from bnexport.model_io.validate import bodies, printable

# Nodes of a cycle that a message names.
_SHOWN = 8


def mend(proto: onnx.ModelProto, limits: Limits) -> tuple[str, ...]:
    """Mend the model in place; return a note for each change.

    Raises MalformedModelError for a cycle of nodes, UnsafeModelError for graphs nested too deep.
    """
    mender = _Mender(limits)
    if proto.training_info:
        proto.ClearField("training_info")
        mender.notes.append("the model carried training_info, which was left out")
    mender.graph(proto.graph, 1)
    for function in proto.functions:
        mender.nodes(function.node, set(function.input), f"function {function.domain}:{function.name}", 1)
    return tuple(mender.notes)


class _Mender:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.notes: list[str] = []

    def graph(self, graph: onnx.GraphProto, depth: int) -> set[str]:
        """Mend a graph and return the names that it reads from outside."""
        if depth > self._limits.graph_depth:
            raise UnsafeModelError(
                f"graphs are nested deeper than {self._limits.graph_depth}; {way_out('graph_depth')}"
            )
        where = printable(f"graph {graph.name[:80]!r}")
        last = {tensor.name: index for index, tensor in enumerate(graph.initializer)}
        gone = len(graph.initializer) - len(last)
        if gone:
            kept = [graph.initializer[index] for index in sorted(last.values())]
            del graph.initializer[:]
            graph.initializer.extend(kept)
            self.notes.append(f"{where}: initializers of a repeated name were left out: {gone}")
        given = {each.name for each in (*graph.input, *graph.initializer)}
        return self.nodes(graph.node, given, where, depth)

    def nodes(self, nodes: Any, given: set[str], where: str, depth: int) -> set[str]:
        """Sort a repeated field of nodes and return the names that they read from outside. given: names that need none."""
        where = printable(where)
        reads = [self._reads(node, depth) for node in nodes]
        makers: dict[str, int] = {}
        for index, node in enumerate(nodes):
            for name in node.output:
                if name and name not in given:
                    makers.setdefault(name, index)
        needs = [{makers[name] for name in names if name in makers} for names in reads]
        order = _order(needs)
        if len(order) < len(needs):
            names = " -> ".join(_named(nodes[index]) for index in _cycle(needs, set(order))[:_SHOWN])
            raise MalformedModelError(f"{where}: nodes that wait for each other cannot be run: {names}")
        if order != sorted(order):
            ordered = [nodes[index] for index in order]
            del nodes[:]
            nodes.extend(ordered)
            self.notes.append(f"{where}: the nodes were not in topological order; they were sorted")
        return set().union(*reads) - makers.keys() - given

    def _reads(self, node: onnx.NodeProto, depth: int) -> set[str]:
        found = set(node.input)
        for attribute in node.attribute:
            for body in bodies(attribute):
                found |= self.graph(body, depth + 1)
        return found


def _order(needs: list[set[int]]) -> list[int]:
    """Return the indices in topological order, without those that wait for a cycle. needs: of each, those before it."""
    waiting = [len(each) for each in needs]
    readers: list[list[int]] = [[] for _ in needs]
    for index, each in enumerate(needs):
        for before in each:
            readers[before].append(index)
    ready = [index for index, count in enumerate(waiting) if not count]
    order = []
    while ready:
        order.append(heapq.heappop(ready))
        for index in readers[order[-1]]:
            waiting[index] -= 1
            if not waiting[index]:
                heapq.heappush(ready, index)
    return order


def _cycle(needs: list[set[int]], done: Collection[int]) -> list[int]:
    """Return a cycle among the indices that are not done, in the direction of the data, its first one at both ends."""
    path = [next(index for index in range(len(needs)) if index not in done)]
    while path[-1] not in path[:-1]:
        path.append(min(index for index in needs[path[-1]] if index not in done))
    return path[path.index(path[-1]) :][::-1]


def _named(node: onnx.NodeProto) -> str:
    name = node.name or next((name for name in node.output if name), "")
    return printable(f"{node.op_type[:80]} {name[:80]!r}")
