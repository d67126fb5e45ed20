"""Regions of two models that a fold changed, and their constants in float64 with the errors that stored numbers may have."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from bnexport.errors import UnsupportedModelError
from bnexport.graph.constants import Constants
from bnexport.graph.evaluate import constant_tensor, evaluate, expression, widened
from bnexport.graph.nodes import Refused, opsets
from bnexport.graph.nodes import is_training as normalises_batches
from bnexport.graph.shapes import Shapes
from bnexport.model_io import walk
from bnexport.schema import SYNC_BATCH_NORM, TRAINING_DOMAIN

if TYPE_CHECKING:
    from bnexport.verification.proof.layouts import Layouts


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


# Data of the check: a model with its lookups, and a region of two models, cut out downwards from where both are equal.

MAIN = "main graph"
# Operators of other domains that are known: equal inputs give equal outputs.
FOREIGN = frozenset(
    (domain, name) for domain in ("mmcv", "mmdeploy") for name in ("MMCVDeformConv2d", "MMCVModulatedDeformConv2d")
)

# Inputs that hold sizes: what computes them is part of the region, so that they fit the sizes that it is run with.
SIZES = {
    "Reshape": (1,), "Expand": (1,), "Tile": (1,), "Pad": (1, 3), "Slice": (1, 2, 3, 4), "Split": (1,), "Resize": (1, 2, 3),
    "Upsample": (1,), "Squeeze": (1,), "Unsqueeze": (1,), "ReduceMean": (1,), "ReduceMax": (1,), "ReduceSum": (1,),
}  # fmt: skip


class Mismatch(Exception):
    """The models differ in what no region covers."""


def name_of(node: ir.Node) -> str:
    """Return the name that reports use for a node: its own, or its operator and first output."""
    return node.name or f"{node.op_type} -> {next((value.name for value in node.outputs if value.name), '')}"


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
    """One of the two models. roundings: how often a fold's arithmetic may round each of its constants, at most."""

    def __init__(self, model: ir.Model, roundings: int = 0) -> None:
        self.model, self.roundings = model, roundings
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
            test = node.attributes.get("is_test")
            return test is not None and not test.is_ref() and bool(test.as_int())
        training = node.inputs[2] if len(node.inputs) > 2 else None
        if training is None or not training.name:
            return True
        return self.constants.has(training) and not self.constants.array(training).any()

    def keeps_floats(self, cast: ir.Node, data: ir.Value) -> bool:
        """Whether a Cast is known to make floats of floats."""
        source, target = self.shapes.dtype(data), cast.attributes.get("to")
        if source is None or target is None or target.is_ref():
            return False
        return source.is_floating_point() and ir.DataType(target.as_int()).is_floating_point()

    def kernel(self, node: ir.Node) -> tuple[int, ...] | None:
        """Return the spatial sizes of a constant weight."""
        weight = node.inputs[1] if len(node.inputs) > 1 else None
        if weight is None or not self.constants.has(weight):
            return None
        leaf = self.constants.leaf(weight)
        if leaf is not None:
            return tuple(leaf.shape.numpy())[2:]
        try:
            return self.constants.array(weight).shape[2:]
        except UnsupportedModelError:
            return None

    def data(self, node: ir.Node) -> Iterator[tuple[int, ir.Value]]:
        """Yield the inputs of a node that are not constant, with their places; without those that bodies read."""
        for index, value in enumerate(node.inputs):
            if value is not None and not self.constants.has(value):
                yield index, value


@dataclasses.dataclass
class Region:
    """One value that leaves a changed part, as it is computed in both models from values that are equal in both.

    nodes: of the original, then those of the folded model, each in the order of execution. entering: pairs of equal
    values; the second is None where the folded model does not read it. rounding: Casts to a coarser type than all that
    enters and leaves. layouts: given where nothing may be concluded from the sizes that it is evaluated at.
    """

    output: tuple[ir.Value, ir.Value]
    nodes: tuple[list[ir.Node], list[ir.Node]]
    entering: list[tuple[ir.Value, ir.Value | None]]
    number: int
    rounding: frozenset[ir.Node] = frozenset()
    layouts: Layouts | None = None


def cone(value: ir.Value, side: Side, is_inside: Callable[[ir.Value], bool]) -> tuple[list[ir.Node], list[ir.Value]]:
    """Return the nodes above a value that are inside, in order, and the values that enter. Raises Mismatch."""
    found: set[ir.Node] = set()
    entering: dict[ir.Value, None] = {}
    pending = [(value, False)]
    while pending:
        each, is_size = pending.pop()
        node = each.producer()
        if node is None or node.graph is not value.graph or not (is_size or is_inside(each)):
            entering[each] = None
            continue
        if node in found:
            continue
        if node not in side.order:
            raise Mismatch(f"{name_of(node)} ({node.op_type}) is constant in one model only")
        if walk.node_bodies(node):
            raise Mismatch(f"{name_of(node)} ({node.op_type}) holds a body and is part of a fold")
        found.add(node)
        computes = is_size and node.op_type != "Shape"
        pending += [(operand, computes or index in SIZES.get(node.op_type, ())) for index, operand in side.data(node)]
    return sorted(found, key=side.order.__getitem__), list(entering)


# A constant of a region in float64, with the largest error that its stored numbers may have.
#
# The original's numbers are exact by definition. A number of the folded model that the original has in the same place is
# exact, too; every other was rounded once to its type, to nearest: |w - exact| <= u |w| + s / 2, with u the unit
# roundoff and s the smallest subnormal number of the type. An expression of constants is rounded by the engine that
# computes it: how far that leads is measured.
#
# A fold of another tool computes in the type of the weights. Its standard form, k = s / sqrt(v + eps), W k and
# (b - m) k + t, rounds a weight's product four times (sum, root, quotient, product) and the terms of a bias five times. This
# is covered by counting each of the original's constants as rounded ROUNDINGS times: to first order 3 u from W (or b, m and
# t), 3 u from s and up to 1.5 u from v.

# Rounding of our own arithmetic, relative to the size of the terms: some tens of operations in float64.
NOISE = 2.0**-49
ROUNDINGS = 3


@dataclasses.dataclass(frozen=True)
class Parameter:
    """values: float64. error: of the same shape; None where it is 0 everywhere."""

    values: np.ndarray
    error: np.ndarray | None = None

    @property
    def slack(self) -> np.ndarray | float:
        return 0.0 if self.error is None else self.error


def original(side: Side, value: ir.Value) -> Parameter:
    """Read a constant of the original. Raises UnsupportedModelError where it is not finite: then nothing is linear."""
    values, error = np.asarray(side.constants.array(value)), side.constants.error(value)
    if values.dtype == np.float64 and not np.isfinite(values).all():
        raise UnsupportedModelError(f"the constant {value.name!r} of the original is not finite")
    if side.roundings and values.dtype == np.float64:
        own = side.roundings * side.constants.roundoff(value)[0] * np.abs(values)
        error = own if error is None else error + own
    return Parameter(values, error)


def stored(side: Side, value: ir.Value, before: np.ndarray | None) -> Parameter:
    """Read a constant of the folded model. before: what the original has in its place."""
    values = np.asarray(side.constants.array(value))
    if values.dtype != np.float64:
        return Parameter(values)
    if before is not None and before.shape == values.shape:
        same = values == before
        if same.all():
            return Parameter(values)
    else:
        same = np.zeros(values.shape, bool)
    u, half = side.constants.roundoff(value)
    error = np.where(same, 0.0, u * np.abs(values) + half)
    computed = side.constants.error(value)
    return Parameter(values, error if computed is None else error + computed)
