"""What a rule works with: read access to the graph (`Context`), and the pending edits of parameters (`Plan`)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

import numpy as np
import onnx_ir as ir

from bnexport.errors import UsageError
from bnexport.folding.affine import ChannelAffine, Outputs, along, round_vector
from bnexport.folding.scaled_tensor import (
    FLOAT_DATA_TYPES,
    ScaledTensor,
    check_scaled,
    is_small,
    scale_small,
    weighted_sums,
)
from bnexport.graph.nodes import Names, Refused, get_int, input_at, is_standard, label, read_once, required_input
from bnexport.graph.scopes import GraphContext, new_constant
from bnexport.graph.shapes import Shapes
from bnexport.graph.surgery import Surgery
from bnexport.interface import check_choice

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
    leftover: the form of what stays, of LEFTOVERS.
    check_early: find out by a pass of its own whether a large weight can be scaled. Otherwise the tensor itself
    raises Refused when it is written, which is too late for another way to fold the site.
    layers: of a graph that stands for a torch module. There only batch norms are sites, and no node is added.
    """

    max_scale: float = 1e6
    only: frozenset[str] | None = None
    skip: frozenset[str] = frozenset()
    training_to_inference: bool = False
    leftover: Leftover = "batch-norm"
    check_early: bool = True
    layers: Layers | None = None

    @classmethod
    def of(cls, *, only: Iterable[str] | None, skip: Iterable[str], **others: Any) -> Options:
        """Return the options that a caller gives. Raise UsageError for a single string, whose letters are no names, and for an
        unknown leftover.
        """
        for option, names in (("only", only), ("skip", skip)):
            if isinstance(names, str):
                raise UsageError(f"{option}: got the string {names!r}, expected a list of names")
        made = cls(only=None if only is None else frozenset(only), skip=frozenset(skip), **others)
        check_choice("leftover", made.leftover, LEFTOVERS)
        return made


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


# Plan of the edits for one batch norm: each is checked when added, all are committed or none.
#
# A rule never edits a parameter. It asks a `Plan` for "input 1 of this node times this factor" or "input
# 2 becomes this vector"; the plan checks that the type can hold the result. Only when all edits have been
# accepted is the plan committed, and only at the end is each parameter computed, from its original and
# the product of all factors, with one rounding.

# Insertion of changed parameters into a model: each computed once, shared ones copied where results differ, unused ones removed.


def write_parameters(context: Context, *, keep: bool = False) -> None:
    """Write every edited parameter into the model. keep: their exact values, for later folds."""
    groups: dict[object, list[Slot]] = {}
    for (node, index), edit in context.edits.items():
        if not context.surgery.is_dead(node) and not _is_written(node, index, edit):
            groups.setdefault(_result(context, node, index, edit), []).append((node, index))
    readers: dict[ir.Value, int] = {}
    for slots in groups.values():
        _put(context, slots, _edited(context, *slots[0], context.edits[slots[0]]), readers)
    if not keep:
        context.edits.clear()


def _result(context: Context, node: ir.Node, index: int, edit: Edit) -> object:
    """Return what tells the results of edits apart: equal ones of one parameter, as of a head for several levels, are one.

    A new bias counts as a result of the weight.
    """
    source = input_at(node, index) or input_at(node, 1)
    # A function has Constant nodes, which stand in front of one reader.
    if context.in_function or source is None or len(source.uses()) < 2:
        return node, index
    array = edit.factor if isinstance(edit, Scaled) else edit.rounded if isinstance(edit, Exact) else edit.values
    view = edit.view if isinstance(edit, Scaled) else None
    return source, node.graph, index, view, array.shape, array.dtype, array.tobytes()


def _is_written(node: ir.Node, index: int, edit: Edit) -> bool:
    """Whether the input is what the edit says, as the addend of a new Add is until it is changed."""
    value = input_at(node, index)
    if not isinstance(edit, Exact) or value is None:
        return False
    maker = value.producer()
    held = None if maker is None else maker.attributes.get("value")
    tensor = value.const_value if maker is None else None if held is None else held.value
    return getattr(tensor, "raw", None) is edit.rounded


def _edited(context: Context, node: ir.Node, index: int, edit: Edit) -> ir.TensorProtocol:
    if isinstance(edit, Exact):
        return ir.Tensor(edit.rounded)
    if isinstance(edit, Raw):
        return ir.Tensor(edit.values)
    if edit.result is not None:
        return ir.Tensor(edit.result)
    base = context.constants.tensor(input_at(node, index), "parameter")
    checked = context.options.check_early
    return ScaledTensor(base, edit.factor, edit.view, checked=checked, outputs=edit.outputs)


def _put(context: Context, slots: list[Slot], tensor: ir.TensorProtocol, readers: dict[ir.Value, int]) -> None:
    """Make `tensor` the input of all slots, which read one value now. readers: remaining readers of a value, if known.

    The initializer that only these inputs use keeps its name; anything shared with others is left alone.
    """
    node, index = slots[0]
    old, graph = input_at(node, index), node.graph
    assert graph is not None
    if old is not None and old not in readers:
        readers[old] = len(old.uses())
    if (
        old is not None
        and old.is_initializer()
        and not old.is_graph_output()
        and readers[old] == len(slots)
        and old.graph is graph
        and old.const_value is not None
        and old.const_value.dtype == tensor.dtype
    ):
        tensor.name = old.name
        old.const_value = tensor
        if old.shape != tensor.shape:
            old.shape = ir.Shape(tensor.shape.numpy())
        return
    wish = f"{label(node)}.bias" if old is None else f"{old.name}.folded"
    value = new_constant(context, graph, node, tensor, wish)
    for node, index in slots:
        if index >= len(node.inputs):
            node.resize_inputs(index + 1)
        node.replace_input_with(index, value)
    if old is not None:
        readers[old] -= len(slots)
        context.surgery.may_be_unused(old)


def insert_add(context: Context, value: ir.Value, addend: Addend) -> ir.Node:
    """Insert an Add so that readers of `value` read value + addend; a graph output keeps its name."""
    producer = value.producer()
    assert producer is not None and producer.graph is not None
    graph = producer.graph
    uses = tuple(value.uses())
    # Leading dimensions of size 1 say nothing.
    shape = (-1, *[1] * (addend.rank - addend.axis - 1))
    array = round_vector(addend.vector, addend.dtype, "shift").reshape(shape)
    name = context.names.fresh(f"{value.name}.shift")
    node = ir.Node("", "Add", [value], name=name)
    graph.insert_after(producer, node)
    context.created.append(node)
    node.resize_inputs(2)
    node.replace_input_with(1, new_constant(context, graph, node, array, f"{name}.addend"))
    # A later fold that changes it starts from the exact values: each number is rounded once.
    context.edits[node, 1] = Exact(addend.vector.reshape(shape), array)
    total = node.outputs[0]
    context.same_shape(total, value)
    total.name, total.type, total.shape = context.names.fresh(f"{value.name}.shifted"), value.type, value.shape
    for use in uses:
        use.node.replace_input_with(use.idx, total)
    if value.is_graph_output():
        context.surgery.replace_output(value, total)
        value.name, total.name = total.name, value.name
    return node


class Plan:
    """Edits of one site, checked when added and committed together or not at all."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.edits: dict[Slot, Edit] = {}
        self.attributes: dict[tuple[ir.Node, str], ir.Attr] = {}
        # A set that keeps its order.
        self.targets: dict[ir.Node, None] = {}
        # Every node that the search went through: their outputs may carry other values.
        self.passed: dict[ir.Node, None] = {}
        # Shifts that find no bias: an Add behind the node's first output.
        self.adds: dict[ir.Node, Addend] = {}
        # Names of the rules that the edits are from, in the order of their first use.
        self.rules: dict[str, None] = {}
        # Steps of the search that led here; paths downwards may meet again, so their number needs a bound.
        self.steps_down = 0

    def scale(
        self,
        node: ir.Node,
        index: int,
        factor: np.ndarray,
        what: str,
        view: tuple[int, ...] | None = None,
        *,
        shift: np.ndarray | None = None,
        products: float = 1,
    ) -> None:
        """Multiply parameter `index` of `node` by `factor`, which broadcasts to it.

        view: a shape in which the parameter is looked at, as (groups, rows, ...); every factor of one
        parameter must use the same one. shift: of the output channels, as `factor`, where each slice of one
        factor makes such a channel on its own, of so many products: rounding at its output hides small errors.
        """
        edit = self._edit(node, index)
        if isinstance(edit, Exact):
            values = edit.values if view is None else edit.values.reshape(view)
            self.replace(node, index, (values * factor).reshape(edit.values.shape), edit.rounded.dtype, what)
            return
        value = input_at(node, index)
        weight = self.context.constants.tensor(value, what)
        if weight.dtype not in FLOAT_DATA_TYPES or isinstance(edit, Raw):
            raise Refused("type", f"the {what} has type {weight.dtype.name.lower()}, expected a float type")
        producer = value.producer()  # type: ignore[union-attr]
        if producer is not None and is_standard(producer, "DequantizeLinear"):
            shape = tuple(weight.shape.numpy())
            scale_quantized(self, producer, np.broadcast_to(factor, view or shape).reshape(shape))
            self.target(node)
            return
        view = view or tuple(weight.shape.numpy())
        if edit is not None:
            if edit.view != view:
                raise Refused("conflict", f"the {what} is scaled in two ways that do not go together")
            factor = edit.factor * factor
        outputs = None if shift is None else Outputs(shift, products)
        result = scale_small(weight, factor, view, outputs) if is_small(view) else None
        if result is None and self.context.options.check_early:
            check_scaled(weight, factor, view, outputs)
        self.edits[node, index] = Scaled(factor, view, result, outputs)
        self.target(node)

    def replace(
        self,
        node: ir.Node,
        index: int,
        values: np.ndarray,
        dtype: np.dtype,
        what: str,
        magnitude: np.ndarray | None = None,
    ) -> None:
        """Set parameter `index` of `node` to a new value; add it if it is absent."""
        self.edits[node, index] = Exact(values, round_vector(values, dtype, what, magnitude))
        self.target(node)

    def map(
        self,
        node: ir.Node,
        index: int,
        axis: int,
        affine: ChannelAffine,
        dtype: np.dtype,
        what: str,
        values: np.ndarray | None = None,
    ) -> None:
        """Apply a map along `axis` of parameter `index` of `node`. values: those of the parameter, where they are known."""
        values = self.value(node, index, what) if values is None else values
        scale, center, shift = (along(part, axis, values.ndim) for part in (affine.scale, affine.center, affine.shift))
        size = np.abs(scale) * (np.abs(values) + np.abs(center)) + np.abs(shift)
        self.replace(node, index, (values - center) * scale + shift, dtype, what, size)

    def add(self, node: ir.Node, index: int, vector: np.ndarray, size: np.ndarray, dtype: np.dtype, what: str) -> None:
        """Add a vector to a bias, which is created if absent. size: magnitudes of the terms of its sums."""
        bias = self.vector(node, index, vector.size, what)
        self.replace(node, index, bias + vector, dtype, what, np.abs(bias) + size)

    def has(self, node: ir.Node, index: int) -> bool:
        """Whether the node has, or will have, this parameter."""
        return input_at(node, index) is not None or self._edit(node, index) is not None

    def value(self, node: ir.Node, index: int, what: str) -> np.ndarray:
        """Return the parameter as float64, with the edits of this plan."""
        return self.context.current(node, index, what, self.edits)

    def vector(self, node: ir.Node, index: int, channels: int, what: str) -> np.ndarray:
        """Return a bias as float64; zeros if it is absent. Raises Refused for one of another shape."""
        bias = self.value(node, index, what) if self.has(node, index) else np.zeros(channels)
        if bias.shape != (channels,):
            raise Refused("shape", f"the {what} has shape {bias.shape}, expected ({channels},)")
        return bias

    def sums(
        self, node: ir.Node, index: int, weights: np.ndarray, view: tuple[int, ...], kept: tuple[int, ...], what: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sum parameter * weights over all axes of `view` except `kept`; return the sums and the sums of the
        magnitudes.

        weights broadcasts to the parameter in the shape `view` and has its rank.
        """
        edit = self._edit(node, index)
        if isinstance(edit, (Exact, Raw)):
            source: ir.TensorProtocol | np.ndarray = self.value(node, index, what)
        else:
            source = self.context.constants.tensor(input_at(node, index), what)
            if edit is not None:
                if edit.view != view:
                    raise Refused("conflict", f"the {what} is scaled in two ways that do not go together")
                weights = weights * edit.factor
        return weighted_sums(source, weights, view, kept)

    def _edit(self, node: ir.Node, index: int) -> Edit | None:
        slot = (node, index)
        edit = self.edits.get(slot)
        return self.context.edits.get(slot) if edit is None else edit

    def set_attribute(self, node: ir.Node, attribute: ir.Attr) -> None:
        self.attributes[node, attribute.name] = attribute

    def target(self, node: ir.Node) -> None:
        self.context.check_change(node)
        self.targets[node] = None

    def check_add(self, addend: Addend) -> None:
        """Raise Refused for a shift that its type cannot represent."""
        round_vector(addend.vector, addend.dtype, "shift")

    def add_behind(self, node: ir.Node, addend: Addend) -> None:
        """Add a vector to the node's first output with a separate Add."""
        self.check_add(addend)
        if node in self.adds:
            raise Refused("conflict", "two shifts meet behind one node")
        self.adds[node] = addend
        self.target(node)

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Roll back all edits planned inside if it ends in Refused, which is raised again."""
        before = {name: value.copy() if isinstance(value, dict) else value for name, value in vars(self).items()}
        try:
            yield
        except Refused:
            vars(self).update(before)
            raise

    def commit(self) -> None:
        self.context.edits.update(self.edits)
        for (node, name), attribute in self.attributes.items():
            node.attributes[name] = attribute
        for node, addend in self.adds.items():
            insert_add(self.context, node.outputs[0], addend)


def scale_quantized(plan: Plan, node: ir.Node, factor: np.ndarray) -> None:
    """Scale the output of a DequantizeLinear: q s becomes (sign(k) q) (s |k|), for one k along an axis, the node's own if its
    scale is a vector already.

    The stored integers stay, or are negated, which needs a zero point of 0 and no integer without a counterpart. Where a
    QuantizeLinear makes them of floats, as in training aware of quantisation, it stays as well: its scale is the same, and its
    floats become the numbers that the integers stand for, which it rounds to the same integers.
    """
    if not read_once(node.outputs[0]):
        raise Refused("quantized", f"the quantized weight of {label(node)} has other uses")
    if (node, 1) in plan.edits or (node, 1) in plan.context.edits:
        raise Refused("quantized", f"the scale of {label(node)} has been changed already")
    constants, source = plan.context.constants, required_input(node)
    scale = plan.value(node, 1, "quantization scale")
    axis = _quantization_axis(node, factor, scale, plan.context.opset)
    k = _slice_along(factor, axis).reshape(-1)
    if not k.all():
        raise Refused("quantized", f"a scale of 0 would be the quantization scale of {label(node)}")
    integers = constants.array(source, "quantized weight")
    zero = input_at(node, 2)
    points = None if zero is None else constants.array(zero, "zero point")
    if (k < 0).any():
        integers = _negated(node, integers, points, along(k, axis, factor.ndim))
        plan.edits[node, 0] = Raw(integers)
    values = scale.reshape(-1) * np.abs(k)
    dtype = constants.array(input_at(node, 1), "quantization scale").dtype
    slots = [node]
    maker = source.producer()
    if maker is not None and is_standard(maker, "QuantizeLinear"):
        if not read_once(source) or (points is not None and points.any()):
            raise Refused("quantized", f"the weight that {label(maker)} quantizes has a zero point or other uses")
        plan.edits.pop((node, 0), None)
        plan.replace(maker, 1, values, dtype, "quantization scale")
        rounded = plan.edits[maker, 1].rounded  # type: ignore[union-attr]
        floats = integers.astype(np.float64) * along(rounded.astype(np.float64), axis, factor.ndim)
        kind = constants.describe(input_at(maker, 0), "weight").dtype
        plan.replace(maker, 0, floats, kind, "weight", np.abs(floats))
        slots.append(maker)
    plan.replace(node, 1, values, dtype, "quantization scale")
    for each in slots:
        if points is not None:
            plan.edits[each, 2] = Raw(np.broadcast_to(points.reshape(-1), values.shape).copy())
        plan.set_attribute(each, ir.AttrInt64("axis", axis))


def _quantization_axis(node: ir.Node, factor: np.ndarray, scale: np.ndarray, opset: int) -> int:
    """Return the axis along which both the factor and the scale may vary."""
    if opset < 13 and np.unique(factor).size > 1:
        raise Refused("opset", f"{label(node)} has one scale for all channels before opset 13")
    axes = [axis for axis in range(factor.ndim) if (factor == _slice_along(factor, axis)).all()]
    if scale.size > 1:
        own = get_int(node, "axis", 1)
        axes = [axis for axis in axes if axis == (own + factor.ndim if own < 0 else own)]
    if not axes:
        raise Refused("quantized", f"the map does not follow the quantization axis of {label(node)}")
    return axes[0]


def _negated(node: ir.Node, integers: np.ndarray, points: np.ndarray | None, k: np.ndarray) -> np.ndarray:
    """Return the integers with those negated whose factor is below 0."""
    if integers.dtype.kind != "i" or (points is not None and points.any()):
        raise Refused(
            "quantized", f"{label(node)} has a zero point, or no sign, so a scale below 0 cannot negate its integers"
        )
    below = np.broadcast_to(k < 0, integers.shape)
    if (integers[below] == np.iinfo(integers.dtype).min).any():
        raise Refused("quantized", f"{label(node)} holds {np.iinfo(integers.dtype).min}, which has no counterpart")
    return np.where(below, -integers, integers).astype(integers.dtype)


def _slice_along(array: np.ndarray, axis: int) -> np.ndarray:
    """Return the first element along every axis except one."""
    return array[tuple(slice(None) if place == axis else slice(0, 1) for place in range(array.ndim))]
