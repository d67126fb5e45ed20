"""A model cut in front of its batch norms, so that their inputs can be measured and their statistics chosen.

The level of a value is the largest number of batch norms on a path to it from an input. Segment s holds the nodes of level s;
a batch norm belongs to the level of its output. So segment s runs the batch norms whose inputs segment s - 1 computed, with
statistics that are inputs of the segment, and ends at the inputs of the next ones. Batch norms of one level do not feed
each other. Nodes that feed no batch norm are left out.
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

_MEAN, _VAR = 3, 4


@dataclasses.dataclass
class Segment:
    """Nodes of one level. given: names of values that other segments or the caller give. made: names that others need.

    norms: for each batch norm that it runs, the names of its statistics. measured: for each batch norm behind it, its input.
    """

    nodes: list[ir.Node]
    norms: dict[int, tuple[str, str]]
    measured: dict[int, ir.Value]
    given: dict[ir.Value, str] = dataclasses.field(default_factory=dict)
    made: dict[str, ir.Value] = dataclasses.field(default_factory=dict)
    runtime: OnnxRuntime | None = None


class Segments:
    """A model in segments. Takes the nodes out of `model`.

    norms: the BatchNormalization nodes of the main graph to measure, in inference, by any number.
    """

    def __init__(self, model: ir.Model, norms: Mapping[int, ir.Node]) -> None:
        self._model = model
        self._levels: dict[ir.Value, int] = {}
        numbers = {node: number for number, node in norms.items()}
        wanted = _needed(model.graph, norms.values())
        self.segments: list[Segment] = []
        for node in [node for node in model.graph if node in wanted]:
            level = max((self._levels.get(value, 0) for value in _sources(node)), default=0) + (node in numbers)
            while len(self.segments) <= level:
                self.segments.append(Segment([], {}, {}))
            self.segments[level].nodes.append(node)
            self._levels.update((output, level) for output in node.outputs)
        self.level_of = {}
        for number, node in norms.items():
            x = node.inputs[0]
            assert x is not None
            self.level_of[number] = self._levels.get(x, 0)
            if not self.segments:
                self.segments.append(Segment([], {}, {}))
            self.segments[self.level_of[number]].measured[number] = x
        # Batch norms that feed no other one run in no segment.
        last = max(self.level_of.values(), default=-1)
        del self.segments[last + 1 :]
        self._connect(numbers)
        self._last_used = self._uses()

    def __len__(self) -> int:
        return len(self.segments)

    def run(self, level: int, values: Values, statistics: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Run one segment: add to `values` what later segments need and the inputs of the batch norms behind it, and drop
        what nothing reads any more.

        values: of the segments before, or the model's inputs. statistics: by name, as `Segment.norms` has them.
        """
        segment = self.segments[level]
        if segment.made:
            feeds = {name: statistics[name] if name in statistics else values[name] for name in segment.given.values()}
            if segment.runtime is None:
                segment.runtime = self._open(segment, feeds)
            outputs = segment.runtime.run(feeds, list(segment.made))
            values.update(zip(segment.made, outputs, strict=True))
        self.drop(level - 1, values)

    def drop(self, level: int, values: Values) -> None:
        """Drop the values that no segment behind `level` reads."""
        for name in self._last_used.get(level, ()):
            values.pop(name, None)

    def _connect(self, numbers: Mapping[ir.Node, int]) -> None:
        """Replace what each segment reads of others by inputs of its own."""
        homes = {
            output: level for level, each in enumerate(self.segments) for node in each.nodes for output in node.outputs
        }
        inputs = set(self._model.graph.inputs)
        for level, segment in enumerate(self.segments):
            own: dict[ir.Value, ir.Value] = {}
            for node in segment.nodes:
                if node in numbers:
                    segment.norms[numbers[node]] = self._free_statistics(node, numbers[node], segment)
                for reader, index, value in _reads(node):
                    home = homes.get(value)
                    constant = value.is_initializer() and value not in homes
                    if home == level or (home is None and not constant and value not in inputs):
                        continue
                    if value not in own:
                        own[value] = ir.Value(
                            name=value.name, type=value.type, const_value=value.const_value if constant else None
                        )
                        if not constant:
                            segment.given[own[value]] = str(value.name)
                            if home is not None:
                                self.segments[home].made[str(value.name)] = value
                    reader.replace_input_with(index, own[value])
        for level, segment in enumerate(self.segments):
            segment.made.update((str(x.name), x) for x in segment.measured.values() if homes.get(x) == level)

    def _free_statistics(self, node: ir.Node, number: int, segment: Segment) -> tuple[str, str]:
        names = []
        for index, what in ((_MEAN, "mean"), (_VAR, "var")):
            old = node.inputs[index]
            assert old is not None
            new = ir.Value(name=f"bnexport.{number}.{what}", type=old.type)
            node.replace_input_with(index, new)
            segment.given[new] = str(new.name)
            names.append(str(new.name))
        return names[0], names[1]

    def _uses(self) -> dict[int, list[str]]:
        """Return, for each segment, the values that it is the last one to read or measure."""
        last: dict[str, int] = {}
        for level, segment in enumerate(self.segments):
            for name in (*segment.given.values(), *(str(x.name) for x in segment.measured.values())):
                last[name] = level
        found: dict[int, list[str]] = {}
        for name, level in last.items():
            found.setdefault(level, []).append(name)
        return found

    def _open(self, segment: Segment, feeds: Values) -> OnnxRuntime:
        graph = self._model.graph
        for value, name in segment.given.items():
            if not isinstance(feeds[name], np.ndarray):
                raise UnsupportedModelError(f"{name}, which a batch norm depends on, is no tensor")
            value.type = ir.TensorType(ir.DataType.from_numpy(feeds[name].dtype))
            value.shape = ir.Shape([None] * feeds[name].ndim)
        for value in segment.made.values():
            value.shape = None
        graph.remove(segment.nodes)
        constants = {
            str(value.name): value
            for node in segment.nodes
            for _, _, value in _reads(node)
            if value.const_value is not None and value.producer() is None and value not in segment.given
        }
        part = ir.Graph(
            list(segment.given),
            list(segment.made.values()),
            nodes=segment.nodes,
            initializers=list(constants.values()),
            opset_imports=dict(graph.opset_imports),
            name="segment",
        )
        functions = list(self._model.functions.values())
        model = ir.Model(part, ir_version=max(self._model.ir_version, 4), functions=functions)
        return engine.open(model, options=_options())


def _reads(node: ir.Node) -> Iterable[tuple[ir.Node, int, ir.Value]]:
    """Yield what a node reads, in its bodies too: the reader, the place and the value."""
    for reader in (node, *walk.inner_nodes(node)):
        for index, value in enumerate(reader.inputs):
            if value is not None:
                yield reader, index, value


def _sources(node: ir.Node) -> Iterable[ir.Value]:
    return (value for _, _, value in _reads(node))


def _needed(graph: ir.Graph, norms: Iterable[ir.Node]) -> set[ir.Node]:
    """Return the nodes of the main graph that batch norms depend on, with these."""
    main = {output: node for node in graph for output in node.outputs}
    found = set(norms)
    open_nodes: list[ir.Node] = list(found)
    while open_nodes:
        for value in _sources(open_nodes.pop()):
            producer = main.get(value)
            if producer is not None and producer not in found:
                found.add(producer)
                open_nodes.append(producer)
    return found


def _options() -> Any:
    """Create options of a session: threads that spin after a run would keep the next session's from the cores."""
    options = engine.default_options()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options
