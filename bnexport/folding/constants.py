"""What a value is worth, when that is fixed by the model alone.

Initializers that a caller may override (listed as inputs, IR version 4 and up) are not constants;
before IR 4 every initializer had to be listed and they are. Constant expressions over small tensors
(Cast, Reshape, Mul, Sqrt, ...) are evaluated in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from bnexport.errors import MalformedModelError
from bnexport.folding.affine import FLOAT_TYPES
from bnexport.folding.nodes import get_int, get_ints, is_standard, label, only_attributes
from bnexport.folding.refusal import Refused

# A longer chain of constant nodes than any exporter writes; a bound for hostile files.
_DEPTH = 32
# Bound on what ConstantOfShape and broadcasting may create.
_ELEMENTS = 1 << 26


class Described(NamedTuple):
    """A constant without its data."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Constants:
    """Resolves values of one model. `ir_version` decides whether an initializer can be overridden."""

    def __init__(self, ir_version: int) -> None:
        self._ir_version = ir_version
        # A constant expression may share operands many times over; each is looked at once.
        self._fixed: set[ir.Value] = set()
        self._evaluated: dict[ir.Value, np.ndarray] = {}

    def array(self, value: ir.Value | None, what: str) -> np.ndarray:
        """The value in its own type; Refused where it is not fixed."""
        if value is None:
            raise Refused("missing", f"the {what} is missing")
        return self._array(value, what, _DEPTH)

    def describe(self, value: ir.Value | None, what: str) -> Described:
        """Shape and type of a constant; an initializer is not read."""
        if value is None:
            raise Refused("missing", f"the {what} is missing")
        self.check(value, what)
        tensor = self.stored(value, what)
        if tensor is not None:
            return Described(tuple(tensor.shape.numpy()), tensor.dtype.numpy())
        array = self._array(value, what, _DEPTH)
        return Described(array.shape, array.dtype)

    def floats(self, value: ir.Value | None, what: str) -> np.ndarray:
        """The value as float64; Refused where it is not fixed or not a float tensor."""
        array = self.array(value, what)
        if array.dtype not in FLOAT_TYPES.values():
            raise Refused("type", f"the {what} has type {array.dtype}, expected a float type")
        return array.astype(np.float64)

    def ints(self, value: ir.Value | None, what: str) -> tuple[int, ...]:
        """A small integer tensor, flattened."""
        array = self.array(value, what)
        if array.dtype.kind not in "iu" or array.size > 64:
            raise Refused("type", f"the {what} is not a short list of integers")
        return tuple(int(item) for item in array.reshape(-1))

    def is_constant(self, value: ir.Value | None) -> bool:
        try:
            self.check(value, "value")
        except Refused:
            return False
        return True

    def check(self, value: ir.Value | None, what: str, depth: int = _DEPTH) -> None:
        """Refuses a value that is not fixed, without computing it."""
        if value is None:
            raise Refused("missing", f"the {what} is missing")
        if value in self._fixed or self.stored(value, what) is not None:
            return
        node = value.producer()
        if node is None or depth == 0:
            raise Refused("not-constant", f"the {what} {value.name!r} is computed when the model runs")
        if not is_standard(node, "Constant", *_EVALUATORS):
            raise Refused("not-constant", f"the {what} {value.name!r} is computed by {label(node)}")
        for operand in node.inputs:
            if operand is not None:
                self.check(operand, _operand(what), depth - 1)
        self._fixed.add(value)

    def stored(self, value: ir.Value, what: str) -> ir.TensorProtocol | None:
        """The initializer behind a value, None for another kind of value."""
        if value.is_initializer():
            if value.is_graph_input() and self._ir_version >= 4:
                raise Refused("overridable", f"the {what} {value.name!r} is a graph input: a caller may override it")
            return value.const_value
        if value.is_graph_input() or value.producer() is None:
            raise Refused("not-constant", f"the {what} {value.name!r} is an input")
        return None

    def _array(self, value: ir.Value, what: str, depth: int) -> np.ndarray:
        self.check(value, what, depth)
        tensor = self.stored(value, what)
        if tensor is not None:
            return read_tensor(tensor)
        node = value.producer()
        assert node is not None
        if node.op_type == "Constant":
            return _constant_node(node)
        if value in self._evaluated:
            return self._evaluated[value]
        operands = [
            None if operand is None else self._array(operand, _operand(what), depth - 1) for operand in node.inputs
        ]
        if sum(operand.size for operand in operands if operand is not None) > _ELEMENTS:
            raise Refused("too-large", f"the {what} is computed from too many elements to evaluate here")
        try:
            with np.errstate(all="ignore"):
                result = _EVALUATORS[node.op_type](node, *operands)
        except Refused:
            raise
        except Exception as error:
            raise Refused("not-constant", f"the {what} cannot be evaluated at {label(node)}: {error}") from error
        self._evaluated[value] = np.asarray(result)
        return self._evaluated[value]


def _operand(what: str) -> str:
    return what if what.endswith("operand") else f"{what}'s operand"


def read_tensor(tensor: ir.TensorProtocol) -> np.ndarray:
    """The tensor's values, checked against its declared shape."""
    try:
        array = tensor.numpy()
    except (ValueError, TypeError, AssertionError) as error:
        raise MalformedModelError(f"tensor {tensor.name!r} cannot be read: {error}") from error
    # A tensor of the file reshapes itself; others are compared.
    if not isinstance(tensor, ir.serde.TensorProtoTensor) and array.shape != tuple(tensor.shape.numpy()):
        raise MalformedModelError(f"tensor {tensor.name!r} has {array.shape} values, its shape says {tensor.shape}")
    return array


def _constant_node(node: ir.Node) -> np.ndarray:
    """A Constant node of any form; each carries exactly one attribute."""
    if len(node.attributes) != 1:
        raise Refused("bad-attribute", f"{label(node)} has {len(node.attributes)} attributes, expected one")
    attribute = next(iter(node.attributes.values()))
    if attribute.is_ref():
        raise Refused("reference-attribute", f"{label(node)} is given by the function's caller")
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
    """Arithmetic on floats in float64, rounded to the operands' type."""

    def evaluate(node: ir.Node, *operands: np.ndarray) -> np.ndarray:
        only_attributes(node, ())
        if len({operand.dtype for operand in operands}) != 1:
            raise Refused("type", "operands of different types")
        if math.prod(np.broadcast_shapes(*(operand.shape for operand in operands))) > _ELEMENTS:
            raise Refused("too-large", "the result has too many elements")
        dtype = operands[0].dtype
        if dtype not in FLOAT_TYPES.values():
            raise Refused("type", f"arithmetic on {dtype}")
        return np.asarray(function(*(operand.astype(np.float64) for operand in operands))).astype(dtype)

    return evaluate


def _axes(node: ir.Node, axes: np.ndarray | None) -> tuple[int, ...] | None:
    if axes is not None:
        return tuple(int(axis) for axis in axes.reshape(-1))
    return get_ints(node, "axes")


def _reshape(node: ir.Node, data: np.ndarray, shape: np.ndarray) -> np.ndarray:
    allow_zero = get_int(node, "allowzero", 0)
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
    if target not in FLOAT_TYPES.values() and target.kind not in "iu":
        raise Refused("type", f"a Cast to {target}")
    return data.astype(target)


def _constant_of_shape(node: ir.Node, shape: np.ndarray) -> np.ndarray:
    attribute = node.attributes.get("value")
    fill: Any = np.zeros(1, np.float32) if attribute is None else read_tensor(attribute.as_tensor())
    sizes = tuple(int(size) for size in shape)
    if math.prod(sizes) > _ELEMENTS:
        raise Refused("too-large", f"ConstantOfShape makes {math.prod(sizes)} elements")
    return np.full(sizes, fill.reshape(-1)[0], fill.dtype)


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


_EVALUATORS: dict[str, Callable[..., np.ndarray]] = {
    "Add": _same_type(np.add),
    "Sub": _same_type(np.subtract),
    "Mul": _same_type(np.multiply),
    "Div": _same_type(np.divide),
    "Sqrt": _same_type(np.sqrt),
    "Neg": _same_type(np.negative),
    "Reciprocal": _same_type(np.reciprocal),
    "Identity": lambda _node, data: data,
    "Cast": _cast,
    "ConstantOfShape": _constant_of_shape,
    "DequantizeLinear": _dequantize,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
