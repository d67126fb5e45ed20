"""Constant values of one model: stored tensors and expressions of them, evaluated when they are needed.

Arithmetic of floats is done in float64, as if it were exact; a Cast rounds to its type, as the graph declares. How far an
engine may be from that is measured by evaluating everything in its declared type.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport.errors import UnsupportedModelError
from bnexport.model_io import walk
from bnexport.verification.local.reference import evaluate

# Elements that an operator may make of constants.
_LARGEST = 1 << 27
# Two of them, or two runs of one, may give two values.
RANDOM = frozenset(
    ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli")
)
_FLOATS = frozenset((ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE))


class ConstantValues:
    """Which values of a model are constant, and their numbers."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._leaves: dict[ir.Value, ir.TensorProtocol] = {}
        self._computed: set[ir.Value] = set()
        # Expressions in float64, and in the types that the model gives them.
        self._arrays: dict[ir.Value, np.ndarray] = {}
        self._narrow: dict[ir.Value, np.ndarray] = {}
        self._overridable = model.ir_version >= 4
        self._versions: dict[ir.Graph, int] = {}
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            self._read(graph, graph.opset_imports.get("", graph.opset_imports.get("ai.onnx", 0)))

    def _read(self, graph: ir.Graph, version: int) -> None:
        self._versions[graph] = version
        given = set(graph.inputs) if self._overridable else set()
        for value in graph.initializers.values():
            if value.const_value is not None and value not in given:
                self._leaves[value] = value.const_value
        for node in graph:
            bodies = walk.node_bodies(node)
            for body in bodies:
                self._read(body, version)
            if node.domain == "" and not bodies:
                self._read_node(node)

    def _read_node(self, node: ir.Node) -> None:
        if any(attribute.is_ref() for attribute in node.attributes.values()):
            return
        if node.op_type == "Constant":
            tensor = _stored(node)
            if tensor is not None:
                self._leaves[node.outputs[0]] = tensor
            return
        if not node.inputs or node.op_type in RANDOM or node.op_type == "Dropout":
            return
        if node.op_identifier() not in self._model.functions and all(
            value is None or self.has(value) for value in node.inputs
        ):
            self._computed.update(node.outputs)

    def has(self, value: ir.Value) -> bool:
        """Whether the value is the same for all inputs of the model."""
        return value in self._leaves or value in self._computed

    def version(self, node: ir.Node) -> int:
        """Return the opset that the node is of."""
        return self._versions[node.graph] if node.graph is not None else 0

    def leaf(self, value: ir.Value) -> ir.TensorProtocol | None:
        """Return the stored tensor; None for an expression."""
        return self._leaves.get(value)

    def array(self, value: ir.Value) -> np.ndarray:
        """Return the numbers: floats in float64, others in their type. Raises UnsupportedModelError."""
        leaf = self._leaves.get(value)
        if leaf is not None:
            return widened(leaf.numpy())
        if value not in self._arrays:
            self._evaluate(value, self._arrays, wide=True)
        return self._arrays[value]

    def error(self, value: ir.Value) -> np.ndarray | None:
        """Return how far an engine may be from `array`: it computes an expression in the type of its parts."""
        if value in self._leaves or self.array(value).dtype != np.float64:
            return None
        exact, narrow = self.array(value), widened(self.own(value))
        if np.array_equal(exact, narrow, equal_nan=True):
            return None
        if not np.array_equal(np.isfinite(exact), np.isfinite(narrow)):
            raise UnsupportedModelError(f"the constant {value.name!r} overflows in its type")
        u, half = self.roundoff(value)
        with np.errstate(invalid="ignore"):
            difference = np.where(exact == narrow, 0.0, np.abs(narrow - exact))
        return np.asarray(2 * difference + u * np.abs(exact) + half)

    def dtype(self, value: ir.Value) -> ir.DataType:
        """Return the type that the graph gives a constant."""
        leaf = self._leaves.get(value)
        return leaf.dtype if leaf is not None else ir.DataType.from_numpy(self.own(value).dtype)

    def own(self, value: ir.Value) -> np.ndarray:
        """Return the numbers of an expression in the type that the graph gives it."""
        if value not in self._narrow:
            self._evaluate(value, self._narrow, wide=False)
        return self._narrow[value]

    def _evaluate(self, wanted: ir.Value, arrays: dict[ir.Value, np.ndarray], *, wide: bool) -> None:
        def operand(value: ir.Value) -> np.ndarray:
            leaf = self._leaves.get(value)
            if leaf is None:
                return arrays[value]
            return widened(leaf.numpy()) if wide else leaf.numpy()

        pending = [wanted]
        while pending:
            value = pending[-1]
            node = value.producer()
            if node is None:
                raise UnsupportedModelError(f"the constant {value.name!r} has no numbers")
            missing = [
                each for each in node.inputs if each is not None and each not in self._leaves and each not in arrays
            ]
            if missing:
                pending += missing
                continue
            inputs = [None if each is None else operand(each) for each in node.inputs]
            _refuse_large(node, inputs)
            if node.op_type in ("Cast", "CastLike") and node.domain == "":
                results = [self._cast(node, inputs[0])]
            else:
                results = evaluate(node, inputs, self.version(node))
            for output, result in zip(node.outputs, results, strict=False):
                # An operator may give float32 by itself, as ConstantOfShape does.
                arrays[output] = widened(np.asarray(result)) if wide else np.asarray(result)
            pending.pop()

    def _cast(self, node: ir.Node, data: np.ndarray | None) -> np.ndarray:
        """Round to the type that the graph declares."""
        if data is None:
            raise UnsupportedModelError(f"{node.op_type} without an input")
        if node.op_type == "CastLike":
            like = node.inputs[1] if len(node.inputs) > 1 else None
            target = None if like is None else self.dtype(like)
        else:
            target = ir.DataType(node.attributes["to"].as_int()) if "to" in node.attributes else None
        if target is None or target is ir.DataType.STRING or target.bitwidth < 8:
            raise UnsupportedModelError(f"{node.op_type} to {target} is not evaluated here")
        with np.errstate(all="ignore"):
            return data.astype(target.numpy())

    def roundoff(self, value: ir.Value) -> tuple[float, float]:
        """Unit roundoff and half the smallest positive number of the float types that the value is stored in."""
        types = {leaf.dtype for leaf in self._stored_under(value) if leaf.dtype in _FLOATS}
        limits = [ROUNDING[kind] for kind in types]
        return max((u for u, _ in limits), default=0.0), max((s for _, s in limits), default=0.0)

    def _stored_under(self, value: ir.Value) -> Iterable[ir.TensorProtocol]:
        seen, pending = set(), [value]
        while pending:
            each = pending.pop()
            if each in seen:
                continue
            seen.add(each)
            leaf = self._leaves.get(each)
            if leaf is not None:
                yield leaf
                continue
            node = each.producer()
            pending += [operand for operand in (node.inputs if node is not None else ()) if operand is not None]


# Unit roundoff, and half the smallest subnormal number.
ROUNDING = {
    ir.DataType.FLOAT16: (2.0**-11, 2.0**-25),
    ir.DataType.BFLOAT16: (2.0**-8, 2.0**-134),
    ir.DataType.FLOAT: (2.0**-24, 2.0**-150),
    ir.DataType.DOUBLE: (2.0**-53, 0.0),
}


def _refuse_large(node: ir.Node, inputs: list[np.ndarray | None]) -> None:
    """Raise UnsupportedModelError before an operator makes far more of its inputs than they are."""
    present = [each for each in inputs if each is not None]
    kind, size = node.op_type, 0.0
    if kind == "Range" and len(present) == 3:
        start, limit, delta = (float(each) for each in present)
        size = abs((limit - start) / delta) if delta else 0.0
    elif kind in ("ConstantOfShape", "Expand", "Tile", "Pad", "Resize", "Upsample", "OneHot"):
        # What the numbers ask for, in the worst order: a product of sizes, times, factors or margins.
        sizes = [
            1.0 + abs(float(number))
            for each in present[kind != "ConstantOfShape" :]
            for number in each.reshape(-1)[:16]
        ]
        own = 1.0 if kind == "ConstantOfShape" else float(present[0].size)
        size = own * math.prod(sizes)
    elif kind in ("MatMul", "Gemm"):
        size = float(math.prod(each.size / max(each.shape[-1:] or (1,)) for each in present[:2]))
    elif kind != "Concat" and len(present) > 1:
        with contextlib.suppress(ValueError):  # no broadcasting operator
            size = float(math.prod(np.broadcast_shapes(*(each.shape for each in present))))
    if size > _LARGEST:
        raise UnsupportedModelError(f"{kind} of constants makes about {size:.3g} elements, {_LARGEST:.3g} are taken")


def widened(array: np.ndarray) -> np.ndarray:
    """Floats as float64, everything else as it is."""
    is_float = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    return array.astype(np.float64) if is_float else array


def _stored(node: ir.Node) -> ir.TensorProtocol | None:
    for name, attribute in node.attributes.items():
        value: Any = attribute.value
        if name == "value" and attribute.type is ir.AttributeType.TENSOR:
            tensor: ir.TensorProtocol = value
            return tensor
        if name in ("value_float", "value_floats"):
            return ir.tensor(np.asarray(value, np.float32))
        if name in ("value_int", "value_ints"):
            return ir.tensor(np.asarray(value, np.int64))
    return None
