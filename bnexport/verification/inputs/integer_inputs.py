"""Ranges for random integers, from where an integer input goes.

An index has to stay below the size of what it indexes; a number of repetitions, a shape or a divisor may be anything but
harmless. So the value is followed through the operators that only compute with it, cast it or move it, to where it becomes a
float or a truth value, is compared with a constant (the range then goes beyond that), and to indices. An input that reaches
anything else is drawn as 0 or 1, which is valid nearly everywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import onnx_ir as ir

from bnexport.graph.constants import Constants
from bnexport.graph.nodes import is_standard
from bnexport.graph.refusal import Refused
from bnexport.graph.shapes import Shapes
from bnexport.verification.inputs.samples import Range

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
    if not is_standard(node, "Cast") or "to" not in node.attributes:
        return False
    target = ir.DataType(node.attributes["to"].as_int())
    return target.is_floating_point() or target is ir.DataType.BOOL


def _range(dtype: ir.DataType) -> Range:
    bits = dtype.bitwidth
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if dtype.is_signed() else (0, (1 << bits) - 1)


def _fits(limits: Range, dtype: ir.DataType) -> bool:
    low, high = _range(dtype)
    return low <= limits[0] and limits[1] <= high
