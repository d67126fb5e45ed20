"""Context of a rule: read access to the graph and the pending edits of parameters."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from bnexport.folding.editing.edits import Edit, Exact, Raw, Slot
from bnexport.graph.constants import Constants
from bnexport.graph.names import Names
from bnexport.graph.nodes import input_at
from bnexport.graph.shapes import Shape, Shapes
from bnexport.graph.surgery import Surgery


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a fold.

    max_scale: largest |gamma| / sqrt(var + eps) that is folded. only, skip: names of nodes.
    training_to_inference: also turn BatchNormalization with training_mode=1 into inference.
    rules: names of the rules that may be used; None for all.
    check_early: find out by a pass of its own whether a large weight can be scaled. Otherwise the tensor itself
    raises Refused when it is written, which is too late for another way to fold the site.
    """

    max_scale: float = 1e6
    only: frozenset[str] | None = None
    skip: frozenset[str] = frozenset()
    training_to_inference: bool = False
    rules: frozenset[str] | None = None
    check_early: bool = True


class Context:
    """One scope (the main graph or a function, with its subgraphs) under one opset."""

    def __init__(
        self,
        model: ir.Model,
        opset: int,
        names: Names,
        shapes: Shapes,
        surgery: Surgery,
        options: Options,
        *,
        in_function: bool,
    ) -> None:
        self.model = model
        self._shapes = shapes
        self.opset = opset
        self.names = names
        self.options = options
        self.in_function = in_function
        self.constants = Constants(model, shapes)
        self.edits: dict[Slot, Edit] = {}
        self.surgery = surgery
        # Nodes that were written since somebody last asked.
        self.created: list[ir.Node] = []
        # What a rule found out about an axis of a node and will ask again.
        self.memory: dict[tuple[ir.Node, int], np.ndarray] = {}

    def shape(self, value: ir.Value) -> Shape | None:
        """Return sizes, names of sizes, or None for an unknown size; None if the rank is unknown."""
        return self._shapes.of(value)

    def same_shape(self, new: ir.Value, old: ir.Value) -> None:
        self._shapes.same(new, old)

    def dtype(self, value: ir.Value) -> ir.DataType | None:
        return self._shapes.dtype(value)

    def rank(self, value: ir.Value) -> int | None:
        shape = self.shape(value)
        return None if shape is None else len(shape)

    def size(self, value: ir.Value, axis: int) -> int | None:
        """Return one dimension if it is a known number."""
        shape = self.shape(value)
        if shape is None or not 0 <= axis < len(shape):
            return None
        size = shape[axis]
        return size if isinstance(size, int) else None

    def current(self, node: ir.Node, index: int, what: str, edits: dict[Slot, Edit] | None = None) -> np.ndarray:
        """Return a parameter as float64 with all edits so far, not rounded."""
        slot = (node, index)
        edit = edits.get(slot) if edits else None
        if edit is None:
            edit = self.edits.get(slot)
        if isinstance(edit, Exact):
            return edit.values
        if isinstance(edit, Raw):
            return edit.values.astype(np.float64)
        values = self.constants.floats(input_at(node, index), what)
        return values if edit is None else (values.reshape(edit.view) * edit.factor).reshape(values.shape)
