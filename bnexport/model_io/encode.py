"""Serialisation of a model into pieces of bytes; large tensors are written later, on demand.

A file is a list of pieces, bytes or tensors, in order. A tensor in the list stands for its raw bytes, so a
file of many gigabytes is laid out, and its size known, before any of its weights is read. In the model file

    ModelProto without graph | tag, length | GraphProto without initializers | initializer ...

which is one message, since protobuf reads the fields of a message in any order.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator

import onnx
import onnx_ir as ir

from bnexport.errors import MalformedModelError
from bnexport.model_io import walk
from bnexport.model_io.external import ContainedTensor
from bnexport.model_io.read import innermost
from bnexport.model_io.validate import BITS, bodies
from bnexport.model_io.wire import SMALLEST_CUT, field, header

# Smaller tensors stay in the model file: shapes and scalars that tools want to see.
SMALLEST_EXTERNAL = 1024
ALIGNMENT = 64
# Field numbers of onnx.proto.
_MODEL_GRAPH, _GRAPH_INITIALIZER, _TENSOR_RAW_DATA = 7, 5, 9
# Where onnx-ir keeps GraphProto.quantization_annotation.
_QUANTIZATION = "quant_parameter_tensor_names"

Piece = bytes | ir.TensorProtocol


@dataclasses.dataclass(frozen=True)
class Encoded:
    """model: the pieces of the model file. data: the pieces of the external data file, possibly none."""

    model: list[Piece]
    data: list[Piece]

    @property
    def model_size(self) -> int:
        return sum(map(size, self.model))


def size(piece: Piece) -> int:
    """Return the number of bytes that a piece or a tensor takes in a file; strings are not counted."""
    if isinstance(piece, bytes):
        return len(piece)
    # Not isinstance, which costs more than all the rest for classes that implement a protocol.
    if type(piece) is ir.serde.TensorProtoTensor:  # without the Shape object that `nbytes` makes
        return (math.prod(piece.raw.dims) * BITS.get(piece.raw.data_type, 0) + 7) // 8
    return 0 if piece.dtype is ir.DataType.STRING else piece.nbytes


def encode(model: ir.Model, data_name: str | None = None, *, given: bool = False) -> Encoded:
    """Serialise `model` into pieces; with a `data_name`, tensors of initializers go to a file of that name.

    given: references that are no files of ours stay references. Raises MalformedModelError for a model that
    has no serialised form.
    """
    if data_name is None:
        inside = ((slot, _in_memory(tensor)) for slot, tensor in _stored_elsewhere(model, given))
        with replaced(inside):
            return Encoded(_model_pieces(model), [])
    replacements, data = _externalised(model, data_name)
    with replaced(replacements):
        return Encoded(_model_pieces(model), data)


def _model_pieces(model: ir.Model) -> list[Piece]:
    graph = model.graph
    shell = copy.copy(model)
    shell.graph = ir.GraphView(  # type: ignore[assignment]
        graph.inputs,
        graph.outputs,
        nodes=graph,
        doc_string=graph.doc_string,
        opset_imports=graph.opset_imports,
        name=graph.name,
        metadata_props=dict(graph.metadata_props),
    )
    try:
        proto = ir.serde.serialize_model(shell)
        initializers: list[Piece] = []
        for value in graph.initializers.values():
            if value.const_value is not None:
                initializers += _initializer(value)
    except ir.serde.SerdeError as error:
        raise MalformedModelError(f"the model cannot be written: {innermost(error)}") from error
    _annotate(proto.graph, graph)
    _drop_types_of_initializers(proto.graph)
    inside = proto.graph.SerializeToString()
    proto.ClearField("graph")
    length = len(inside) + sum(map(size, initializers))
    return _joined([proto.SerializeToString(), header(_MODEL_GRAPH, length), inside, *initializers])


def _initializer(value: ir.Value) -> list[Piece]:
    """Encode GraphProto.initializer, with the raw bytes of a large tensor as a separate piece."""
    tensor = value.const_value
    assert tensor is not None
    tensor.name = value.name
    if not _streams(tensor):
        if type(tensor) is ir.serde.TensorProtoTensor and not tensor.metadata_props:
            return [field(_GRAPH_INITIALIZER, tensor.raw.SerializeToString())]
        return [field(_GRAPH_INITIALIZER, ir.serde.serialize_tensor(tensor).SerializeToString())]
    proto = onnx.TensorProto(name=tensor.name, data_type=tensor.dtype.value, dims=tensor.shape.numpy())
    if tensor.doc_string:
        proto.doc_string = tensor.doc_string
    for key, text in sorted(tensor.metadata_props.items()):
        proto.metadata_props.add(key=key, value=text)
    head = proto.SerializeToString() + header(_TENSOR_RAW_DATA, size(tensor))
    return [header(_GRAPH_INITIALIZER, len(head) + size(tensor)) + head, tensor]


def _streams(tensor: ir.TensorProtocol) -> bool:
    """Whether the bytes of a tensor are written from their source: a file or a large array."""
    if type(tensor) is ir.serde.TensorProtoTensor:
        if not tensor.raw.HasField("raw_data"):
            return False
    elif walk.lies_in_file(tensor):
        return isinstance(tensor, ContainedTensor)
    return tensor.dtype is not ir.DataType.STRING and size(tensor) >= SMALLEST_CUT


def _externalised(
    model: ir.Model, data_name: str
) -> tuple[list[tuple[walk.TensorSlot, ir.TensorProtocol]], list[Piece]]:
    """Return the external reference of each tensor stored in the data file, and the pieces of that file."""
    replacements: list[tuple[walk.TensorSlot, ir.TensorProtocol]] = []
    data: list[Piece] = []
    placed: dict[int, ir.ExternalTensor] = {}
    offset = 0
    for slot in walk.tensors(model):
        tensor = slot.get()
        # Runtimes look for external data in initializers only; attributes stay inline.
        if slot.value is None or tensor.dtype is ir.DataType.STRING or size(tensor) < SMALLEST_EXTERNAL:
            if isinstance(tensor, ContainedTensor):
                replacements.append((slot, _in_memory(tensor)))
            continue
        if id(tensor) not in placed:
            padding = -offset % ALIGNMENT
            data += [bytes(padding), tensor]
            offset += padding
            placed[id(tensor)] = _reference(tensor, data_name, offset)
            offset += size(tensor)
        replacements.append((slot, placed[id(tensor)]))
    return replacements, data


def _reference(tensor: ir.TensorProtocol, data_name: str, offset: int) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        data_name,
        offset,
        size(tensor),
        tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=tensor.name or "",
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props) or None,
    )


def _stored_elsewhere(model: ir.Model, given: bool) -> Iterator[tuple[walk.TensorSlot, ir.ExternalTensor]]:
    """Return the tensors stored in files, except those that `_model_pieces` copies itself."""
    own = model.graph.initializers
    for slot, tensor in walk.external(model):
        taken = slot.value is not None and own.get(str(slot.value.name)) is slot.value
        if not taken or not (given or isinstance(tensor, ContainedTensor)):
            yield slot, tensor


def _in_memory(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    proto = onnx.TensorProto(data_type=tensor.dtype.value, dims=tensor.shape.numpy(), raw_data=tensor.tobytes())
    proto.name = tensor.name or ""
    return ir.serde.TensorProtoTensor(proto)


@contextlib.contextmanager
def replaced(replacements: Iterable[tuple[walk.TensorSlot, ir.TensorProtocol]]) -> Iterator[None]:
    """Replace tensors in some slots during one serialisation."""
    undo: list[tuple[walk.TensorSlot, ir.TensorProtocol]] = []
    try:
        for slot, tensor in replacements:
            undo.append((slot, slot.get()))
            slot.set(tensor)
        yield
    finally:
        for slot, tensor in reversed(undo):
            slot.set(tensor)


def _annotate(proto: onnx.GraphProto, graph: ir.Graph) -> None:
    """Restore the quantization annotations of initializers, which the graph without initializers lacks."""
    done = {annotation.tensor_name for annotation in proto.quantization_annotation}
    for value in graph.initializers.values():
        names = value.meta.get(_QUANTIZATION)
        if names and value.name not in done:
            entry = proto.quantization_annotation.add(tensor_name=value.name)
            for key, name in names.items():
                entry.quant_parameter_tensor_names.add(key=key, value=name)


def _drop_types_of_initializers(proto: onnx.GraphProto) -> None:
    """Drop the value_info that onnx-ir adds for every initializer of a subgraph; files do not have it."""
    for node in proto.node:
        for attribute in node.attribute:
            for graph in bodies(attribute):
                stored = {tensor.name for tensor in graph.initializer}
                kept = [value for value in graph.value_info if value.name not in stored]
                if len(kept) != len(graph.value_info):
                    del graph.value_info[:]
                    graph.value_info.extend(kept)
                _drop_types_of_initializers(graph)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Join adjacent bytes into one piece."""
    joined: list[Piece] = []
    run: list[bytes] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            run.append(piece)
            continue
        joined += [b"".join(run), piece]
        run = []
    return [*joined, b"".join(run)]
