"""Data of the check: a model with its lookups, and a region of two models, cut out downwards from where both are equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import onnx_ir as ir

from bnexport.errors import UnsupportedModelError
from bnexport.graph import batch_norm
from bnexport.graph.refusal import Refused
from bnexport.graph.shapes import Shapes
from bnexport.model_io import walk
from bnexport.schema import SYNC_BATCH_NORM, TRAINING_DOMAIN
from bnexport.verification.local.constants import RANDOM, ConstantValues

if TYPE_CHECKING:
    from bnexport.verification.local.layouts import Layouts

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
        return batch_norm.is_training(node, version)
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
