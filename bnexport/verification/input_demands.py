"""What a model asks of its inputs: ranges of integers, sets of floats, texts and sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from bnexport.graph.constants import Constants
from bnexport.graph.nodes import Refused, get_float, is_standard
from bnexport.graph.shapes import Shapes
from bnexport.model_io import walk
from bnexport.verification.inputs import FREE_SIZES, LARGER, LARGEST, FloatSet, Kind, Range
from bnexport.verification.proof.sides import cast_target

# Ranges for random integers, from where an integer input goes.
#
# An index has to stay below the size of what it indexes; a number of repetitions, a shape or a divisor may be anything but
# harmless. So the value is followed through the operators that only compute with it, cast it or move it, to where it becomes a
# float or a truth value, is compared with a constant (the range then goes beyond that), and to indices. An input that reaches
# anything else is drawn as 0 or 1, which is valid nearly everywhere.

_SAFE: Range = (0, 1)
_BYTE = 8
# Operators whose output has integers of all operands listed; None lists all.
_CARRYING: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(("Identity", "Abs", "Neg", "Sign", "Add", "Sub", "Mul", "Min", "Max", "Sum", "Concat"), None),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Split", "Slice"), (0,)),
    **dict.fromkeys(("Tile", "Div", "Mod", "ReduceMax", "ReduceMin", "ReduceSum", "Cast"), (0,)),
    **{"Clip": None, "Where": (1, 2), "Pad": (0, 2), "Gather": (0,), "GatherElements": (0,), "GatherND": (0,)},
    **dict.fromkeys(("MatMulInteger", "ConvInteger"), None),
}
# Operators with other outputs, and operands for any integer.
_ENDING: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Shape", "Size"), None),
    **{"DequantizeLinear": (0,), "OneHot": (0,)},
}
_INDEXING = ("Gather", "GatherElements", "GatherND")
# Larger constants are no thresholds.
_LARGEST = 1 << 30


@dataclasses.dataclass
class _Met:
    """What an integer input meets. sizes: of the dimensions that it indexes. offsets: constants that are added to it before.
    compared: the largest constant that it is compared with."""

    sizes: set[int] = dataclasses.field(default_factory=set)
    offsets: set[int] = dataclasses.field(default_factory=set)
    compared: int = 0


def find_ranges(value: ir.Value, model: ir.Model) -> tuple[tuple[Range, ...], Range | None]:
    """Return the ranges to try for an integer input, widest first, and the range of its type where any value will do."""
    dtype = value.dtype
    if dtype is None or not dtype.is_integer():
        return (_SAFE,), None
    met = _Walk(model).follow(value)
    if met is None:
        return (_SAFE,), None
    if met.sizes:
        ranges = [
            limits
            for size in sorted(met.sizes, reverse=True)
            for limits in (
                (-size, size - 1),
                *((0, size - 1 - less) for less in (0, *sorted(met.offsets)) if less < size),
            )
        ]
        return (*(limits for limits in ranges if _fits(limits, dtype)), _SAFE), None
    whole = _range(dtype)
    byte = (-(1 << (_BYTE - 1)), (1 << (_BYTE - 1)) - 1) if whole[0] else (0, (1 << _BYTE) - 1)
    beyond = 2 * met.compared
    wide = (-beyond if whole[0] else 0, beyond)
    ranges = [wide] if beyond > byte[1] and _fits(wide, dtype) else []
    return (*ranges, byte if _fits(byte, dtype) else whole, _SAFE), whole


class _Walk:
    def __init__(self, model: ir.Model) -> None:
        self._shapes = Shapes(model)
        self._constants = Constants(model, self._shapes)

    def follow(self, value: ir.Value) -> _Met | None:
        """Follow an input to what it indexes and is compared with; None where it reaches an operand for which it is not safe."""
        met = _Met()
        waiting, seen = [value], {value}
        while waiting:
            for use in waiting.pop().uses():
                node, place = use.node, use.idx
                if is_standard(node, *_INDEXING) and place == 1:
                    sizes = self._indexed(node)
                    if not sizes:
                        return None
                    met.sizes |= sizes
                    continue
                others = [abs(number) for other in node.inputs if other is not None for number in self._numbers(other)]
                if _is_listed(node, place, _ENDING) or _to_another_kind(node):
                    met.compared = max([met.compared, *others])
                    continue
                if not _is_listed(node, place, _CARRYING):
                    return None
                if any(output.is_graph_output() and output.graph is not value.graph for output in node.outputs):
                    return None  # It leaves a subgraph.
                if is_standard(node, "Add", "Sub"):
                    met.offsets |= {number for number in others if number}
                waiting += [output for output in node.outputs if output not in seen]
                seen.update(node.outputs)
        return met

    def _indexed(self, node: ir.Node) -> set[int]:
        """Return the sizes of the dimensions that a node's indices are of; empty where one is not known."""
        data, indices = node.inputs[:2]
        shape = None if data is None else self._shapes.of(data)
        if shape is None or indices is None:
            return set()
        axis = node.attributes.get_int("axis", 0)
        sizes: tuple[object, ...]
        if is_standard(node, "GatherND"):
            start, taken = node.attributes.get_int("batch_dims", 0), (self._shapes.of(indices) or (1,))[-1]
            sizes = shape[start : start + (taken if isinstance(taken, int) else 1)]
        else:
            sizes = (shape[axis],) if -len(shape) <= axis < len(shape) else ()
        known = {size for size in sizes if isinstance(size, int) and size > 0}
        return known if len(known) == len(set(sizes)) else set()

    def _numbers(self, value: ir.Value) -> tuple[int, ...]:
        """Return the ends of a constant's range; nothing of what is no constant of integers."""
        with contextlib.suppress(Refused):
            array = self._constants.array(value, "constant")
            if array.dtype.kind in "iu" and array.size and np.abs(array).max() <= _LARGEST:
                return int(array.min()), int(array.max())
        return ()


def _is_listed(node: ir.Node, place: int, table: dict[str, tuple[int, ...] | None]) -> bool:
    if not is_standard(node, node.op_type) or node.op_type not in table:
        return False
    places = table[node.op_type]
    return places is None or place in places


def _to_another_kind(node: ir.Node) -> bool:
    """Whether it is a Cast to floats or truth values."""
    target = cast_target(node) if is_standard(node, "Cast") else None
    return target is not None and (target.is_floating_point() or target is ir.DataType.BOOL)


def _range(dtype: ir.DataType) -> Range:
    bits = dtype.bitwidth
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if dtype.is_signed() else (0, (1 << bits) - 1)


def _fits(limits: Range, dtype: ir.DataType) -> bool:
    low, high = _range(dtype)
    return low <= limits[0] and limits[1] <= high


# Sets of float inputs for operators that standard normal numbers hardly reach.
#
#     IsNaN, Equal (x, x)                       NaN
#     IsInf                                     infinities
#     ArgMax, TopK, Hardmax, Unique, ...        equal numbers
#     x > 0.3, Equal, Round, Floor, ...         multiples of 1/2, and numbers equal to the constant
#     x > 1000, Clip, Min, Max, Add             numbers beyond the constant
#     a mask among the inputs                   truth values that are all true
#
# They are drawn only where the reference has such an operator, and only refute. NaN passes sums and products of any form;
# infinities of both signs may cancel in one form only, and are for IsInf alone.

# Texts, and constants that inputs are made equal to.
_TEXTS, _DISTINCT = 1000, 16
_COMPARING = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Clip", "Min", "Max")
# What is added saturates what follows. Places of biases; the other operands are as large as the data.
_ADDING = {"Add": 0, "Sub": 0, "Gemm": 2, "Conv": 2}
_STEPPING = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "Round", "Floor", "Ceil", "Sign")
_MOVING = ("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split", "Concat")
_SELECTING = ("ArgMax", "ArgMin", "TopK", "Hardmax", "Unique")
# A maximum has one sign for all inputs of both signs, and a mean that a branch depends on hardly has a sign.
_SUMMARISING: dict[tuple[str, ...], tuple[Kind, ...]] = {
    ("ReduceMax", "ReduceMin", "GlobalMaxPool"): ("positive", "negative"),
    ("If",): ("positive", "negative", "raised", "lowered"),
}
# Normal numbers of four times a constant's size lie on both sides of it. Larger ones than the last are no thresholds.
_BEYOND = 4.0
_LARGEST_CONSTANT = 1e6


def find_further(model: ir.Model) -> list[FloatSet]:
    """Return the sets that the operators of a model ask for."""
    nodes = [node for graph in walk.graphs(model) for node in graph]
    found = []
    if any(is_standard(node, "IsNaN", "Equal") and len(set(node.inputs)) == 1 for node in nodes):
        found.append(FloatSet("nan"))
    if any(is_standard(node, "IsInf") for node in nodes):
        found.append(FloatSet("infinite"))
    constants = Constants(model, Shapes(model))
    steps = [node for node in nodes if is_standard(node, *_STEPPING) and _reads_input(node, constants)]
    pooled = (node for node in nodes if is_standard(node, "MaxPool") and len(node.outputs) > 1)
    if steps or any(is_standard(node, *_SELECTING) for node in nodes) or any(pooled):
        found.append(FloatSet("rounded", numbers=tuple(sorted(_equal_to(steps, constants)))[:_DISTINCT]))
    if any(value.dtype is ir.DataType.BOOL for value in model.graph.inputs):
        found.append(FloatSet("full"))
    largest = max(_thresholds(constants, nodes), default=0.0)
    if largest > LARGEST:
        found.append(FloatSet("normal", _BEYOND * largest))
    asked = (kinds for operators, kinds in _SUMMARISING.items() if any(is_standard(node, *operators) for node in nodes))
    scale = max(LARGER, _BEYOND * largest)
    return [*found, *(FloatSet(kind, scale) for kind in dict.fromkeys(itertools.chain.from_iterable(asked)))]


def _reads_input(node: ir.Node, constants: Constants) -> bool:
    """Whether numbers of an input arrive as they are, or plus a constant: they can be equal to a threshold, in any rounding."""
    waiting = [value for value in node.inputs if value is not None]
    while waiting:
        value = waiting.pop()
        made = value.producer()
        if made is None:
            if value.is_graph_input() and value.dtype is not None and value.dtype.is_floating_point():
                return True
        elif is_standard(made, *_MOVING) or (
            is_standard(made, "Add", "Sub") and any(map(constants.is_constant, made.inputs))
        ):
            waiting += [each for each in made.inputs if each is not None]
    return False


def _equal_to(steps: list[ir.Node], constants: Constants) -> set[float]:
    """Return the float constants that inputs are compared with."""
    found: set[float] = set()
    for node in steps:
        for value in node.inputs:
            with contextlib.suppress(Refused):
                array = constants.floats(value, "constant")
                found.update(array.reshape(-1)[:_DISTINCT].tolist())
    return {number for number in found if abs(number) <= _LARGEST_CONSTANT}


def find_texts(model: ir.Model) -> tuple[str, ...]:
    """Return the texts in a model's attributes and constants, which its inputs may be compared with; "a" is in few of them."""
    found = dict.fromkeys(("a", ""))
    for graph in walk.graphs(model):
        tensors = [value.const_value for value in graph.initializers.values() if value.const_value is not None]
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type is ir.AttributeType.STRINGS and not attribute.is_ref():
                    found.update(dict.fromkeys(attribute.as_strings()))
                elif attribute.type is ir.AttributeType.TENSOR and not attribute.is_ref():
                    tensors.append(attribute.as_tensor())
        for tensor in tensors:
            if tensor.dtype is ir.DataType.STRING:
                found.update(
                    dict.fromkeys(each.decode(errors="replace") for each in tensor.numpy().reshape(-1)[:_TEXTS])
                )
    return tuple(found)[:_TEXTS]


def _thresholds(constants: Constants, nodes: list[ir.Node]) -> Iterator[float]:
    """Yield the sizes of float constants that values are compared with, or that are added to them."""
    for node in nodes:
        if not is_standard(node, *_COMPARING, *_ADDING):
            continue
        for value in node.inputs[_ADDING.get(node.op_type, 0) :]:
            with contextlib.suppress(Refused):
                yield _size(constants.floats(value, "constant"))
        if is_standard(node, *_ADDING):
            continue
        with contextlib.suppress(Refused):
            yield _size(np.asarray([get_float(node, "min", 0.0), get_float(node, "max", 0.0)]))


def _size(numbers: np.ndarray) -> float:
    sizes = np.abs(numbers)
    return float(sizes.max(initial=0.0, where=sizes <= _LARGEST_CONSTANT))


# Sizes beyond the constants of a graph: where it computes with sizes, another branch or row may be taken there.

_COMPUTING = (
    "Min",
    "Max",
    "Clip",
    "Less",
    "LessOrEqual",
    "Greater",
    "GreaterOrEqual",
    "Equal",
    "Mod",
    "Sub",
    "Div",
    "Range",
    "Slice",
)
_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Pow", "PRelu", "Max", "Min", "Sum", "Mean", "Where")
_TAKING = ("Gather", "Slice", "GatherND", "Resize")
_LARGEST_SIZE, _TABLES = 4096, 4
# Sizes where the graph has no constants, larger and smaller ones.
_USUAL = (257, 33)


def find_operand_sizes(model: ir.Model) -> list[int]:
    """Return the last sizes of constants that values are combined with element by element, and of constant shapes: a free
    size may have to be one.

    Where no usual size runs, 1 may: there everything broadcasts, and much looks equal.
    """
    constants = Constants(model, Shapes(model))
    usual = {1, *(other for _, other in FREE_SIZES)}
    # Vectors, of which a network may have many, come last.
    found: tuple[set[int], set[int]] = (set(), set())
    for node in walk.nodes(model):
        with contextlib.suppress(Refused):
            if is_standard(node, "Reshape"):
                found[0].update(constants.ints(node.inputs[1], "shape")[-1:])
        leaves = [value.const_value for value in node.inputs if value is not None and value.const_value is not None]
        if is_standard(node, *_ELEMENTWISE):
            for shape in (leaf.shape.numpy() for leaf in leaves if len(leaf.shape)):
                found[len(shape) == 1].add(shape[-1])
    return [
        size
        for sizes in (found[0], found[1] - found[0])
        for size in sorted(size for size in sizes if size > 0 and size not in usual)[-_TABLES:]
    ]


def find_bounds(*models: ir.Model) -> list[int]:
    """Return sizes to try for one dimension until one runs, largest first: beyond each constant, all of a table, usual ones.

    Nothing where no model reads a size.
    """
    numbers: set[int] = set()
    tables: set[int] = set()
    reads_sizes = False
    for model in models:
        nodes = [node for graph in walk.graphs(model) for node in graph]
        if not any(is_standard(node, "Shape", "Size") for node in nodes):
            continue
        reads_sizes = True
        constants = Constants(model, Shapes(model))
        for node in nodes:
            if is_standard(node, *_COMPUTING):
                for value in node.inputs:
                    with contextlib.suppress(Refused):
                        numbers.update(constants.ints(value, "constant"))
            if is_standard(node, *_TAKING) and node.inputs and not all(map(constants.is_constant, node.inputs)):
                with contextlib.suppress(Refused):
                    tables.update(constants.describe(node.inputs[0], "table").shape)
    if not reads_sizes:
        return []
    beyond = {2 * each + 1 for each in numbers if 1 < each < _LARGEST_SIZE // 2}
    whole = {each for each in tables if _USUAL[1] < each <= _LARGEST_SIZE}
    return sorted({*sorted(beyond)[-1:], *sorted(whole)[-_TABLES:], *_USUAL}, reverse=True)
