"""Shapes inferred by ONNX for values without a declared shape, stored outside the model.

The model's value_info stays as it is: inference runs on a copy, once, when a rule first asks for a
shape that is missing. A function's inputs have what all its calls agree on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import onnx_ir as ir

from bnexport.graph.calls import callers_first, calls, expanded_sizes
from bnexport.graph.surgery import Surgery

Shape = tuple[int | str | None, ...]
# Nodes that inference may look at behind the calls of functions.
_EXPANDED = 50_000
Inferred = tuple[dict[ir.Value, Shape], dict[ir.Value, ir.DataType]]


def sizes_of(shape: ir.ShapeProtocol) -> Shape:
    """Return the sizes of a declared shape: numbers, names, None if unknown."""
    # Paddle writes -1 for a free size, others an empty name; ONNX Runtime takes both for an unknown one.
    return tuple((size if size >= 0 else None) if isinstance(size, int) else size.value or None for size in shape)


class Shapes:
    def __init__(self, model: ir.Model, surgery: Surgery | None = None) -> None:
        self._model = model
        self._surgery = surgery or Surgery()
        self._inferred: Inferred | None = None

    def of(self, value: ir.Value) -> Shape | None:
        """Return the sizes (numbers, names, None if unknown), or None if the rank is unknown."""
        shape = _declared(value)
        return self._all()[0].get(value) if shape is None else shape

    def dtype(self, value: ir.Value) -> ir.DataType | None:
        """Return the element type, or None if it is unknown."""
        if value.dtype is not None:
            return value.dtype
        if value.const_value is not None:
            return value.const_value.dtype
        return self._all()[1].get(value)

    def same(self, new: ir.Value, old: ir.Value) -> None:
        """Record that the new value `new` has the shape and type of `old`."""
        shapes, types = self._all() if self._inferred is not None else ({}, {})
        if old in shapes:
            shapes[new] = shapes[old]
        if old in types:
            types[new] = types[old]

    def _all(self) -> Inferred:
        if self._inferred is None:
            self._inferred = _infer(self._model, self._surgery)
        return self._inferred


def _declared(value: ir.Value) -> Shape | None:
    if value.shape is not None:
        return sizes_of(value.shape)
    if value.const_value is not None and value.is_initializer():
        return sizes_of(value.const_value.shape)
    return None


def _infer(model: ir.Model, surgery: Surgery) -> Inferred:
    shapes: dict[ir.Value, Shape] = {}
    types: dict[ir.Value, ir.DataType] = {}
    copy = model.clone()
    main, sizes = expanded_sizes(model)
    if main + sum(sizes.values()) > _EXPANDED:
        # ONNX infers each call again; without the bodies it leaves the results of calls unknown.
        copy.functions.clear()
    _match(model.graphs(), copy.graphs(), copy, surgery, shapes, types)
    callers = calls(model)
    for key in callers_first(model):
        function = model.functions[key]
        twin = function.clone()
        for index, formal in enumerate(function.inputs):
            actual = [node.inputs[index] if index < len(node.inputs) else None for node in callers.get(key, ())]
            shape, dtype = _common(actual, shapes, types)
            if shape is not None:
                shapes[formal] = shape
                twin.inputs[index].shape = ir.Shape(shape)
            if dtype is not None:
                types[formal] = dtype
                twin.inputs[index].dtype = dtype
        body = ir.Model(twin.graph, ir_version=model.ir_version, functions=list(copy.functions.values()))
        _match((function.graph, *function.subgraphs()), (twin.graph, *twin.subgraphs()), body, surgery, shapes, types)
    return shapes, types


def _common(
    values: list[ir.Value | None], shapes: dict[ir.Value, Shape], types: dict[ir.Value, ir.DataType]
) -> tuple[Shape | None, ir.DataType | None]:
    """Return the value on which all calls of a function agree."""
    known: list[Shape | None] = []
    for value in values:
        shape = None if value is None else _declared(value)
        known.append(shapes.get(value) if value is not None and shape is None else shape)
    dtypes = {None if value is None else value.dtype or types.get(value) for value in values}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    first = known[0] if known else None
    if first is None or any(shape is None or len(shape) != len(first) for shape in known):
        return None, dtype
    sizes = zip(*(shape for shape in known if shape is not None), strict=True)
    # A name means one size in one graph only: two calls may give it two values.
    alone = len(values) == 1
    return tuple(
        size[0] if len(set(size)) == 1 and (alone or isinstance(size[0], int)) else None for size in sizes
    ), dtype


def _match(
    originals: Iterable[ir.Graph],
    copies: Iterable[ir.Graph],
    copy: ir.Model,
    surgery: Surgery,
    shapes: dict[ir.Value, Shape],
    types: dict[ir.Value, ir.DataType],
) -> None:
    """Infer the shapes of `copy` and record those that the originals do not declare. Dead nodes are ignored."""
    from onnx_ir.passes.common import ShapeInferencePass

    pairs: list[tuple[ir.Node, ir.Node]] = []
    dead: list[tuple[ir.Node, ir.Node]] = []
    for original, twin_graph in zip(originals, copies, strict=True):
        for node, twin in zip(original, twin_graph, strict=True):
            (dead if surgery.is_dead(node) else pairs).append((node, twin))
    for _, twin in dead:
        assert twin.graph is not None
        twin.graph.remove(twin)
    outputs = [(node.outputs, twin.outputs) for node, twin in pairs]
    # If inference fails, shapes stay unknown; its log message has no use for the user.
    logger = logging.getLogger("onnx_ir.passes.common.shape_inference")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(copy)
    except Exception:
        return
    finally:
        logger.setLevel(level)
    for originals_out, twins in outputs:
        for value, other in zip(originals_out, twins, strict=True):
            if value.shape is None and other.shape is not None:
                shapes[value] = sizes_of(other.shape)
            if value.dtype is None and other.dtype is not None:
                types[value] = other.dtype
