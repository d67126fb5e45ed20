"""Data of the check: a model with its lookups, and a region of two models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir

from bnexport.errors import UnsupportedModelError
from bnexport.graph import batch_norm
from bnexport.graph.refusal import Refused
from bnexport.verification.local.constants import ConstantValues

MAIN = "main graph"


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
        self.constants = ConstantValues(model)
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
    enters and leaves.
    """

    output: tuple[ir.Value, ir.Value]
    nodes: tuple[list[ir.Node], list[ir.Node]]
    entering: list[tuple[ir.Value, ir.Value | None]]
    number: int
    rounding: frozenset[ir.Node] = frozenset()
