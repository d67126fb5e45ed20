"""Constant values of one model: stored tensors and expressions of them, evaluated when they are needed.

Arithmetic of floats is done in float64, as if it were exact; a Cast rounds to its type, as the graph declares. How far an
engine may be from that is measured by evaluating everything in its declared type.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from bnexport.errors import UnsupportedModelError
from bnexport.graph.constants import Constants
from bnexport.graph.evaluate import constant_tensor, evaluate, expression, widened
from bnexport.graph.refusal import Refused
from bnexport.graph.shapes import Shapes
from bnexport.graph.versions import opsets
from bnexport.model_io import walk

# Two of them, or two runs of one, may give two values.
RANDOM = frozenset(
    ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli")
)


class ConstantValues:
    """Which values of a model are constant, and their numbers."""

    def __init__(self, model: ir.Model, shapes: Shapes) -> None:
        self._model = model
        self._reader = Constants(model, shapes)
        self._leaves: dict[ir.Value, ir.TensorProtocol] = {}
        self._computed: set[ir.Value] = set()
        # Expressions in float64, and in the types that the model gives them.
        self._arrays: dict[ir.Value, np.ndarray] = {}
        self._narrow: dict[ir.Value, np.ndarray] = {}
        self._versions = opsets(model)
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            self._read(graph)

    def _read(self, graph: ir.Graph) -> None:
        for value in graph.initializers.values():
            with contextlib.suppress(Refused):
                if (tensor := self._reader.stored(value, "constant")) is not None:
                    self._leaves[value] = tensor
        for node in graph:
            bodies = walk.node_bodies(node)
            for body in bodies:
                self._read(body)
            if node.domain == "" and not bodies:
                self._read_node(node)

    def _read_node(self, node: ir.Node) -> None:
        if any(attribute.is_ref() for attribute in node.attributes.values()):
            return
        if node.op_type == "Constant":
            with contextlib.suppress(Refused):
                self._leaves[node.outputs[0]] = constant_tensor(node)
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
        return expression(value, self._arrays, self._stored_wide, self._run_wide)

    def error(self, value: ir.Value) -> np.ndarray | None:
        """Return how far an engine may be from `array`: it computes an expression in the type of its parts."""
        if value in self._leaves or self.array(value).dtype != np.float64:
            return None
        exact, narrow = self.array(value), widened(self.own(value))
        if np.array_equal(exact, narrow, equal_nan=True):
            return None
        overflown = next((each for each in self._under(value) if self._overflows(each)), None)
        if overflown is not None:
            raise UnsupportedModelError(f"the constant {overflown.name!r} overflows in its type")
        u, half = self.roundoff(value)
        with np.errstate(invalid="ignore"):
            difference = np.where(exact == narrow, 0.0, np.abs(narrow - exact))
        return np.asarray(2 * difference + u * np.abs(exact) + half)

    def _overflows(self, value: ir.Value) -> bool:
        """Whether an expression that was evaluated is finite but for its type."""
        exact, narrow = self._arrays.get(value), self._narrow.get(value)
        if exact is None or narrow is None or exact.dtype != np.float64:
            return False
        return not np.array_equal(np.isfinite(exact), np.isfinite(widened(narrow)))

    def dtype(self, value: ir.Value) -> ir.DataType:
        """Return the type that the graph gives a constant."""
        leaf = self._leaves.get(value)
        return leaf.dtype if leaf is not None else ir.DataType.from_numpy(self.own(value).dtype)

    def own(self, value: ir.Value) -> np.ndarray:
        """Return the numbers of an expression in the type that the graph gives it."""
        return expression(value, self._narrow, self._stored, self._run)

    def _stored(self, value: ir.Value) -> np.ndarray | None:
        leaf = self._leaves.get(value)
        return None if leaf is None else leaf.numpy()

    def _stored_wide(self, value: ir.Value) -> np.ndarray | None:
        leaf = self._leaves.get(value)
        return None if leaf is None else widened(leaf.numpy())

    def _run(self, node: ir.Node, inputs: list[np.ndarray | None]) -> list[np.ndarray]:
        if node.op_type == "CastLike" and len(node.inputs) == 2 and node.inputs[1] is not None:
            # What a wide operand does not tell.
            inputs[1] = np.zeros(0, self.dtype(node.inputs[1]).numpy())
        return evaluate(node, inputs, self.version(node))

    def _run_wide(self, node: ir.Node, inputs: list[np.ndarray | None]) -> list[np.ndarray]:
        # An operator may give float32 by itself, as Cast does.
        return [widened(np.asarray(result)) for result in self._run(node, inputs)]

    def roundoff(self, value: ir.Value) -> tuple[float, float]:
        """Unit roundoff and half the smallest positive number of the float types that the value is stored in."""
        leaves = filter(None, map(self._leaves.get, self._under(value)))
        limits = [ROUNDING[leaf.dtype] for leaf in leaves if leaf.dtype in ROUNDING]
        return max((u for u, _ in limits), default=0.0), max((s for _, s in limits), default=0.0)

    def _under(self, value: ir.Value) -> Iterable[ir.Value]:
        """Yield a constant and all that it is computed from."""
        seen, pending = set(), [value]
        while pending:
            each = pending.pop()
            if each in seen:
                continue
            seen.add(each)
            yield each
            node = None if each in self._leaves else each.producer()
            pending += [operand for operand in (node.inputs if node is not None else ()) if operand is not None]


# Unit roundoff, and half the smallest subnormal number.
ROUNDING = {
    ir.DataType.FLOAT16: (2.0**-11, 2.0**-25),
    ir.DataType.BFLOAT16: (2.0**-8, 2.0**-134),
    ir.DataType.FLOAT: (2.0**-24, 2.0**-150),
    ir.DataType.DOUBLE: (2.0**-53, 0.0),
}
