"""Declared and inferred shapes and element types of one model."""

from __future__ import annotations

import logging

import onnx_ir as ir

Shape = tuple[int | str | None, ...]


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

    def keeps_floats(self, cast: ir.Node, data: ir.Value) -> bool:
        """Whether a Cast is known to make floats of floats."""
        source, target = self.dtype(data), cast.attributes.get("to")
        if source is None or target is None or target.is_ref():
            return False
        return source.is_floating_point() and ir.DataType(target.as_int()).is_floating_point()

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
