"""Constant nodes and small constant expressions, evaluated in NumPy.

Arithmetic on floats is done in float64 and rounded to the operands' type, so that a standard deviation
that an exporter computes in the graph is not worse than one computed here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport.errors import MalformedModelError
from bnexport.graph.element_types import FLOAT_TYPES
from bnexport.graph.nodes import get_flag, get_int, get_ints, label, only_attributes
from bnexport.graph.refusal import Refused

# Bound on what ConstantOfShape, Expand and broadcasting may create.
ELEMENTS = 1 << 26

# Data types of raw bytes that NumPy reads as they are.
_STORED: dict[int, np.dtype] = {
    ir.DataType.FLOAT.value: np.dtype("<f4"),
    ir.DataType.DOUBLE.value: np.dtype("<f8"),
    ir.DataType.FLOAT16.value: np.dtype("<f2"),
}


def read_tensor(tensor: ir.TensorProtocol) -> np.ndarray:
    """Return the tensor's values, checked against its declared shape."""
    try:
        if isinstance(tensor, ir.serde.TensorProtoTensor):
            # What `numpy` does for these types as well, in a tenth of the time; models hold many small vectors.
            proto = tensor.raw
            stored = _STORED.get(proto.data_type)
            if stored is not None and proto.HasField("raw_data"):
                return np.frombuffer(proto.raw_data, stored).reshape(proto.dims)
        array = tensor.numpy()
    except (ValueError, TypeError, AssertionError) as error:
        raise MalformedModelError(f"tensor {tensor.name!r} cannot be read: {error}") from error
    # A tensor of the file reshapes itself; others are compared.
    if not isinstance(tensor, ir.serde.TensorProtoTensor) and array.shape != tuple(tensor.shape.numpy()):
        raise MalformedModelError(f"tensor {tensor.name!r} has {array.shape} values, its shape says {tensor.shape}")
    return array


_CONSTANTS = {
    "value": ir.AttributeType.TENSOR,
    "value_float": ir.AttributeType.FLOAT,
    "value_floats": ir.AttributeType.FLOATS,
    "value_int": ir.AttributeType.INT,
    "value_ints": ir.AttributeType.INTS,
}


def constant_node(node: ir.Node) -> np.ndarray:
    """Evaluate a Constant node of any form; each carries exactly one attribute."""
    if len(node.attributes) != 1:
        raise Refused("bad-attribute", f"{label(node)} has {len(node.attributes)} attributes, expected one")
    attribute = next(iter(node.attributes.values()))
    if attribute.is_ref():
        raise Refused("reference-attribute", f"{label(node)} is given by the function's caller")
    kind = _CONSTANTS.get(attribute.name)
    if kind is not None and attribute.type is not kind:
        raise Refused("bad-attribute", f"{label(node)}'s {attribute.name} is of another type, expected {kind.name}")
    if attribute.name == "value":
        return read_tensor(attribute.as_tensor())
    if attribute.name == "value_float":
        return np.asarray(attribute.as_float(), np.float32)
    if attribute.name == "value_floats":
        return np.asarray(attribute.as_floats(), np.float32)
    if attribute.name == "value_int":
        return np.asarray(attribute.as_int(), np.int64)
    if attribute.name == "value_ints":
        return np.asarray(attribute.as_ints(), np.int64)
    raise Refused("type", f"{label(node)} holds {attribute.name}, expected numbers")


def _same_type(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Compute in float64 for floats, and round to the operands' type."""

    def evaluate(_node: ir.Node, *operands: np.ndarray) -> np.ndarray:
        if len({operand.dtype for operand in operands}) != 1:
            raise Refused("type", "operands of different types")
        if math.prod(np.broadcast_shapes(*(operand.shape for operand in operands))) > ELEMENTS:
            raise Refused("too-large", "the result has too many elements")
        dtype = operands[0].dtype
        if dtype == np.int64 and function in (np.add, np.subtract, np.multiply):
            return np.asarray(function(*operands))
        if dtype not in FLOAT_TYPES.values():
            raise Refused("type", f"arithmetic on {dtype}")
        return np.asarray(function(*(operand.astype(np.float64) for operand in operands))).astype(dtype)

    return evaluate


def _axes(node: ir.Node, axes: np.ndarray | None) -> tuple[int, ...] | None:
    if axes is not None:
        return tuple(int(axis) for axis in axes.reshape(-1))
    return get_ints(node, "axes")


def _reshape(node: ir.Node, data: np.ndarray, shape: np.ndarray) -> np.ndarray:
    allow_zero = get_flag(node, "allowzero")
    sizes = [int(size) for size in shape]
    sizes = [data.shape[index] if size == 0 and not allow_zero else size for index, size in enumerate(sizes)]
    return data.reshape(sizes)


def _squeeze(node: ir.Node, data: np.ndarray, axes: np.ndarray | None = None) -> np.ndarray:
    return np.squeeze(data, _axes(node, axes))


def _unsqueeze(node: ir.Node, data: np.ndarray, axes: np.ndarray | None = None) -> np.ndarray:
    places = _axes(node, axes)
    if places is None:
        raise Refused("bad-attribute", "Unsqueeze without axes")
    return np.expand_dims(data, places)


def _transpose(node: ir.Node, data: np.ndarray) -> np.ndarray:
    return np.transpose(data, get_ints(node, "perm"))


def _cast(node: ir.Node, data: np.ndarray) -> np.ndarray:
    target = ir.DataType(get_int(node, "to", 0)).numpy()
    if target not in FLOAT_TYPES.values() and target.kind not in "iub":
        raise Refused("type", f"a Cast to {target}")
    return data.astype(target)


def _constant_of_shape(node: ir.Node, shape: np.ndarray) -> np.ndarray:
    attribute = node.attributes.get("value")
    fill: Any = np.zeros(1, np.float32) if attribute is None else read_tensor(attribute.as_tensor())
    sizes = tuple(int(size) for size in shape)
    if math.prod(sizes) > ELEMENTS:
        raise Refused("too-large", f"ConstantOfShape makes {math.prod(sizes)} elements")
    return np.full(sizes, fill.reshape(-1)[0], fill.dtype)


def _expand(_node: ir.Node, data: np.ndarray, shape: np.ndarray) -> np.ndarray:
    sizes = np.broadcast_shapes(data.shape, tuple(int(size) for size in shape.reshape(-1)))
    if math.prod(sizes) > ELEMENTS:
        raise Refused("too-large", f"Expand makes {math.prod(sizes)} elements")
    return np.broadcast_to(data, sizes)


def _concat(node: ir.Node, *operands: np.ndarray) -> np.ndarray:
    return np.concatenate(operands, axis=get_int(node, "axis", 0))


def _gather(node: ir.Node, data: np.ndarray, indices: np.ndarray) -> np.ndarray:
    return np.take(data, indices, axis=get_int(node, "axis", 0))


def _slice(
    node: ir.Node,
    data: np.ndarray,
    starts: np.ndarray | None = None,
    ends: np.ndarray | None = None,
    axes: np.ndarray | None = None,
    steps: np.ndarray | None = None,
) -> np.ndarray:
    given = [
        get_ints(node, name) if operand is None else tuple(int(item) for item in operand.reshape(-1))
        for name, operand in (("starts", starts), ("ends", ends), ("axes", axes), ("steps", steps))
    ]
    first, last = given[0] or (), given[1] or ()
    places, strides = given[2] or tuple(range(len(first))), given[3] or (1,) * len(first)
    index = [slice(None)] * data.ndim
    # ONNX counts and cuts off starts and ends as Python does.
    for start, end, axis, step in zip(first, last, places, strides, strict=True):
        index[axis] = slice(start, end, step)
    return data[tuple(index)]


def _dequantize(node: ir.Node, data: np.ndarray, scale: np.ndarray, zero: np.ndarray | None = None) -> np.ndarray:
    if get_int(node, "block_size", 0):
        raise Refused("quantized", "block-wise DequantizeLinear")
    axis = get_int(node, "axis", 1)
    if scale.size > 1:
        shape = [1] * data.ndim
        shape[axis] = -1
        scale = scale.reshape(shape)
        zero = None if zero is None else zero.reshape(shape)
    else:
        scale = scale.reshape(())
        zero = None if zero is None else zero.reshape(())
    centred = data.astype(np.float64) - (0.0 if zero is None else zero.astype(np.float64))
    return (centred * scale.astype(np.float64)).astype(scale.dtype)


# The reductions that exporters compute norms with: weight norm divides a weight by one.
_REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "ReduceL1": lambda data, **over: np.abs(data).sum(**over),
    "ReduceL2": lambda data, **over: np.sqrt(np.square(data).sum(**over)),
    "ReduceMax": np.max,
    "ReduceMean": np.mean,
    "ReduceMin": np.min,
    "ReduceProd": np.prod,
    "ReduceSum": np.sum,
    "ReduceSumSquare": lambda data, **over: np.square(data).sum(**over),
}
# With these a weight is computed from another one; the others change how a constant is laid out, scaled or typed.
WEIGHT_OPERATORS = frozenset((*_REDUCTIONS, "Abs", "Exp", "Log", "Max", "Min", "Pow"))


def _reduce(node: ir.Node, data: np.ndarray, axes: np.ndarray | None = None) -> np.ndarray:
    """Compute in float64, and round to the operand's type. No axes stand for all."""
    if data.dtype not in FLOAT_TYPES.values():
        raise Refused("type", f"a sum of {data.dtype}")
    places = _axes(node, axes) or None
    if places is None and get_flag(node, "noop_with_empty_axes"):
        raise Refused("bad-attribute", f"{node.op_type} over no axes")
    keep = get_flag(node, "keepdims", True)
    return np.asarray(_REDUCTIONS[node.op_type](data.astype(np.float64), axis=places, keepdims=keep)).astype(data.dtype)


_POWER = _same_type(np.power)


def _pow(node: ir.Node, base: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    # The exponent may have another type; the result has that of the base.
    return _POWER(node, base, exponent.astype(base.dtype))


def _flatten(node: ir.Node, data: np.ndarray) -> np.ndarray:
    axis = get_int(node, "axis", 1)
    place = axis + data.ndim if axis < 0 else axis
    return data.reshape(math.prod(data.shape[:place]), math.prod(data.shape[place:]))


def _of_all(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Apply a function of two operands to any number of them."""
    return _same_type(lambda *operands: functools.reduce(function, operands))


def _strict(function: Callable[..., np.ndarray], *attributes: str) -> Callable[..., np.ndarray]:
    """Refuse attributes other than these, which `function` reads or which say nothing about the value."""

    def evaluate(node: ir.Node, *operands: np.ndarray | None) -> np.ndarray:
        only_attributes(node, attributes)
        return function(node, *operands)

    return evaluate


EVALUATORS: dict[str, Callable[..., np.ndarray]] = {
    "Abs": _strict(_same_type(np.abs)),
    "Add": _strict(_same_type(np.add)),
    "Sub": _strict(_same_type(np.subtract)),
    "Mul": _strict(_same_type(np.multiply)),
    "Div": _strict(_same_type(np.divide)),
    "Exp": _strict(_same_type(np.exp)),
    "Log": _strict(_same_type(np.log)),
    "Max": _strict(_of_all(np.maximum)),
    "Min": _strict(_of_all(np.minimum)),
    "Neg": _strict(_same_type(np.negative)),
    "Pow": _strict(_pow),
    "Reciprocal": _strict(_same_type(np.reciprocal)),
    "Sqrt": _strict(_same_type(np.sqrt)),
    "Sum": _strict(_of_all(np.add)),
    "Identity": _strict(lambda _node, data: data),
    "Cast": _strict(_cast, "to", "saturate", "round_mode"),
    "Concat": _strict(_concat, "axis"),
    "Expand": _strict(_expand),
    "Flatten": _strict(_flatten, "axis"),
    "Gather": _strict(_gather, "axis"),
    "ConstantOfShape": _strict(_constant_of_shape, "value"),
    "DequantizeLinear": _strict(_dequantize, "axis", "block_size"),
    "Reshape": _strict(_reshape, "allowzero"),
    "Slice": _strict(_slice, "starts", "ends", "axes", "steps"),
    "Squeeze": _strict(_squeeze, "axes"),
    "Transpose": _strict(_transpose, "perm"),
    "Unsqueeze": _strict(_unsqueeze, "axes"),
    **dict.fromkeys(_REDUCTIONS, _strict(_reduce, "axes", "keepdims", "noop_with_empty_axes")),
}
