"""Constant values: initializers and constant expressions (`evaluate.rounded`).

Initializers that a caller may override (listed as inputs, IR version 4 and up) are not constants;
before IR 4 every initializer had to be listed and they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from bnexport.graph.evaluate import NotEvaluated, constant_tensor, read_tensor, rounded
from bnexport.graph.nodes import (
    FLOAT_TYPES,
    Refused,
    get_int,
    get_ints,
    input_at,
    is_standard,
    label,
    only_attributes,
    opsets,
)
from bnexport.graph.shapes import Shapes

# Bound on the elements that a constant is made of.
ELEMENTS = 1 << 26
# A longer chain of constant nodes than any exporter writes; a bound for hostile files.
_DEPTH = 32
_WAY_OUT = " (fixed_initializers=True, --fixed-initializers where none does)"
# Longer than any list of axes, pads or parts.
_INTEGERS = 1 << 12
_FLOATS = frozenset(FLOAT_TYPES.values())
# With these a weight is computed from another one; the others change how a constant is laid out, scaled or typed.
WEIGHT_OPERATORS = frozenset(
    (
        *("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"),
        *("Abs", "Exp", "Log", "Max", "Min", "Pow"),
    )
)
# Operators through which a parameter is followed.
EXPRESSIONS = WEIGHT_OPERATORS.union(
    (
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Neg",
        "Reciprocal",
        "Sqrt",
        "Sum",
        "Identity",
        "Cast",
        "CastLike",
        "Concat",
        "Expand",
    ),
    (
        "Flatten",
        "Gather",
        "ConstantOfShape",
        "DequantizeLinear",
        "QuantizeLinear",
        "Reshape",
        "Slice",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    ),
)


class Described(NamedTuple):
    """Shape and type of a constant, without its data."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Constants:
    """Constant values of one model, evaluated on demand."""

    def __init__(self, model: ir.Model, shapes: Shapes) -> None:
        self._model = model
        self._shapes = shapes
        self._opsets: dict[ir.Graph, int] = {}
        # A constant expression may share operands many times over; each is looked at once.
        self._fixed: set[ir.Value] = set()
        self._evaluated: dict[ir.Value, np.ndarray] = {}

    def array(self, value: ir.Value | None, what: str) -> np.ndarray:
        """Return the value in its own type. Raise Refused if it is not constant."""
        if value is None:
            raise Refused("missing", f"the {what} is missing")
        return self._array(value, what, _DEPTH)

    def tensor(self, value: ir.Value | None, what: str) -> ir.TensorProtocol:
        """Return the value as a tensor. Data in files is not read."""
        if value is not None:
            tensor = self.stored(value, what)
            if tensor is not None:
                return tensor
        return ir.Tensor(self.array(value, what))

    def describe(self, value: ir.Value | None, what: str) -> Described:
        """Return shape and type of a constant. Initializers are not read."""
        if value is None:
            raise Refused("missing", f"the {what} is missing")
        tensor = self.stored(value, what)
        if tensor is not None:
            # Avoids the Shape object that a tensor of the file creates on each access.
            raw = tensor.raw.dims if isinstance(tensor, ir.serde.TensorProtoTensor) else tensor.shape.numpy()
            return Described(tuple(raw), tensor.dtype.numpy())
        array = self._array(value, what, _DEPTH)
        return Described(array.shape, array.dtype)

    def floats(self, value: ir.Value | None, what: str) -> np.ndarray:
        """Return the value as float64. Raise Refused if it is not constant or not a float tensor."""
        array = self.array(value, what)
        if array.dtype not in _FLOATS:
            raise Refused("type", f"the {what} has type {array.dtype}, expected a float type")
        return array.astype(np.float64)

    def ints(self, value: ir.Value | None, what: str) -> tuple[int, ...]:
        """Return a small integer tensor, flattened."""
        array = self.array(value, what)
        if array.dtype.kind not in "iu" or array.size > _INTEGERS:
            raise Refused("type", f"the {what} is not a short list of integers")
        return tuple(int(item) for item in array.reshape(-1))

    def axes(self, node: ir.Node, since: int) -> tuple[int, ...] | None:
        """Return the axes of a node: an attribute before opset `since`, an input from there on. None without the attribute."""
        if self._opset(node) >= since:
            return self.ints(input_at(node, 1), f"axes of {label(node)}")
        return get_ints(node, "axes")

    def is_constant(self, value: ir.Value | None) -> bool:
        try:
            self.check(value, "value")
        except Refused:
            return False
        return True

    def check(self, value: ir.Value | None, what: str, depth: int = _DEPTH) -> None:
        """Raise Refused for a value that is not constant, without computing it."""
        if value is None:
            raise Refused("missing", f"the {what} is missing")
        if value in self._fixed or self.stored(value, what) is not None:
            return
        node = value.producer()
        if node is None:
            raise Refused("not-constant", f"the {what} {value.name!r} is an input")
        if depth == 0:
            raise Refused("not-constant", f"the {what} {value.name!r} is computed in more than {_DEPTH} steps")
        if is_standard(node, "Shape"):
            self._shape_of(node)
        elif not is_standard(node, "Constant", *EXPRESSIONS):
            raise Refused("not-constant", f"the {what} {value.name!r} is computed by {label(node)}")
        else:
            for operand in _operands(node):
                if operand is not None:
                    self.check(operand, _operand(what), depth - 1)
        self._fixed.add(value)

    def _shape_of(self, node: ir.Node) -> np.ndarray:
        """Return the shape, if the requested sizes are known numbers."""
        only_attributes(node, ("start", "end"))
        shape = self._shapes.of(node.inputs[0]) if node.inputs and node.inputs[0] is not None else None
        if shape is None:
            raise Refused("not-constant", f"{label(node)} reads a shape that is not known")
        end = get_int(node, "end", len(shape))
        sizes = shape[slice(get_int(node, "start", 0), end)]
        numbers = [size for size in sizes if isinstance(size, int)]
        if len(numbers) != len(sizes):
            raise Refused("not-constant", f"{label(node)} reads a size that is free")
        return np.asarray(numbers, np.int64)

    def stored(self, value: ir.Value, what: str) -> ir.TensorProtocol | None:
        """Return the initializer of a value, or None for any other kind of value."""
        if value.is_initializer():
            # The inputs of a body are given by its If, Loop or Scan in every version.
            if value.is_graph_input() and (self._model.ir_version >= 4 or value.graph is not self._model.graph):
                raise Refused(
                    "overridable", f"the {what} {value.name!r} is a graph input: a caller may override it{_WAY_OUT}"
                )
            return value.const_value
        return None

    def _array(self, value: ir.Value, what: str, depth: int) -> np.ndarray:
        tensor = self.stored(value, what)
        if tensor is not None:
            return read_tensor(tensor)
        self.check(value, what, depth)
        node = value.producer()
        assert node is not None
        if node.op_type == "Constant":
            return read_tensor(constant_tensor(node))
        if value in self._evaluated:
            return self._evaluated[value]
        if node.op_type == "Shape":
            return self._shape_of(node)
        operands = [
            None if operand is None else self._array(operand, _operand(what), depth - 1) for operand in _operands(node)
        ]
        if node.op_type == "CastLike":
            operands.append(self._example(node))
        if sum(operand.size for operand in operands if operand is not None) > ELEMENTS:
            raise Refused("too-large", f"the {what} is computed from too many elements to evaluate here")
        try:
            self._evaluated[value] = rounded(node, operands, self._opset(node))[value.index() or 0]
        except NotEvaluated as error:
            raise Refused(error.code, f"the {what} cannot be evaluated at {label(node)}: {error}") from error
        return self._evaluated[value]

    def _example(self, node: ir.Node) -> np.ndarray:
        """Return an array of the type that a CastLike casts to."""
        like = node.inputs[1] if len(node.inputs) == 2 else None
        dtype = None if like is None else self._shapes.dtype(like)
        if dtype is None or dtype.numpy() not in _FLOATS:
            raise Refused("type", f"{label(node)} casts to a type that is not known or no float type")
        return np.zeros(0, dtype.numpy())

    def _opset(self, node: ir.Node) -> int:
        assert node.graph is not None
        if not self._opsets.get(node.graph):  # graphs come in, and so do imports
            self._opsets = opsets(self._model)
        return self._opsets.get(node.graph, 0)


def _operands(node: ir.Node) -> Sequence[ir.Value | None]:
    """Return the inputs whose values matter: CastLike uses only the type of its second input."""
    return node.inputs[:1] if node.op_type == "CastLike" else node.inputs


def _operand(what: str) -> str:
    return what if what.endswith("operand") else f"{what}'s operand"
