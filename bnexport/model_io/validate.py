"""Validation of an untrusted ModelProto (structure and sizes) before anything is built from it.

After `validate` returns: every name that is read is defined before, once per scope; no tensor
declares more data than it carries; nothing that onnx-ir would drop in silence is present.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from bnexport.errors import MalformedModelError, ModelError, UnsafeModelError, UnsupportedModelError
from bnexport.model_io.limits import Limits, way_out

# Which repeated field holds the data of a type that is not in raw_data, and values per element.
_FLOAT_FIELD: dict[int, int] = {onnx.TensorProto.FLOAT: 1, onnx.TensorProto.COMPLEX64: 2}
_DOUBLE_FIELD: dict[int, int] = {onnx.TensorProto.DOUBLE: 1, onnx.TensorProto.COMPLEX128: 2}
_UINT64_FIELD = (onnx.TensorProto.UINT32, onnx.TensorProto.UINT64)
# NumPy's.
_MOST_DIMENSIONS = 32
# Characters of a text from the file that a message shows.
_LONGEST = 600
# Attributes that are lists, and the field of their entries.
_LISTS: dict[int, str] = {
    onnx.AttributeProto.FLOATS: "floats",
    onnx.AttributeProto.INTS: "ints",
    onnx.AttributeProto.STRINGS: "strings",
    onnx.AttributeProto.TYPE_PROTOS: "type_protos",
}
# Bits of an element, by its data type in the file.
BITS: dict[int, int] = {
    dtype.value: dtype.bitwidth for dtype in ir.DataType if dtype not in (ir.DataType.UNDEFINED, ir.DataType.STRING)
}


class MendableError(MalformedModelError):
    """The model breaks a rule that ONNX Runtime does not insist on; `mending.mend` may help."""


def validate(proto: onnx.ModelProto, limits: Limits) -> list[onnx.TensorProto]:
    """Validate the model; return the tensors in external files, which still have to be checked.

    Raises MalformedModelError (MendableError where mending may help), UnsafeModelError or
    UnsupportedModelError, in one printable line.
    """
    try:
        return _validate(proto, limits)
    except ModelError as error:
        text = printable(str(error))
        raise (error if text == str(error) else type(error)(text)) from error.__cause__


def printable(text: str) -> str:
    """Escape and shorten a name from the file for messages: no control characters, limited length."""
    if text.isprintable() and len(text) <= _LONGEST:
        return text
    return "".join(character if character.isprintable() else "?" for character in text[:_LONGEST])


def _validate(proto: onnx.ModelProto, limits: Limits) -> list[onnx.TensorProto]:
    if proto.ir_version < 1 or not proto.HasField("graph"):
        raise MalformedModelError("not an ONNX model: no graph or IR version")
    if not proto.opset_import:
        raise MalformedModelError("not an ONNX model: no opset is declared")
    if proto.training_info:
        raise MendableError("the model carries ONNX training_info, which cannot be kept")
    scope = _Scope(limits)
    scope.graph(proto.graph, 1)
    scope.text([item.domain for item in proto.opset_import], "opset import")
    texts = (proto.producer_name, proto.producer_version, proto.domain, proto.doc_string)
    scope.plain((*texts, *_entries(proto.metadata_props)), "model")
    seen = set()
    for function in proto.functions:
        key = (function.domain, function.name, getattr(function, "overload", ""))
        if key in seen:
            raise MalformedModelError(f"function {function.domain}:{function.name} is defined twice")
        seen.add(key)
        scope.function(function)
    _refuse_recursion(proto)
    return scope.external


def tensor_bytes(proto: onnx.TensorProto, limits: Limits) -> int:
    """Return the number of bytes that the declared type and shape need (packed types rounded up)."""
    bits = BITS.get(proto.data_type)
    if bits is None:
        if proto.data_type != onnx.TensorProto.STRING:
            known = proto.data_type != onnx.TensorProto.UNDEFINED
            what = f"the unknown data type {proto.data_type}" if known else "no data type"
            raise MalformedModelError(f"tensor {proto.name[:200]!r} has {what}")
        bits = 8
    dims = tuple(proto.dims)
    if dims and min(dims) < 0:
        raise MalformedModelError(f"tensor {proto.name[:200]!r} has a negative dimension: {dims[:8]}")
    if len(dims) > _MOST_DIMENSIONS:
        raise UnsupportedModelError(
            f"tensor {proto.name[:200]!r} has {len(dims)} dimensions, expected at most {_MOST_DIMENSIONS}"
        )
    nbytes = (math.prod(dims) * bits + 7) // 8
    if nbytes > limits.tensor_bytes:
        raise UnsafeModelError(
            f"tensor {proto.name[:200]!r} declares {nbytes} bytes, the limit is {limits.tensor_bytes};"
            f" {way_out('tensor_bytes')}"
        )
    return nbytes


def _check_tensor(proto: onnx.TensorProto, limits: Limits) -> None:
    nbytes = tensor_bytes(proto, limits)
    if proto.HasField("segment"):
        raise UnsupportedModelError(f"tensor {proto.name[:200]!r} is stored in segments, which no runtime reads")
    if proto.data_location == onnx.TensorProto.EXTERNAL:
        if proto.data_type == onnx.TensorProto.STRING:
            raise UnsafeModelError(f"tensor {proto.name[:200]!r}: strings cannot be external data")
        if proto.HasField("raw_data"):
            raise MalformedModelError(f"tensor {proto.name[:200]!r} has its data twice, inside and outside")
        return
    if proto.HasField("raw_data"):
        got, expected = len(proto.raw_data), nbytes
    else:
        got, expected = _typed_values(proto, nbytes)
    if got != expected:
        raise MalformedModelError(
            f"tensor {proto.name[:200]!r} with shape {list(proto.dims)[:8]} carries {got} bytes or values,"
            f" expected {expected}"
        )


def _typed_values(proto: onnx.TensorProto, nbytes: int) -> tuple[int, int]:
    """Return how many values the field of the tensor's type has, and how many its shape needs."""
    count = math.prod(proto.dims)
    if proto.data_type in _FLOAT_FIELD:
        return len(proto.float_data), count * _FLOAT_FIELD[proto.data_type]
    if proto.data_type in _DOUBLE_FIELD:
        return len(proto.double_data), count * _DOUBLE_FIELD[proto.data_type]
    if proto.data_type == onnx.TensorProto.INT64:
        return len(proto.int64_data), count
    if proto.data_type in _UINT64_FIELD:
        return len(proto.uint64_data), count
    if proto.data_type == onnx.TensorProto.STRING:
        return len(proto.string_data), count
    return len(proto.int32_data), nbytes if BITS[proto.data_type] < 8 else count


class _Scope:
    """A walk over the graphs and functions of one model, with a stack of the visible names."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._names: list[set[str]] = []
        self._left = {"nodes": limits.nodes, "tensors": limits.tensors, "values": limits.values}
        self.external: list[onnx.TensorProto] = []

    def graph(self, graph: onnx.GraphProto, depth: int) -> None:
        where = f"graph {graph.name[:80]!r}"
        if depth > self._limits.graph_depth:
            raise UnsafeModelError(
                f"{where}: graphs are nested deeper than {self._limits.graph_depth}; {way_out('graph_depth')}"
            )
        if graph.sparse_initializer:
            raise UnsupportedModelError(
                f"{where} has sparse initializers, which are not supported; convert them to dense ones"
            )
        inputs = [value.name for value in graph.input]
        initializers = [tensor.name for tensor in graph.initializer]
        self._count("values", len(inputs) + len(graph.output) + len(graph.value_info))
        self._unique(inputs, f"{where}: input")
        self._unique(initializers, f"{where}: initializer", MendableError)
        for tensor in graph.initializer:
            self._tensor(tensor)
        self.plain((graph.name, graph.doc_string, *_entries(graph.metadata_props)), where)
        for annotation in graph.quantization_annotation:
            self.plain((annotation.tensor_name, *_entries(annotation.quant_parameter_tensor_names)), where)
        self._names.append({*inputs, *initializers})
        self._nodes(graph.node, depth, where)
        for value in graph.output:
            if value.name not in self._names[-1]:
                outer = "a value of an outer graph; an Identity in between makes it valid"
                what = outer if self._visible(value.name) else "produced by no node"
                raise MalformedModelError(f"{where}: output {value.name[:200]!r} is {what}")
        self._unique([value.name for value in graph.output], f"{where}: output")
        self._names.pop()

    def function(self, function: onnx.FunctionProto) -> None:
        self.text((function.domain, function.name, *function.output, *function.attribute), "function")
        where = f"function {function.domain}:{function.name}"
        self._count("values", len(function.input) + len(function.output) + len(function.attribute))
        self.plain((function.doc_string, function.overload, *_entries(function.metadata_props)), where)
        self._unique(function.input, f"{where}: input")
        for attribute in function.attribute_proto:
            self.text((attribute.name, attribute.ref_attr_name), where)
            before = len(self.external)
            self._attribute(attribute, 1, where)
            if len(self.external) > before:
                raise UnsafeModelError(f"{where}: the default of {attribute.name[:80]!r} is external data")
        self._names.append(set(function.input))
        self._nodes(function.node, 1, where)
        for name in function.output:
            if not self._visible(name):
                raise MalformedModelError(f"{where}: output {name[:200]!r} is produced by no node")
        self._names.pop()

    def _nodes(self, nodes: Sequence[onnx.NodeProto], depth: int, where: str) -> None:
        scope = self._names[-1]
        captured: set[str] = set()
        self._count("nodes", len(nodes) + 1)
        for node in nodes:
            inputs, outputs = tuple(node.input), tuple(node.output)
            self._count("values", len(inputs) + len(outputs) + len(node.attribute))
            self.text((node.op_type, node.domain, node.name, *inputs, *outputs), where)
            self.plain((node.overload, node.doc_string, *_entries(node.metadata_props)), where)
            if not outputs and node.domain in ("", "ai.onnx"):
                raise MalformedModelError(f"{where}: {node.op_type} {node.name[:80]!r} has no outputs")
            for name in inputs:
                if name and name not in scope:
                    if not self._visible(name):
                        raise MendableError(
                            f"{where}: {node.op_type} {node.name[:80]!r} reads {name[:200]!r}, which nothing defines"
                        )
                    captured.add(name)
            attributes = set()
            for attribute in node.attribute:
                self.text((attribute.name, attribute.ref_attr_name), where)
                if attribute.name in attributes:
                    raise MalformedModelError(
                        f"{where}: {node.op_type} has the attribute {attribute.name[:80]!r} twice"
                    )
                attributes.add(attribute.name)
                self._attribute(attribute, depth, where)
            for name in outputs:
                if not name:
                    continue
                if name in scope or name in captured:
                    raise MalformedModelError(f"{where}: the name {name[:200]!r} is defined twice")
                scope.add(name)

    def _attribute(self, attribute: onnx.AttributeProto, depth: int, where: str) -> None:
        if attribute.sparse_tensors or attribute.HasField("sparse_tensor"):
            raise UnsupportedModelError(
                f"{where}: attribute {attribute.name!r} is a sparse tensor, which is not supported"
            )
        if attribute.HasField("t"):
            self._tensor(attribute.t)
        elif attribute.type == onnx.AttributeProto.TENSOR and not attribute.ref_attr_name:
            raise MalformedModelError(f"{where}: attribute {attribute.name!r} is said to be a tensor and holds none")
        entries = _LISTS.get(attribute.type)
        if entries is not None:
            self._count("values", len(getattr(attribute, entries)))
        self.plain((attribute.doc_string,), where)
        for tensor in attribute.tensors:
            self._tensor(tensor)
        for graph in bodies(attribute):
            self.graph(graph, depth + 1)

    def _count(self, what: str, number: int) -> None:
        self._left[what] -= number
        if self._left[what] < 0:
            limit = getattr(self._limits, what)
            raise UnsafeModelError(f"the model has more than {limit} {what}; {way_out(what)}")

    def _visible(self, name: str) -> bool:
        return any(name in names for names in reversed(self._names))

    def _tensor(self, tensor: onnx.TensorProto) -> None:
        self._count("tensors", 1)
        _check_tensor(tensor, self._limits)
        self.plain((tensor.name, tensor.doc_string, *_entries(tensor.metadata_props)), "tensor")
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            self.plain(_entries(tensor.external_data), f"external data of {tensor.name[:80]!r}")
            self.external.append(tensor)

    def plain(self, values: Sequence[Any], where: str) -> None:
        """Refuse texts that are not valid UTF-8 (which protobuf returns as bytes); any length is accepted."""
        try:
            "".join(values)
        except TypeError:
            raise MalformedModelError(f"{where}: a text is not valid UTF-8") from None

    def text(self, values: Sequence[Any], where: str) -> None:
        """Refuse names that are too long or not valid UTF-8 (which protobuf returns as bytes)."""
        try:
            if len("".join(values)) <= self._limits.name_length:
                return  # all of them are text, and none is longer than all together
        except TypeError:
            pass
        for value in values:
            if not isinstance(value, str):
                raise MalformedModelError(f"{where}: a name is not valid UTF-8: {value!r}"[:200])
            if len(value) > self._limits.name_length:
                raise UnsafeModelError(
                    f"{where}: a name has {len(value)} characters, {value[:60]!r}...; {way_out('name_length')}"
                )

    def _unique(self, names: Iterable[str], what: str, error: type[ModelError] = MalformedModelError) -> None:
        names = list(names)
        self.text(names, what)
        if len(set(names)) == len(names) and "" not in names:
            return
        seen: set[str] = set()
        for name in names:
            if not name:
                raise MalformedModelError(f"{what} without a name")
            if name in seen:
                raise error(f"{what} {name[:200]!r} appears twice")
            seen.add(name)


def _entries(pairs: Any) -> list[Any]:
    """Yield keys and values of a repeated StringStringEntryProto."""
    return [text for pair in pairs for text in (pair.key, pair.value)] if pairs else []


def tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor: initializers and attributes of all graphs and functions."""
    yield from _graph_tensors(proto.graph)
    for function in proto.functions:
        yield from _node_tensors(function.node)


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for graph in bodies(attribute):
                yield from _graph_tensors(graph)


def bodies(attribute: onnx.AttributeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs that an attribute holds."""
    if attribute.HasField("g"):
        yield attribute.g
    yield from attribute.graphs


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield all nodes, subgraphs included; `validate` has bounded the depth."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in bodies(attribute):
                yield from all_nodes(graph.node)


def _refuse_recursion(proto: onnx.ModelProto) -> None:
    """Refuse a function that calls itself, directly or indirectly."""
    calls = {
        (function.domain, function.name): {(node.domain, node.op_type) for node in all_nodes(function.node)}
        for function in proto.functions
    }
    done: set[tuple[str, str]] = set()
    for start, first in calls.items():
        path: list[tuple[tuple[str, str], Iterator[tuple[str, str]]]] = [(start, iter(sorted(first)))]
        open_calls = {start}
        while path:
            current, rest = path[-1]
            callee = next((name for name in rest if name in calls and name not in done), None)
            if callee is None:
                path.pop()
                open_calls.discard(current)
                done.add(current)
            elif callee in open_calls:
                raise UnsafeModelError(f"function {callee[0]}:{callee[1]} calls itself")
            else:
                open_calls.add(callee)
                path.append((callee, iter(sorted(calls[callee]))))


# Mending of files that break a rule on which ONNX Runtime does not insist, each with a note.
#
# nodes in no topological order     sorted; a node depends on the nodes that make its inputs and on what its bodies
#                                   read from outside. Stable: of the nodes whose dependencies are met, the first in
#                                   the file comes first
# initializers of one name          the last one is kept, which ONNX Runtime takes
# initializers without a name       left out: nothing can read them
# training_info                     left out: it adds no output to the graph

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
