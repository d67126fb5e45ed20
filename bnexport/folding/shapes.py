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
        self._inferred: dict[ir.Value, Shape] | None = None

    def of(self, value: ir.Value) -> Shape | None:
        """Sizes (numbers, names, None for unknown), or None where not even the rank is known."""
        if value.shape is not None:
            return _plain(value.shape)
        if value.const_value is not None and value.is_initializer():
            return _plain(value.const_value.shape)
        if self._inferred is None:
            self._inferred = _infer(self._model)
        return self._inferred.get(value)


def _plain(shape: ir.ShapeProtocol) -> Shape:
    return tuple(size if isinstance(size, int) else size.value for size in shape)


def _infer(model: ir.Model) -> dict[ir.Value, Shape]:
    from onnx_ir.passes.common import ShapeInferencePass

    copy = model.clone()
    # A model that inference cannot digest only leaves shapes unknown; its complaint helps nobody.
    logger = logging.getLogger("onnx_ir.passes.common.shape_inference")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(copy)
    finally:
        logger.setLevel(level)
    found: dict[ir.Value, Shape] = {}
    for original, inferred in zip(model.graphs(), copy.graphs(), strict=True):
        for node, twin in zip(original, inferred, strict=True):
            for value, other in zip(node.outputs, twin.outputs, strict=True):
                if value.shape is None and other.shape is not None:
                    found[value] = _plain(other.shape)
    return found
