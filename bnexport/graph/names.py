"""Allocation of unused names."""

from __future__ import annotations

import onnx_ir as ir

from bnexport.model_io import walk


class Names:
    def __init__(self, model: ir.Model) -> None:
        self._taken: set[str] = set()
        self._numbers: dict[str, int] = {}
        for graph in walk.graphs(model):
            self._taken.update(value.name for value in graph.inputs if value.name)
            self._taken.update(graph.initializers)
            for node in graph:
                self._taken.update(value.name for value in node.outputs if value.name)
                if node.name:
                    self._taken.add(node.name)

    def fresh(self, wish: str) -> str:
        """Return `wish` if it is unused, otherwise `wish` with a number appended."""
        name, number = wish, self._numbers.get(wish, 1)
        while name in self._taken:
            name, number = f"{wish}_{number}", number + 1
        self._numbers[wish] = number
        self._taken.add(name)
        return name
