"""A model cut in front of its batch norms, so that their inputs can be measured and their statistics chosen.

The level of a value is the largest number of batch norms on a path to it from an input. Segment s makes the values of level s
that batch norms or later segments read: it begins with the batch norms whose inputs segment s - 1 made, with statistics that
are inputs of the model. Batch norms of one level do not feed each other. What feeds no batch norm is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport.errors import UnsupportedModelError
from bnexport.model_io import walk
from bnexport.runtime import engine
from bnexport.runtime.engine import OnnxRuntime

Values = dict[str, np.ndarray[Any, Any]]

_PLACES = {"mean": 3, "var": 4}


@dataclasses.dataclass
class Segment:
    """Part of a model. made: what it computes. measured: inputs of the batch norms behind it. given: what it reads.

    constants: initializers that it reads. last: names of the values that no later segment reads or measures.
    """

    made: list[ir.Value]
    measured: dict[int, ir.Value]
    given: dict[ir.Value, None] = dataclasses.field(default_factory=dict)
    constants: dict[ir.Value, None] = dataclasses.field(default_factory=dict)
    nodes: set[ir.Node] = dataclasses.field(default_factory=set)
    last: list[str] = dataclasses.field(default_factory=list)
    runtime: OnnxRuntime | None = None

    def collect(self, level: int, levels: Mapping[ir.Value, int]) -> None:
        """Find the nodes that make its values from inputs of the model and values of lower levels."""
        open_nodes = [node for value in self.made if (node := value.producer())]
        while open_nodes:
            node = open_nodes.pop()
            if node in self.nodes:
                continue
            self.nodes.add(node)
            for value in _sources(node):
                if value.is_initializer() and value.graph is node.graph:
                    self.constants[value] = None
                elif levels.get(value, -1) == level and (producer := value.producer()):
                    open_nodes.append(producer)
                elif value in levels or value.graph is node.graph:
                    self.given[value] = None


class Segments:
    """A model in segments. Gives the model an input for each statistic of `norms`, named by `statistic`.

    norms: the BatchNormalization nodes of the main graph to measure, in inference, by any number.
    """

    def __init__(self, model: ir.Model, norms: Mapping[int, ir.Node]) -> None:
        self._model = model
        self._places = {node: place for place, node in enumerate(model.graph)}
        for number, node in norms.items():
            for what, place in _PLACES.items():
                old = node.inputs[place]
                assert old is not None
                new = ir.Value(name=statistic(number, what), type=old.type)
                model.graph.inputs.append(new)
                node.replace_input_with(place, new)
        levels = _levels(model.graph, set(norms.values()))
        inputs = {number: x for number, node in norms.items() if (x := node.inputs[0]) is not None}
        self.level_of = {number: levels.get(x, 0) for number, x in inputs.items()}
        self.segments: list[Segment] = []
        needed, seen = dict.fromkeys(inputs.values()), set[str]()
        for level in range(max(self.level_of.values(), default=-1), -1, -1):
            measured = {number: x for number, x in inputs.items() if self.level_of[number] == level}
            made = [value for value in needed if value.producer() is not None and levels[value] == level]
            segment = Segment(made, measured)
            segment.collect(level, levels)
            needed |= segment.given
            names = {str(value.name) for value in (*segment.given, *measured.values())}
            segment.last = sorted(names - seen)
            seen |= names
            self.segments.insert(0, segment)

    def __len__(self) -> int:
        return len(self.segments)

    def run(self, level: int, values: Values, statistics: Values) -> None:
        """Run one segment: add to `values` what later segments need and the inputs of the batch norms behind it, and drop
        what nothing reads any more.

        values: of the segments before, or the model's inputs.
        """
        segment = self.segments[level]
        if segment.made:
            names = [str(value.name) for value in segment.given]
            feeds = {name: statistics[name] if name in statistics else values[name] for name in names}
            if segment.runtime is None:
                segment.runtime = self._open(segment, feeds)
            made = [str(value.name) for value in segment.made]
            values.update(zip(made, segment.runtime.run(feeds, made), strict=True))
        self.drop(level - 1, values)

    def drop(self, level: int, values: Values) -> None:
        """Drop the values that no segment behind `level` reads."""
        for name in self.segments[level].last if level >= 0 else ():
            values.pop(name, None)

    def _open(self, segment: Segment, feeds: Values) -> OnnxRuntime:
        whole = self._model.graph
        graph = ir.GraphView(
            list(segment.given),
            segment.made,
            nodes=sorted(segment.nodes, key=self._places.__getitem__),
            initializers=list(segment.constants),
            opset_imports=whole.opset_imports,
            name=whole.name,
        ).clone()
        for value in graph.inputs:
            array = feeds[str(value.name)]
            if not isinstance(array, np.ndarray):
                raise UnsupportedModelError(f"{value.name}, which a batch norm depends on, is no tensor")
            value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
            value.shape = ir.Shape([None] * array.ndim)
        for value in graph.outputs:
            value.shape = None
        functions = list(self._model.functions.values())
        # Threads that spin after a run would keep the next session's from the cores.
        options = engine.default_options()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return engine.open(
            ir.Model(graph, ir_version=max(self._model.ir_version, 4), functions=functions), options=options
        )


def statistic(number: int, what: str) -> str:
    """Return the name of the input that is "mean" or "var" of a batch norm."""
    return f"bnexport.{number}.{what}"


def _levels(graph: ir.Graph, norms: set[ir.Node]) -> dict[ir.Value, int]:
    """Return the levels of the values that the nodes of a graph make."""
    levels: dict[ir.Value, int] = {}
    for node in graph:
        level = max((levels.get(value, 0) for value in _sources(node)), default=0) + (node in norms)
        levels.update((output, level) for output in node.outputs)
    return levels


def _sources(node: ir.Node) -> Iterable[ir.Value]:
    """Return what a node reads, in its bodies too."""
    return (value for each in (node, *walk.inner_nodes(node)) for value in each.inputs if value is not None)
