"""Context of a rule: read access to the graph and the pending edits of parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
import onnx_ir as ir

from bnexport.errors import UsageError
from bnexport.folding.affine import Outputs
from bnexport.graph.nodes import Names, Refused, input_at, label
from bnexport.graph.scopes import GraphContext
from bnexport.graph.shapes import Shapes
from bnexport.graph.surgery import Surgery

# Pending changes of parameters, stored outside the model and applied at the end of the pass.

# Input `index` of a node: parameters are edited where they are read, since they may be shared.
Slot = tuple[ir.Node, int]


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A parameter, reshaped to `view`, times a factor that broadcasts to it. result: the product, if it is small.

    outputs: those of the slices, where each makes one on its own.
    """

    factor: np.ndarray
    view: tuple[int, ...]
    result: np.ndarray | None = None
    outputs: Outputs | None = None


@dataclasses.dataclass(frozen=True)
class Exact:
    """A parameter with a new value: in float64 (any shape), and rounded to the type of the parameter."""

    values: np.ndarray
    rounded: np.ndarray


@dataclasses.dataclass(frozen=True)
class Raw:
    """A parameter replaced by a given array as it is."""

    values: np.ndarray


Edit = Scaled | Exact | Raw


@dataclasses.dataclass(frozen=True)
class Addend:
    """A vector to be added along `axis` of a value of `rank` dimensions."""

    vector: np.ndarray
    axis: int
    rank: int
    dtype: np.dtype


# Forms of a batch norm that stays: as it is, a depthwise 1x1 Conv, or a Mul and an Add.
Leftover = Literal["batch-norm", "conv", "arithmetic"]
LEFTOVERS = get_args(Leftover)


@dataclasses.dataclass(frozen=True)
class Layers:
    """What may change in a graph that stands for a torch module, whose code stays; all are names of nodes.

    changeable: layers, whose parameters may change. refused: layers and batch norms that stay, and why. replaceable: calls of
    modules in whose place another may stand. entangled: batch norms that share their input's memory once they are gone, with
    code that writes to it: they may only fold into what makes their input.
    """

    changeable: frozenset[str]
    refused: Mapping[str, Refused]
    replaceable: frozenset[str]
    entangled: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a fold.

    max_scale: largest |gamma| / sqrt(var + eps) that is folded. only, skip: names of nodes.
    training_to_inference: also turn BatchNormalization with training_mode=1 into inference.
    rules: names of the rules that may be used; None for all.
    leftover: the form of what stays, of LEFTOVERS.
    check_early: find out by a pass of its own whether a large weight can be scaled. Otherwise the tensor itself
    raises Refused when it is written, which is too late for another way to fold the site.
    layers: of a graph that stands for a torch module. There only batch norms are sites, and no node is added.
    """

    max_scale: float = 1e6
    only: frozenset[str] | None = None
    skip: frozenset[str] = frozenset()
    training_to_inference: bool = False
    rules: frozenset[str] | None = None
    leftover: Leftover = "batch-norm"
    check_early: bool = True
    layers: Layers | None = None


def check_leftover(form: Leftover) -> Leftover:
    """Return the form of what stays. Raise UsageError for an unknown one."""
    if form not in LEFTOVERS:
        raise UsageError(f"leftover: got {form!r}, expected one of {', '.join(LEFTOVERS)}")
    return form


class Context(GraphContext):
    """A scope of a fold. options: of the fold."""

    def __init__(
        self,
        model: ir.Model,
        opset: int,
        names: Names,
        shapes: Shapes,
        surgery: Surgery,
        in_function: bool,
        *,
        options: Options,
    ) -> None:
        super().__init__(model, opset, names, shapes, surgery, in_function)
        self.options = options
        self.edits: dict[Slot, Edit] = {}
        # Nodes that were written since the last query.
        self.created: list[ir.Node] = []
        # Operators of merged branches, and the names of the source's nodes in whose place each stands.
        self.merged: dict[ir.Node, frozenset[str]] = {}
        # What a rule found out about an axis of a node and will ask again.
        self.memory: dict[tuple[ir.Node, int], np.ndarray] = {}

    def check_change(self, node: ir.Node) -> None:
        """Raise Refused for a node whose parameters must stay."""
        self.check_refused(node)
        if self.options.layers is not None and label(node) not in self.options.layers.changeable:
            raise Refused("no-layer", f"{node.op_type} ({label(node)}) is no layer of the module")

    def check_refused(self, node: ir.Node) -> None:
        """Raise Refused for a layer or batch norm of a module that must stay."""
        if self.options.layers is not None and label(node) in self.options.layers.refused:
            raise self.options.layers.refused[label(node)]

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
