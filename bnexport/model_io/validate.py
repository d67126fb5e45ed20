"""Structure and sizes of an untrusted ModelProto, checked before anything is built from it.

After `validate` returns: every name that is read is defined before, once per scope; no tensor
declares more data than it carries; nothing that onnx-ir would drop in silence is present.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import onnx
import onnx_ir as ir

from bnexport.errors import MalformedModelError, ModelError, UnsafeModelError, UnsupportedModelError
from bnexport.model_io.limits import Limits

# Which repeated field holds the data of a type that is not in raw_data, and values per element.
_FLOAT_FIELD: dict[int, int] = {onnx.TensorProto.FLOAT: 1, onnx.TensorProto.COMPLEX64: 2}
_DOUBLE_FIELD: dict[int, int] = {onnx.TensorProto.DOUBLE: 1, onnx.TensorProto.COMPLEX128: 2}
_UINT64_FIELD = (onnx.TensorProto.UINT32, onnx.TensorProto.UINT64)


def validate(proto: onnx.ModelProto, limits: Limits) -> None:
    """Raises MalformedModelError, UnsafeModelError or UnsupportedModelError, in one printable line."""
    try:
        _validate(proto, limits)
    except ModelError as error:
        text = printable(str(error))
        raise (error if text == str(error) else type(error)(text)) from error.__cause__


def printable(text: str) -> str:
    """Names come from the file: nothing that a terminal would obey, nothing endless."""
    return "".join(character if character.isprintable() else "?" for character in text[:600])


def _validate(proto: onnx.ModelProto, limits: Limits) -> None:
    if proto.ir_version < 1 or not proto.HasField("graph"):
        raise MalformedModelError("not an ONNX model: no graph or IR version")
    if not proto.opset_import and proto.ir_version >= 3:
        raise MalformedModelError("not an ONNX model: no opset is declared")
    if proto.training_info:
        raise UnsupportedModelError("the model carries ONNX training_info, which cannot be kept; remove it first")
    scope = _Scope(limits)
    scope.graph(proto.graph, 1)
    scope.text([item.domain for item in proto.opset_import], "opset import")
    seen = set()
    for function in proto.functions:
        key = (function.domain, function.name, getattr(function, "overload", ""))
        if key in seen:
            raise MalformedModelError(f"function {function.domain}:{function.name} is defined twice")
        seen.add(key)
        scope.function(function)
    _refuse_recursion(proto)


def tensor_bytes(proto: onnx.TensorProto, limits: Limits) -> int:
    """Bytes that the declared type and shape need (packed types rounded up)."""
    name = proto.name[:200]
    try:
        dtype = ir.DataType(proto.data_type)
    except ValueError as error:
        raise MalformedModelError(f"tensor {name!r} has the unknown data type {proto.data_type}") from error
    if dtype is ir.DataType.UNDEFINED:
        raise MalformedModelError(f"tensor {name!r} has no data type")
    dims = tuple(proto.dims)
    if any(dim < 0 for dim in dims):
        raise MalformedModelError(f"tensor {name!r} has a negative dimension: {dims[:8]}")
    bits = 8 if dtype is ir.DataType.STRING else dtype.bitwidth
    nbytes = (math.prod(dims) * bits + 7) // 8
    if nbytes > limits.tensor_bytes:
        raise UnsafeModelError(f"tensor {name!r} declares {nbytes} bytes, the limit is {limits.tensor_bytes}")
    return nbytes


def _check_tensor(proto: onnx.TensorProto, limits: Limits) -> None:
    nbytes = tensor_bytes(proto, limits)
    name, count = proto.name[:200], math.prod(proto.dims)
    if proto.HasField("segment"):
        raise UnsupportedModelError(f"tensor {name!r} is stored in segments, which no runtime reads")
    if proto.data_location == onnx.TensorProto.EXTERNAL:
        if proto.data_type == onnx.TensorProto.STRING:
            raise UnsafeModelError(f"tensor {name!r}: strings cannot be external data")
        if proto.HasField("raw_data"):
            raise MalformedModelError(f"tensor {name!r} has its data twice, inside and outside")
        return
    if proto.HasField("raw_data"):
        got, expected = len(proto.raw_data), nbytes
    elif proto.data_type in _FLOAT_FIELD:
        got, expected = len(proto.float_data), count * _FLOAT_FIELD[proto.data_type]
    elif proto.data_type in _DOUBLE_FIELD:
        got, expected = len(proto.double_data), count * _DOUBLE_FIELD[proto.data_type]
    elif proto.data_type == onnx.TensorProto.INT64:
        got, expected = len(proto.int64_data), count
    elif proto.data_type in _UINT64_FIELD:
        got, expected = len(proto.uint64_data), count
    elif proto.data_type == onnx.TensorProto.STRING:
        got, expected = len(proto.string_data), count
    else:
        got = len(proto.int32_data)
        expected = nbytes if ir.DataType(proto.data_type).bitwidth < 8 else count
    if got != expected:
        raise MalformedModelError(
            f"tensor {name!r} with shape {list(proto.dims)[:8]} carries {got} bytes or values, expected {expected}"
        )


class _Scope:
    """Walks the graphs and functions of one model, with a stack of the names that are visible."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._names: list[set[str]] = []
        self._nodes_left, self._tensors_left = limits.nodes, limits.tensors

    def graph(self, graph: onnx.GraphProto, depth: int) -> None:
        where = f"graph {graph.name[:80]!r}"
        if depth > self._limits.graph_depth:
            raise UnsafeModelError(f"{where}: graphs are nested deeper than {self._limits.graph_depth}")
        if graph.sparse_initializer:
            raise UnsupportedModelError(
                f"{where} has sparse initializers, which are not supported; convert them to dense ones"
            )
        inputs = [value.name for value in graph.input]
        initializers = [tensor.name for tensor in graph.initializer]
        self._unique(inputs, f"{where}: input")
        self._unique(initializers, f"{where}: initializer")
        for tensor in graph.initializer:
            self._tensor(tensor)
        self._names.append({*inputs, *initializers})
        self._nodes(graph.node, depth, where)
        for value in graph.output:
            if not self._visible(value.name):
                raise MalformedModelError(f"{where}: output {value.name[:200]!r} is produced by no node")
        self._unique([value.name for value in graph.output], f"{where}: output")
        self._names.pop()

    def function(self, function: onnx.FunctionProto) -> None:
        self.text((function.domain, function.name, *function.output, *function.attribute), "function")
        where = f"function {function.domain}:{function.name}"
        self._unique(function.input, f"{where}: input")
        self._names.append(set(function.input))
        self._nodes(function.node, 1, where)
        for name in function.output:
            if not self._visible(name):
                raise MalformedModelError(f"{where}: output {name[:200]!r} is produced by no node")
        self._names.pop()

    def _nodes(self, nodes: Sequence[onnx.NodeProto], depth: int, where: str) -> None:
        scope = self._names[-1]
        captured: set[str] = set()
        self._nodes_left -= len(nodes)
        if self._nodes_left < 0:
            raise UnsafeModelError(f"the model has more than {self._limits.nodes} nodes")
        for node in nodes:
            inputs, outputs = tuple(node.input), tuple(node.output)
            self.text((node.op_type, node.domain, node.name, *inputs, *outputs), where)
            for name in inputs:
                if name and name not in scope:
                    if not self._visible(name):
                        raise MalformedModelError(
                            f"{where}: {node.op_type} {node.name[:80]!r} reads {name[:200]!r}, which nothing defines before it"
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
        for tensor in attribute.tensors:
            self._tensor(tensor)
        for graph in _bodies(attribute):
            self.graph(graph, depth + 1)

    def _visible(self, name: str) -> bool:
        return any(name in names for names in reversed(self._names))

    def _tensor(self, tensor: onnx.TensorProto) -> None:
        self._tensors_left -= 1
        if self._tensors_left < 0:
            raise UnsafeModelError(f"the model has more than {self._limits.tensors} tensors")
        _check_tensor(tensor, self._limits)

    def text(self, values: Iterable[object], where: str) -> None:
        """protobuf hands invalid UTF-8 out as bytes."""
        for value in values:
            if not isinstance(value, str):
                raise MalformedModelError(f"{where}: a name is not valid UTF-8: {value!r}"[:200])
            if len(value) > self._limits.name_length:
                raise UnsafeModelError(f"{where}: a name has {len(value)} characters: {value[:60]!r}...")

    def _unique(self, names: Iterable[str], what: str) -> None:
        seen: set[str] = set()
        names = list(names)
        self.text(names, what)
        for name in names:
            if not name:
                raise MalformedModelError(f"{what} without a name")
            if name in seen:
                raise MalformedModelError(f"{what} {name[:200]!r} appears twice")
            seen.add(name)


def tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor: initializers and attributes of all graphs and functions."""
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
            for graph in _bodies(attribute):
                yield from _graph_tensors(graph)


def _bodies(attribute: onnx.AttributeProto) -> Iterator[onnx.GraphProto]:
    if attribute.HasField("g"):
        yield attribute.g
    yield from attribute.graphs


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes with those of their bodies; the depth has been bounded by `validate`."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in _bodies(attribute):
                yield from all_nodes(graph.node)


def _refuse_recursion(proto: onnx.ModelProto) -> None:
    """A function that calls itself, directly or not, never ends."""
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
