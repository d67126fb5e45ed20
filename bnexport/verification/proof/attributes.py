"""Compare nodes: their attributes, and the numbers of their outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport.errors import MalformedModelError, UnsupportedModelError
from bnexport.graph.evaluate import FLAGS
from bnexport.model_io import ContainedTensor

# Read stored tensors in blocks, so that a comparison holds a few megabytes at a time.

# Elements of one block: it stays in the second-level cache.
BLOCK = 1 << 17


class TensorRows(contextlib.AbstractContextManager["TensorRows"]):
    """A tensor seen as (rows, row), read from the first row to the last."""

    def __init__(self, tensor: ir.TensorProtocol, rows: int) -> None:
        self._stack = contextlib.ExitStack()
        self._file: Any = None
        self._position = 0
        if isinstance(tensor, ContainedTensor) and tensor.dtype.bitwidth >= 8:
            self._file = self._stack.enter_context(tensor.file.open())
            self._file.seek(tensor.offset or 0)
            self._dtype = tensor.dtype.numpy().newbyteorder("<")
            self._row = tensor.size // rows if rows else 0
            self._buffer = np.empty(0, self._dtype)
        else:
            self._array = tensor.numpy().reshape(rows, -1) if tensor.size else np.zeros((rows, 0))

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def next(self, count: int) -> np.ndarray:
        """Return the next `count` rows, valid until the next call."""
        if self._file is None:
            self._position += count
            return self._array[self._position - count : self._position]
        if self._buffer.size != count * self._row:
            self._buffer = np.empty(count * self._row, self._dtype)
        left = self._buffer.view(np.uint8).data
        while len(left):
            got = self._file.readinto(left)
            if not got:
                raise MalformedModelError(f"a data file ends {len(left)} bytes too early; it changed while it was read")
            left = left[got:]
        return self._buffer.reshape(count, self._row)


def same_tensor(first: ir.TensorProtocol, second: ir.TensorProtocol) -> bool:
    """Equal type, shape and bytes."""
    if first is second:
        return True
    if first.dtype != second.dtype or first.shape.numpy() != second.shape.numpy():
        return False
    if _same_place(first, second):
        return True
    if first.dtype is ir.DataType.STRING:
        return bool(np.array_equal(first.numpy(), second.numpy()))
    if first.dtype.bitwidth < 8:
        return bool(first.tobytes() == second.tobytes())
    size = first.size
    if size == 0:
        return True
    with TensorRows(first, size) as one, TensorRows(second, size) as two:
        for count in pieces(size, 1):
            mine, other = one.next(count), two.next(count)
            unsigned = f"u{mine.dtype.itemsize}"
            if mine.dtype.itemsize > 8:
                if mine.tobytes() != other.tobytes():
                    return False
            elif not np.array_equal(
                np.ascontiguousarray(mine).reshape(-1).view(unsigned),
                np.ascontiguousarray(other).reshape(-1).view(unsigned),
            ):
                return False
    return True


def pieces(rows: int, row: int) -> Iterator[int]:
    """Yield how many rows to read at a time."""
    step = max(1, BLOCK // max(row, 1))
    for start in range(0, rows, step):
        yield min(step, rows - start)


def _same_place(first: ir.TensorProtocol, second: ir.TensorProtocol) -> bool:
    return (
        isinstance(first, ContainedTensor)
        and isinstance(second, ContainedTensor)
        and first.file == second.file
        and first.offset == second.offset
    )


def same_attribute(first: ir.Attr, second: ir.Attr) -> bool:
    """Equal type and value."""
    if first.type is not second.type or first.is_ref() != second.is_ref():
        return False
    if first.is_ref():
        return first.ref_attr_name == second.ref_attr_name
    one, two = first.value, second.value
    if first.type is ir.AttributeType.TENSOR:
        return same_tensor(one, two)
    if first.type is ir.AttributeType.TENSORS:
        return len(one) == len(two) and all(map(same_tensor, one, two))
    if isinstance(one, float) and isinstance(two, float):
        return one == two or (math.isnan(one) and math.isnan(two))
    return bool(one == two)


# Operators whose schemas describe these defaults in words alone: 1 and 0 along each axis.
_WINDOWED = ("Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "AveragePool", "MaxPool", "LpPool")
_ONES, _ZEROS = ("strides", "dilations"), ("pads", "output_padding")


def is_default(
    node: ir.Node, attribute: ir.Attr, version: int, *, kernel: Sequence[int] | None = None, trains: bool = True
) -> bool:
    """Whether an absent attribute would mean the same.

    version: of the opset. kernel: the size of the node's, where it is known. trains: False for a BatchNormalization in
    inference, which has nothing to average.
    """
    if attribute.is_ref() or node.domain != "":
        return False
    name, value = attribute.name, attribute.value
    if node.op_type in _WINDOWED and name in _ONES:
        return all(size == 1 for size in value)
    if node.op_type in _WINDOWED and name in _ZEROS:
        return not any(value)
    if name == "kernel_shape" and node.op_type in ("Conv", "ConvTranspose"):
        return kernel is not None and tuple(value) == tuple(kernel)
    if (node.op_type, name) == ("BatchNormalization", "momentum") and not trains:
        return True
    return _schema_default(node.op_type, version, name, value)


def outputs_count(node: ir.Node, version: int) -> int:
    """Return the number of outputs; 0 where the schema calls all but the first ones optional, whose absence changes nothing.

    The number is part of what a Split does, of what an older BatchNormalization means, and of an unknown operator.
    """
    if len(node.outputs) == 1:
        return 1
    signature = _signature(node.op_type, version) if node.domain == "" else None
    present = max((index + 1 for index, value in enumerate(node.outputs) if value.name), default=0)
    if signature is None or node.op_type == "BatchNormalization" or present > signature.outputs:
        return present
    return max(signature.required, 1) if signature.optional else present


@dataclasses.dataclass(frozen=True)
class _Signature:
    """What a schema says of an operator. least, most: inputs. kinds: ONNX's numbers of attribute types.

    required, outputs: least and most outputs. optional: whether those beyond `required` are one by one, none variadic.
    """

    least: int
    most: int
    kinds: dict[str, int]
    required: int
    outputs: int
    optional: bool


@functools.cache
def _signature(operator: str, version: int) -> _Signature | None:
    found = schema(operator, version)
    if found is None:
        return None
    kinds = {name: attribute.type.value for name, attribute in found.attributes.items()}
    import onnx

    option = onnx.defs.OpSchema.FormalParameterOption.Optional
    optional = all(output.option == option for output in found.outputs[found.min_output :])
    return _Signature(
        found.min_input, found.max_input, kinds, found.min_output, found.max_output, optional and not _variadic(found)
    )


def _variadic(found: Any) -> bool:
    import onnx

    return any(output.option == onnx.defs.OpSchema.FormalParameterOption.Variadic for output in found.outputs)


def check_node(node: ir.Node, version: int) -> None:
    """Raise UnsupportedModelError where a node of the standard is not as its schema says, or belongs to its function's caller."""
    signature = _signature(node.op_type, version)
    if signature is None or not signature.least <= len(node.inputs) <= signature.most:
        raise UnsupportedModelError(f"{node.op_type} with {len(node.inputs)} inputs, of opset {version}")
    if any(value is None or not value.name for value in node.inputs[: signature.least]):
        raise UnsupportedModelError(f"{node.op_type} without an input that it needs")
    for name, attribute in node.attributes.items():
        if attribute.is_ref() or attribute.type.value != signature.kinds.get(name):
            raise UnsupportedModelError(f"{node.op_type} with an attribute {name!r} that its schema does not have")
        if name in FLAGS and attribute.value not in (0, 1):
            raise UnsupportedModelError(f"{node.op_type} with {name}={attribute.value}, which is neither 0 nor 1")


def schema(operator: str, version: int) -> Any:
    """Return the schema of an operator of the standard, or None."""
    import onnx

    try:
        return onnx.defs.get_schema(operator, version)
    except onnx.defs.SchemaError:
        return None


def _schema_default(operator: str, version: int, name: str, value: object) -> bool:
    import onnx

    known = schema(operator, version)
    declared = None if known is None else known.attributes.get(name)
    if declared is None or not declared.default_value.name:
        return False
    default = onnx.helper.get_attribute_value(declared.default_value)
    if isinstance(default, bytes):
        default = default.decode()
    if isinstance(default, float):
        return isinstance(value, float) and np.float32(default) == np.float32(value)
    return bool(default == value)
