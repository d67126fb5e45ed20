"""Sizes of the values that enter a region: channels as they are, everything else as small as kernels allow."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeGuard

import numpy as np
import onnx_ir as ir

from bnexport.graph.shapes import Shape, Shapes
from bnexport.verification.proof.attributes import is_default, outputs_count
from bnexport.verification.proof.regions import SIZES, Region, Side

# Layouts: how the values of a region follow, in their sizes, from what enters it.
#
# A region is evaluated at small sizes. That says something about all sizes only where both parts lay out their data alike:
# the same operators but for per-channel maps, with the same attributes, on data of one layout, and with the same expression
# of sizes where the graph computes bounds, shapes or numbers from them. Two layouts are one number if they are equal.

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


_SHAPING = ("Shape", "Reshape", "Expand", "Tile", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Split", "Gather")

# Attributes and inputs that name places or widths along an axis.
_PLACES = {"Slice": ("starts", "ends"), "Pad": ("pads",), "Split": ("split",)}
_PLACED = {"Slice": (1, 2), "Pad": (1,), "Split": (1,), "Gather": (1,)}
# Remainders of a size that are tried.
_MOST_STEPS = 8
# Bounds of a Slice, a Pad or a Split that free sizes are chosen beyond.
_MOST_BOUND = 16
# Elements of all entering values together, if each is to be a variable.
MOST_VARIABLES = 2500


def candidates(region: Region, side: Side, shapes: Shapes) -> Iterator[list[tuple[int, ...]]]:
    """Sizes of the entering values to try, smallest first; none where a rank is not known."""
    known: list[Shape] = []
    for value, _ in region.entering:
        shape = shapes.of(value)
        if shape is None:
            shape = _from_reader(value, region, side)
        if shape is None:
            return
        known.append(shape)
    need = _reach(region, side)
    tried = []
    batches = [1, *_batches(region, side)]
    # A batch of 1 would hide what a shape does with it.
    first = (3, 2) if depends_on_sizes(region) else (1,)
    for shrink, least, batch in (
        *((True, need, batch) for batch in first),
        (True, 2 * need, 1),
        *((False, least, batch) for batch in batches for least in (need, 7)),
    ):
        sizes = _chosen(known, least, batch, shrink)
        if sizes not in tried:
            tried.append(sizes)
            yield sizes


def residues(
    region: Region, sides: tuple[Side, Side], shapes: Shapes, *, shrink: bool = False
) -> list[list[tuple[int, ...]]]:
    """Sizes at which two parts have to be equal that move over their data in different ways.

    Declared sizes stay; free ones are larger than 1 and than each bound, and differ from axis to axis. Padding and rounding
    depend on a size by its remainder under division by the strides, so each remainder is there. Empty where a rank is
    not known, or strides or bounds are too large. shrink: declared sizes above these are taken for free ones: what holds at
    each remainder holds at them.
    """
    known = [shapes.of(value) for value, _ in region.entering]
    declared = [shape for shape in known if shape is not None]
    several = list(zip(region.nodes, sides, strict=True))
    steps = max(_stride(nodes, side) for nodes, side in several)
    bound = max(_bound(nodes, side) for nodes, side in several)
    if len(declared) < len(known) or steps > _MOST_STEPS or bound > _MOST_BOUND:
        return []
    need = _reach(region, sides[0]) + bound
    small = [_chosen(declared, need + step, 2, shrink) for step in range(steps)]
    small.append(_chosen(declared, need, 3, shrink))
    # Beyond the bounds the batch is larger than every other axis, so that no size is another one's.
    beyond = need + steps + max(map(len, declared), default=0)
    large = [_chosen(declared, need + step, beyond + step, shrink) for step in range(steps)] if bound else []
    return [*small, *large]


def _stride(nodes: Sequence[ir.Node], side: Side) -> int:
    """Return the product of the largest strides and steps."""
    strides = [list(each.as_ints()) for node in nodes for each in [node.attributes.get("strides")] if _is_given(each)]
    steps = [integers(node, 4, side) for node in nodes if node.op_type == "Slice"]
    return math.prod(max(map(abs, each), default=1) for each in (*strides, *steps))


def _bound(nodes: Sequence[ir.Node], side: Side) -> int:
    """Return the largest place or width along an axis that an operator names."""
    found = [0]
    for node in nodes:
        for name in _PLACES.get(node.op_type, ()):
            attribute = node.attributes.get(name)
            found += list(attribute.as_ints()) if _is_given(attribute) else []
        for index in _PLACED.get(node.op_type, ()):
            found += integers(node, index, side)
    return max(size for size in map(abs, found) if size < ENDLESS)


def _is_given(attribute: ir.Attr | None) -> TypeGuard[ir.Attr]:
    return attribute is not None and not attribute.is_ref()


def ones(region: Region, side: Side, shapes: Shapes) -> Iterator[list[list[tuple[int, ...]]]]:
    """Sizes with a free batch of 1, and with every free size 1; each with small and with declared sizes elsewhere."""
    known = [shapes.of(value) for value, _ in region.entering]
    declared = [shape for shape in known if shape is not None]
    if len(declared) < len(known):
        return
    for least in (_reach(region, side), 1):
        yield [_chosen(declared, least, 1, shrink) for shrink in (True, False)]


def depends_on_sizes(region: Region) -> bool:
    """Whether the region reads or sets sizes, so that equality at one batch says little about others."""
    return any(node.op_type in _SHAPING for nodes in region.nodes for node in nodes)


def keeps_declared(sizes: Sequence[tuple[int, ...]], region: Region, shapes: Shapes) -> bool:
    """Whether every size that the model declares is as it says."""
    for (value, _), chosen in zip(region.entering, sizes, strict=True):
        shape = shapes.of(value)
        if shape is None or any(isinstance(one, int) and one != two for one, two in zip(shape, chosen, strict=False)):
            return False
    return True


def _batches(region: Region, side: Side) -> list[int]:
    """Sizes of the batch that a constant shape of the region asks for."""
    found = {2: None}
    for node in region.nodes[0]:
        value = node.inputs[1] if node.op_type in ("Reshape", "Expand") and len(node.inputs) > 1 else None
        if value is not None and side.constants.has(value):
            shape = side.constants.array(value).reshape(-1)
            if shape.size and 0 < shape[0] < 1024:
                found[int(shape[0])] = None
    return list(found)


def _chosen(known: Sequence[Shape], least: int, batch: int, shrink: bool) -> list[tuple[int, ...]]:
    names: dict[object, int] = {}
    result = []
    for shape in known:
        sizes = []
        for axis, size in enumerate(shape):
            # Different sizes along different axes: an exchanged axis shows.
            fresh = batch if axis == 0 else least + max(axis - 2, 0)
            if isinstance(size, int) and not (shrink and (axis == 0 or (axis > 1 and len(shape) > 2 and size > fresh))):
                sizes.append(size)
            elif size is None:
                sizes.append(fresh)
            else:
                sizes.append(names.setdefault((size, axis) if isinstance(size, int) else size, fresh))
        result.append(tuple(sizes))
    return result


def _reach(region: Region, side: Side) -> int:
    """Return how far an output element of the region sees along an axis: a border and an inner point fit in."""
    return min(max(_extent(nodes, side) for nodes in region.nodes), 24)


def _extent(nodes: Sequence[ir.Node], side: Side) -> int:
    total, stride = 1, 1
    for node in nodes:
        extents, steps = [1], [1]
        kernel = node.attributes.get("kernel_shape")
        if kernel is not None and not kernel.is_ref():
            extents = list(kernel.as_ints())
        elif node.op_type in ("Conv", "ConvTranspose") and len(node.inputs) > 1 and node.inputs[1] is not None:
            extents = list(side.kernel(node) or [1])
        for name, target in (("dilations", extents), ("strides", steps)):
            attribute = node.attributes.get(name)
            if attribute is not None and not attribute.is_ref():
                values = list(attribute.as_ints())
                if target is steps:
                    steps = values
                else:
                    extents = [(size - 1) * step + 1 for size, step in zip(extents, values, strict=False)]
        total += (max(extents, default=1) - 1) * stride
        stride *= max(steps, default=1)
    return max(total, 2) + (1 if total > 1 else 0)


def _from_reader(value: ir.Value, region: Region, side: Side) -> Shape | None:
    """Return what a convolution says about the shape of its data."""
    inside = set(region.nodes[0])
    for use in value.uses():
        node = use.node
        if node in inside and node.op_type in ("Conv", "ConvTranspose") and use.idx == 0:
            weight = node.inputs[1] if len(node.inputs) > 1 else None
            leaf = None if weight is None else side.constants.leaf(weight)
            if leaf is not None and len(leaf.shape) > 2:
                sizes = leaf.shape.numpy()
                group = node.attributes["group"].as_int() if "group" in node.attributes else 1
                channels = sizes[1] * group if node.op_type == "Conv" else sizes[0]
                return (None, channels, *[None] * (len(sizes) - 2))
    return None


def total(sizes: Sequence[tuple[int, ...]]) -> int:
    """Elements of all of them."""
    return sum(math.prod(size) for size in sizes)
