"""Shapes that the model does not declare, from ONNX's own inference, kept beside the model.

The model's value_info stays as it is: inference runs on a copy, once, when a rule first asks for a
shape that is missing. Functions are not covered.
"""

from __future__ import annotations

import logging

import onnx_ir as ir

Shape = tuple[int | str | None, ...]


class Shapes:
    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._inferred: tuple[dict[ir.Value, Shape], dict[ir.Value, ir.DataType]] | None = None

    def of(self, value: ir.Value) -> Shape | None:
        """Sizes (numbers, names, None for unknown), or None where not even the rank is known."""
        if value.shape is not None:
            return _plain(value.shape)
        if value.const_value is not None and value.is_initializer():
            return _plain(value.const_value.shape)
        return self._all()[0].get(value)

    def dtype(self, value: ir.Value) -> ir.DataType | None:
        """The element type, or None where it is not known."""
        if value.dtype is not None:
            return value.dtype
        if value.const_value is not None:
            return value.const_value.dtype
        return self._all()[1].get(value)

    def same(self, new: ir.Value, old: ir.Value) -> None:
        """Tells that `new`, a value made since, has the shape and type of `old`."""
        shapes, types = self._all() if self._inferred is not None else ({}, {})
        if old in shapes:
            shapes[new] = shapes[old]
        if old in types:
            types[new] = types[old]

    def _all(self) -> tuple[dict[ir.Value, Shape], dict[ir.Value, ir.DataType]]:
        if self._inferred is None:
            self._inferred = _infer(self._model)
        return self._inferred


def _plain(shape: ir.ShapeProtocol) -> Shape:
    # Some exporters write -1 for a free size.
    return tuple((size if size >= 0 else None) if isinstance(size, int) else size.value for size in shape)


def _infer(model: ir.Model) -> tuple[dict[ir.Value, Shape], dict[ir.Value, ir.DataType]]:
    from onnx_ir.passes.common import ShapeInferencePass

    copy = model.clone()
    # A model that inference cannot digest only leaves shapes unknown; its complaint helps nobody.
    logger = logging.getLogger("onnx_ir.passes.common.shape_inference")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(copy)
    except Exception:
        return {}, {}
    finally:
        logger.setLevel(level)
    shapes: dict[ir.Value, Shape] = {}
    types: dict[ir.Value, ir.DataType] = {}
    for original, inferred in zip(model.graphs(), copy.graphs(), strict=True):
        for node, twin in zip(original, inferred, strict=True):
            for value, other in zip(node.outputs, twin.outputs, strict=True):
                if value.shape is None and other.shape is not None:
                    shapes[value] = _plain(other.shape)
                if value.dtype is None and other.dtype is not None:
                    types[value] = other.dtype
    return shapes, types
