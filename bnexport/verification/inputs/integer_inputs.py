"""Ranges for random integers, from where an integer input goes.

An index has to stay below the size of what it indexes; a number of repetitions, a shape or a divisor may be anything but
harmless. So the value is followed through the operators that only compute with it, cast it or move it, to where it becomes a
float or a truth value, and to indices. An input that reaches anything else is drawn as 0 or 1, which is valid nearly everywhere.
"""

from __future__ import annotations

import onnx_ir as ir

from bnexport.graph.nodes import is_standard
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
_INDEXING = ("Gather", "GatherElements")


def find_ranges(value: ir.Value) -> tuple[tuple[Range, ...], Range | None]:
    """Return the ranges to try for an integer input, widest first, and the range of its type where any value will do."""
    dtype = value.dtype
    if dtype is None or not dtype.is_integer():
        return (_SAFE,), None
    sizes = _indexed_sizes(value)
    if sizes is None:
        return (_SAFE,), None
    if sizes:
        ranges = [limits for size in sorted(sizes, reverse=True) for limits in ((-size, size - 1), (0, size - 1))]
        return (*(limits for limits in ranges if _fits(limits, dtype)), _SAFE), None
    whole = _range(dtype)
    byte = (-(1 << (_BYTE - 1)), (1 << (_BYTE - 1)) - 1) if whole[0] else (0, (1 << _BYTE) - 1)
    return (byte if _fits(byte, dtype) else whole, _SAFE), whole


def _indexed_sizes(value: ir.Value) -> set[int] | None:
    """Return the sizes of the dimensions that it indexes; None where it reaches an operand for which it is not safe."""
    sizes: set[int] = set()
    waiting, seen = [value], {value}
    while waiting:
        for use in waiting.pop().uses():
            node, place = use.node, use.idx
            if is_standard(node, *_INDEXING) and place == 1:
                size = _indexed_size(node)
                if size is None:
                    return None
                sizes.add(size)
                continue
            if _is_listed(node, place, _ENDING) or _to_another_kind(node):
                continue
            if not _is_listed(node, place, _CARRYING):
                return None
            if any(output.is_graph_output() and output.graph is not value.graph for output in node.outputs):
                return None  # It leaves a subgraph.
            waiting += [output for output in node.outputs if output not in seen]
            seen.update(node.outputs)
    return sizes


def _indexed_size(node: ir.Node) -> int | None:
    data, axis = node.inputs[0], node.attributes.get_int("axis", 0)
    if data is None or data.shape is None or not -len(data.shape) <= axis < len(data.shape):
        return None
    size = data.shape[axis]
    return size if isinstance(size, int) and size > 0 else None


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
