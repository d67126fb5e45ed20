"""A model in two parts for ONNX Runtime: one serialised message, and large weights by name.

The engine sees no file name, so what it reads is what was checked when the model was loaded.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from bnexport.errors import UnsupportedModelError
from bnexport.model_io import walk
from bnexport.model_io.encode import encode, replaced, size
from bnexport.model_io.external import ContainedTensor
from bnexport.model_io.write import PROTOBUF_LIMIT

# Smaller tensors travel inside the message.
_SMALLEST = 1 << 16
# Types that NumPy has of its own: engines take them as arrays.
_NATIVE = frozenset(
    (
        *(ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BOOL),
        *(ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64),
        *(ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64),
    )
)


@dataclasses.dataclass(frozen=True)
class Parts:
    """data: the serialised model. weights: initializers that its graph declares but does not hold."""

    data: bytes
    weights: dict[str, ir.TensorProtocol]


def to_parts(model: ir.Model) -> Parts:
    """Split the large initializers off the main graph; `model` is unchanged and nothing large is read.

    Raises UnsupportedModelError where the rest exceeds one message of protobuf.
    """
    weights: dict[str, ir.TensorProtocol] = {}
    marks: list[tuple[walk.TensorSlot, ir.TensorProtocol]] = []
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.dtype not in _NATIVE or value.is_graph_input():
            continue
        # ONNX Runtime drops what nothing reads from its graph, and misses it there if it is given.
        if not value.uses() and not value.is_graph_output():
            continue
        if isinstance(tensor, ContainedTensor) or size(tensor) >= _SMALLEST:
            name = str(value.name)
            weights[name] = tensor
            mark = ir.ExternalTensor(
                "given", 0, size(tensor), tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name
            )
            marks.append((walk.InitializerSlot(value), mark))
    with replaced(marks):
        encoded = encode(model, given=True)
    if encoded.model_size > PROTOBUF_LIMIT:
        raise UnsupportedModelError(
            f"the graph has {encoded.model_size} bytes without its weights, protobuf ends at 2 GiB"
        )
    pieces = (piece if isinstance(piece, bytes) else piece.tobytes() for piece in encoded.model)
    return Parts(b"".join(pieces), weights)
