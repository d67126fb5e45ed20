"""Topological order of the nodes of a ModelProto. Some exporters write others; ONNX Runtime sorts them, too.

A node depends on the nodes that make its inputs and what its bodies read from outside. The sort is stable: of the
nodes whose dependencies are met, the first in the file comes first.
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


def sort_nodes(proto: onnx.ModelProto, limits: Limits) -> tuple[str, ...]:
    """Sort the nodes of every graph and function in place; return a note for each that changed.

    Raises MalformedModelError for a cycle, UnsafeModelError for graphs nested too deep.
    """
    sorter = _Sorter(limits)
    sorter.graph(proto.graph, 1)
    for function in proto.functions:
        sorter.nodes(function.node, set(function.input), f"function {function.domain}:{function.name}", 1)
    return tuple(f"{where}: the nodes were not in topological order; they were sorted" for where in sorter.changed)


class _Sorter:
    """changed: the graphs and functions whose nodes had another order."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.changed: list[str] = []

    def graph(self, graph: onnx.GraphProto, depth: int) -> set[str]:
        """Sort a graph and return the names that it reads from outside."""
        if depth > self._limits.graph_depth:
            raise UnsafeModelError(
                f"graphs are nested deeper than {self._limits.graph_depth}; {way_out('graph_depth')}"
            )
        given = {each.name for each in (*graph.input, *graph.initializer)}
        return self.nodes(graph.node, given, f"graph {graph.name[:80]!r}", depth)

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
            self.changed.append(where)
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
