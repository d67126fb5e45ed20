"""One model for the proof: its scopes and order, and its constants in float64 with the errors that stored numbers may have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TypeGuard

import numpy as np
import onnx_ir as ir

from bnexport.errors import UnsupportedModelError
from bnexport.graph.constants import Constants
from bnexport.graph.evaluate import constant_tensor, evaluate, expression, widened
from bnexport.graph.nodes import Refused, input_at, opsets
from bnexport.graph.nodes import is_training as normalises_batches
from bnexport.graph.shapes import Shapes
from bnexport.model_io import ContainedTensor, walk
from bnexport.schema import SYNC_BATCH_NORM, TRAINING_DOMAIN

# Constant values of one model: stored tensors and expressions of them, evaluated when they are needed.
#
# Arithmetic of floats is done in float64, as if it were exact; a Cast rounds to its type, as the graph declares. How far an
# engine may be from that is measured by evaluating everything in its declared type.

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
        self._sizes: dict[ir.Value, tuple[int, ...]] = {}
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

    def has(self, value: ir.Value | None) -> TypeGuard[ir.Value]:
        """Whether the value is the same for all inputs of the model."""
        return value in self._leaves or value in self._computed

    @property
    def bytes_outside(self) -> int:
        """The bytes of weights in other files."""
        return sum(each.length or 0 for each in self._leaves.values() if isinstance(each, ContainedTensor))

    def version(self, node: ir.Node) -> int:
        """Return the opset that the node is of."""
        return self._versions[node.graph] if node.graph is not None else 0

    def leaf(self, value: ir.Value) -> ir.TensorProtocol | None:
        """Return the stored tensor; None for an expression."""
        return self._leaves.get(value)

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        """Return the shape of a constant. Raises UnsupportedModelError."""
        found = self._sizes.get(value)
        if found is None:
            leaf = self._leaves.get(value)
            found = self._sizes[value] = tuple(leaf.shape.numpy()) if leaf is not None else self.array(value).shape
        return found

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
        leaf = self._leaves.get(value)
        if leaf is not None:
            return ROUNDING.get(leaf.dtype, (0.0, 0.0))
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
ROUNDINGS = 3
# A number is known where it may be off by no more than this part of the largest one beside it.
LOOSE = 1e-3


MAIN = "main graph"
# Operators of other domains that are known: equal inputs give equal outputs.
FOREIGN = frozenset(
    (domain, name) for domain in ("mmcv", "mmdeploy") for name in ("MMCVDeformConv2d", "MMCVModulatedDeformConv2d")
)


class Mismatch(Exception):
    """The models differ in what no lemma covers."""


def name_of(node: ir.Node) -> str:
    """Return the name that reports use for a node: its own, or its operator and first output."""
    return node.name or f"{node.op_type} -> {next((value.name for value in node.outputs if value.name), '')}"


def int_of(node: ir.Node, name: str) -> int | None:
    """Return an attribute that is a number of its own; None where it is absent, given by a function's caller or of another type."""
    attribute = node.attributes.get(name)
    return attribute.value if attribute is not None and attribute.type is ir.AttributeType.INT else None


def cast_target(cast: ir.Node) -> ir.DataType | None:
    """Return the type that a Cast names; None where it names none."""
    with contextlib.suppress(ValueError):
        return ir.DataType(int_of(cast, "to"))  # type: ignore[arg-type]
    return None


def is_training(node: ir.Node, version: int) -> bool:
    """Whether a BatchNormalization uses the statistics of the batch. version: of the opset.

    Raises UnsupportedModelError if its attribute cannot be read.
    """
    if node.op_type != "BatchNormalization" or node.domain != "":
        return False
    try:
        return normalises_batches(node, version)
    except Refused as error:
        raise UnsupportedModelError(f"{name_of(node)}: {error}") from error


class Side:
    """One of the two models: place 0 is the original, place 1 the changed one.

    roundings: how often a fold's arithmetic may round each of its constants, at most.
    """

    def __init__(self, model: ir.Model, place: int, roundings: int = 0) -> None:
        self.model, self.place, self.roundings = model, place, roundings
        self.shapes = Shapes(model)
        self.constants = ConstantValues(model, self.shapes)
        self._random: dict[ir.Node, bool] = {}
        # Position of each node that depends on the inputs, in the order of execution.
        self.order: dict[ir.Node, int] = {}
        self.scopes: dict[ir.Graph, str] = {}
        self._read(model.graph, MAIN)
        for function in model.functions.values():
            self._read(function.graph, f"function {function.name}")

    def _read(self, graph: ir.Graph, scope: str) -> None:
        for each in (graph, *graph.subgraphs()):
            self.scopes[each] = scope
            for node in each:
                if not self.is_constant_node(node):
                    self.order[node] = len(self.order)

    def is_constant_node(self, node: ir.Node) -> bool:
        """Whether each output is constant."""
        return any(self.constants.has(value) for value in node.outputs)

    def is_random(self, node: ir.Node) -> bool:
        """Whether two such nodes may give two values for equal inputs, as far as is known."""
        if node not in self._random:
            self._random[node] = True  # a function that calls itself is nothing that is known
            self._random[node] = self._draws(node)
        return self._random[node]

    def _draws(self, node: ir.Node) -> bool:
        function = self.model.functions.get(node.op_identifier())
        if function is not None:
            return any(map(self.is_random, function.all_nodes()))
        if node.op_type == SYNC_BATCH_NORM.name or node.domain == TRAINING_DOMAIN:
            return False
        if (node.domain, node.op_type) in FOREIGN:
            return False
        if node.domain != "" or node.op_type in RANDOM:
            return True
        if node.op_type == "Dropout":
            return not self.is_inference_dropout(node)
        return any(self.is_random(inner) for inner in walk.inner_nodes(node))

    def is_inference_dropout(self, node: ir.Node) -> bool:
        """Whether a Dropout copies its input: by its attribute before opset 7, by its third input from 12 on."""
        version = self.constants.version(node)
        if version < 7:
            return bool(int_of(node, "is_test"))
        training = node.inputs[2] if len(node.inputs) > 2 else None
        if training is None or not training.name:
            return True
        return self.constants.has(training) and not self.constants.array(training).any()

    def cast_type(self, cast: ir.Node) -> ir.DataType | None:
        """Return the type that a Cast or CastLike makes, None where it is not known."""
        if cast.op_type == "CastLike":
            return self.shapes.dtype(cast.inputs[1]) if len(cast.inputs) > 1 and cast.inputs[1] is not None else None
        return cast_target(cast)

    def stored_error(self, value: ir.Value) -> tuple[float, float]:
        """Return how far a constant may be off, as a share of each number and beyond it.

        The original's numbers are exact by definition. Those of the changed model were rounded once to their type, to nearest:
        |w - exact| <= u |w| + s / 2, with u the unit roundoff and s the smallest subnormal number of the type. A fold of another
        tool computes in the type of the weights. Its standard form, k = s / sqrt(v + eps), W k and (b - m) k + t, rounds a
        weight's product four times (sum, root, quotient, product) and the terms of a bias five times. This is covered by counting
        each of the original's constants as rounded ROUNDINGS times: to first order 3 u from W (or b, m and t), 3 u from s and up
        to 1.5 u from v.
        """
        u, half = self.constants.roundoff(value)
        return (u, half) if self.place else (self.roundings * u, 0.0)

    def kernel(self, node: ir.Node) -> tuple[int, ...] | None:
        """Return the spatial sizes of a constant weight."""
        weight = input_at(node, 1)
        with contextlib.suppress(UnsupportedModelError):
            return self.constants.shape(weight)[2:] if self.constants.has(weight) else None
        return None

    def data(self, node: ir.Node) -> Iterator[tuple[int, ir.Value]]:
        """Yield the inputs of a node that are not constant, with their places; without those that bodies read."""
        for index, value in enumerate(node.inputs):
            if value is not None and not self.constants.has(value):
                yield index, value
