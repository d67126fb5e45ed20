"""Sizes of the values that enter a region: channels as they are, everything else as small as kernels allow."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from bnexport.verification.local.regions import Region, Side

Shape = tuple[int | str | None, ...]

_SHAPING = ("Shape", "Reshape", "Expand", "Tile", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Split", "Gather")

# Elements of all entering values together, if each is to be a variable.
MOST_VARIABLES = 2500


class ModelShapes:
    """Declared and inferred shapes of a model; inference runs when it is first needed."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._inferred: dict[ir.Value, Shape] | None = None
        self._types: dict[ir.Value, ir.DataType] = {}

    def of(self, value: ir.Value) -> Shape | None:
        """Return the shape, or None if not even the rank is known."""
        if value.shape is not None:
            return _plain(value.shape)
        return self._all().get(value)

    def rank(self, value: ir.Value) -> int | None:
        shape = self.of(value)
        return None if shape is None else len(shape)

    def dtype(self, value: ir.Value) -> ir.DataType | None:
        """Return the element type, None where it is not known."""
        if value.dtype is None:
            self._all()
        return value.dtype or self._types.get(value)

    def _all(self) -> dict[ir.Value, Shape]:
        if self._inferred is None:
            self._inferred = {}
            self._infer()
        return self._inferred

    def _infer(self) -> None:
        from onnx_ir.passes.common import ShapeInferencePass

        assert self._inferred is not None
        copy = self._model.clone()
        pairs = [
            (node, twin)
            for graph, other in zip(self._model.graphs(), copy.graphs(), strict=True)
            for node, twin in zip(graph, other, strict=True)
        ]
        logger = logging.getLogger("onnx_ir.passes.common.shape_inference")
        level = logger.level
        logger.setLevel(logging.CRITICAL)
        try:
            ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(copy)
        except Exception:  # a model that inference cannot digest leaves sizes unknown
            return
        finally:
            logger.setLevel(level)
        for node, twin in pairs:
            for value, other in zip(node.outputs, twin.outputs, strict=True):
                if other.shape is not None:
                    self._inferred[value] = _plain(other.shape)
                if other.dtype is not None:
                    self._types[value] = other.dtype


def _plain(shape: ir.ShapeProtocol) -> Shape:
    return tuple((size if size >= 0 else None) if isinstance(size, int) else size.value for size in shape)


def candidates(region: Region, side: Side, shapes: ModelShapes) -> Iterator[list[tuple[int, ...]]]:
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


def depends_on_sizes(region: Region) -> bool:
    """Whether the region reads or sets sizes, so that equality at one batch says little about others."""
    return any(node.op_type in _SHAPING for node in region.nodes[0])


def keeps_declared(sizes: Sequence[tuple[int, ...]], region: Region, shapes: ModelShapes) -> bool:
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
    total, stride = 1, 1
    for node in region.nodes[0]:
        extents, steps = [1], [1]
        kernel = node.attributes.get("kernel_shape")
        if kernel is not None and not kernel.is_ref():
            extents = list(kernel.as_ints())
        elif node.op_type in ("Conv", "ConvTranspose") and len(node.inputs) > 1 and node.inputs[1] is not None:
            leaf = side.constants.leaf(node.inputs[1])
            extents = list(leaf.shape.numpy()[2:]) if leaf is not None else [1]
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
    return min(max(total, 2) + (1 if total > 1 else 0), 24)


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
