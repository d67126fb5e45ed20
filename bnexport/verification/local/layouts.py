"""Layouts: how the values of a region follow, in their sizes, from what enters it.

A region is evaluated at small sizes. That says something about all sizes only where both parts lay out their data alike:
the same operators but for per-channel maps, with the same attributes, on data of one layout, and with the same expression
of sizes where the graph computes bounds, shapes or numbers from them. Two layouts are one number if they are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

import numpy as np
import onnx_ir as ir

from bnexport.verification.local.attributes import is_default, outputs_count
from bnexport.verification.local.regions import SIZES, Region, Side

# What they make depends on sizes alone.
SIZE_OPERATORS = ("Shape", "Size")
# They keep the layout of their data.
_POINTWISE = ("BatchNormalization", "Add", "Sub", "Mul", "Div", "Sum", "Neg", "Identity", "Cast", "Dropout", "Relu")
WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
# Above it a Slice ends where its data does.
ENDLESS = (1 << 31) - 1


class Layouts:
    """The layouts of one region's values. differ: the two parts lay out their data in different ways.

    computed: the graph computes something from sizes. clipped: a Slice has bounds that a size may lie beyond.
    """

    def __init__(self, region: Region, sides: tuple[Side, Side]) -> None:
        self._sides = sides
        self._ids: dict[Hashable, int] = {}
        self._of: tuple[dict[ir.Value, int], dict[ir.Value, int]] = ({}, {})
        # Values that follow from sizes, and nodes that lay out data by them.
        self._sized: tuple[set[ir.Value], set[ir.Value]] = (set(), set())
        self.clipped = False
        moves: tuple[list[int], list[int]] = ([], [])
        for mine, theirs in region.entering:
            known = self._of[0].get(mine)
            if known is None and theirs is not None:
                known = self._of[1].get(theirs)
            known = self._id(("enters", len(self._ids))) if known is None else known
            self._of[0].setdefault(mine, known)
            if theirs is not None:
                self._of[1].setdefault(theirs, known)
        for side, nodes in enumerate(region.nodes):
            for node in nodes:
                moves[side].extend(self._read(side, node))
            if region.output[side] in self._sized[side]:
                moves[side].append(self._of[side][region.output[side]])
        self.computed = any(self._sized)
        self.differ = sorted(moves[0]) != sorted(moves[1])

    def expression(self, side: int, value: ir.Value | None) -> int | None:
        """Return the number of a value that follows from sizes; None for any other."""
        return self._of[side][value] if value in self._sized[side] else None

    def is_opaque(self, side: int, node: ir.Node) -> bool:
        """Whether what a node does to its data depends on sizes: then both models need it, on related data."""
        if node.outputs[0] in self._sized[side]:
            return False
        names_sizes = SIZES.get(node.op_type, ())
        return self._clips(side, node) or any(
            self.expression(side, value) is not None and (index in names_sizes or not self._is_float(side, value))
            for index, value in enumerate(node.inputs)
        )

    def _is_float(self, side: int, value: ir.Value | None) -> bool:
        dtype = None if value is None else self._sides[side].shapes.dtype(value)
        return dtype is not None and dtype.is_floating_point()

    def _clips(self, side: int, node: ir.Node) -> bool:
        return node.op_type == "Slice" and any(0 < abs(bound) < ENDLESS for bound in bounds(node, self._sides[side]))

    def _id(self, key: Hashable) -> int:
        return self._ids.setdefault(key, len(self._ids))

    def _read(self, index: int, node: ir.Node) -> list[int]:
        """Give layouts to the outputs of a node; the number of what it does, unless it keeps the layout."""
        side, of, sized = self._sides[index], self._of[index], self._sized[index]
        data = [value for _, value in side.data(node)]
        is_sized = node.op_type in SIZE_OPERATORS or (bool(data) and all(value in sized for value in data))
        self.clipped |= self._clips(index, node)
        if not is_sized and node.op_type in _POINTWISE and not sized.intersection(data):
            known = sorted({of[value] for value in data})
            layout = known[0] if len(known) == 1 else self._id(("together", *known))
            of.update(dict.fromkeys(node.outputs, layout))
            return []
        version = side.constants.version(node)
        kernel = side.kernel(node) if node.op_type in WEIGHTED else None
        attributes = sorted(
            (name, str(attribute.value))
            for name, attribute in node.attributes.items()
            if not is_default(node, attribute, version, kernel=kernel)
        )
        operands = [self._operand(index, node, place, is_sized) for place in range(len(node.inputs))]
        while operands and operands[-1] is None:
            operands.pop()
        key = (*node.op_identifier(), version, outputs_count(node, version), kernel, tuple(attributes), tuple(operands))
        number = self._id(key)
        for place, output in enumerate(node.outputs):
            of[output] = self._id((number, place))
        if is_sized:
            sized.update(node.outputs)
            return []
        if kernel and set(kernel) == {1} and all(name == "group" for name, _ in attributes):
            of[node.outputs[0]] = of[data[0]]
        return [number]

    def _operand(self, index: int, node: ir.Node, place: int, is_sized: bool) -> Hashable:
        """Return the layout of an operand. Numbers of a constant count where sizes select from it, or it is no weight."""
        side, value = self._sides[index], node.inputs[place]
        if value is None or not value.name:
            return None
        if not side.constants.has(value):
            return self._of[index][value]
        if not is_sized and (place == 0 or node.op_type in (*_POINTWISE, *WEIGHTED)):
            return None
        array = np.ascontiguousarray(side.constants.array(value))
        content = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
        return array.dtype.name, array.shape, hashlib.blake2b(content).digest()


def bounds(node: ir.Node, side: Side) -> list[int]:
    """Return the starts and ends of a Slice, as far as they are constant."""
    found = []
    for name in ("starts", "ends"):
        attribute = node.attributes.get(name)
        found += list(attribute.as_ints()) if attribute is not None and not attribute.is_ref() else []
    return found + [bound for index in (1, 2) for bound in integers(node, index, side)]


def integers(node: ir.Node, index: int, side: Side) -> list[int]:
    """Return the constant at an input; empty where there is none."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None or not side.constants.has(value):
        return []
    return [int(each) for each in side.constants.array(value).reshape(-1)]
