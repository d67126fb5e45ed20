"""onnx.reference, with its wrong operators replaced by right ones.

Wrong, whatever the model says (onnx 1.23): Softmax, LogSoftmax and Hardmax before opset 13, which are those of opset 13;
BatchNormalization before opset 14, which blends the statistics of the batch into the given ones, or takes them alone.
`tests/verification/test_onnx_reference.py` fails once onnx has mended one of them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx.reference
from onnx.reference.op_run import OpRun

# Attributes are float32.
_EPSILON, _MOMENTUM = float(np.float32(1e-5)), float(np.float32(0.9))


class _Operator(OpRun):
    """An operator of all opsets. It sees the attributes that its node has; the schema's defaults are the newest opset's."""

    op_schema = None

    @property
    def version(self) -> int:
        """Opset of the graph or function that the node is in."""
        return int(self.run_params["opsets"][""])


class _AlongAxis(_Operator):
    """A function of the values along one axis; before opset 13, along all dimensions from the axis on."""

    def _run(self, x: np.ndarray, axis: int | None = None) -> tuple[np.ndarray]:
        if self.version >= 13:
            return (self.along(x, -1 if axis is None else axis),)
        place = 1 if axis is None else axis % max(x.ndim, 1)
        rows = x.reshape(math.prod(x.shape[:place]), math.prod(x.shape[place:]))
        return (self.along(rows, 1).reshape(x.shape),)

    def along(self, x: np.ndarray, axis: int) -> np.ndarray:
        raise NotImplementedError


class Softmax(_AlongAxis):
    def along(self, x: np.ndarray, axis: int) -> np.ndarray:
        powers = np.exp(x - x.max(axis, keepdims=True, initial=-np.inf))
        return (powers / powers.sum(axis, keepdims=True)).astype(x.dtype)


class LogSoftmax(_AlongAxis):
    def along(self, x: np.ndarray, axis: int) -> np.ndarray:
        shifted = x - x.max(axis, keepdims=True, initial=-np.inf)
        return (shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))).astype(x.dtype)


class Hardmax(_AlongAxis):
    def along(self, x: np.ndarray, axis: int) -> np.ndarray:
        result = np.zeros_like(x)
        if x.size:
            np.put_along_axis(result, np.argmax(x, axis, keepdims=True), 1, axis)
        return result


class BatchNormalization(_Operator):
    """Inference in all opsets; training, which has other outputs before opset 14, from there on."""

    def _run(
        self,
        x: np.ndarray,
        scale: np.ndarray,
        bias: np.ndarray,
        mean: np.ndarray,
        var: np.ndarray,
        **attributes: Any,
    ) -> tuple[np.ndarray, ...]:
        if not attributes.get("spatial", 1):
            raise NotImplementedError("BatchNormalization with spatial=0")
        statistics: tuple[np.ndarray, ...] = (mean, var)
        new: tuple[np.ndarray, ...] = ()
        if self._trains(attributes):
            if self.version < 14:
                raise NotImplementedError("BatchNormalization in training before opset 14")
            axes = tuple(axis for axis in range(x.ndim) if axis != 1)
            statistics, kept = (x.mean(axes), x.var(axes)), attributes.get("momentum", _MOMENTUM)
            new = tuple(
                (old * kept + now * (1 - kept)).astype(old.dtype)
                for old, now in zip((mean, var), statistics, strict=True)
            )
        shape = (-1, *(1,) * (x.ndim - 2))
        scale, bias, mean, var = (each.reshape(shape) for each in (scale, bias, *statistics))
        y = scale * (x - mean) / np.sqrt(var + attributes.get("epsilon", _EPSILON)) + bias
        return (y.astype(x.dtype), *new)

    def _trains(self, attributes: dict[str, Any]) -> bool:
        if self.version >= 14:
            return bool(attributes.get("training_mode", 0))
        if self.version < 7:
            return not attributes.get("is_test", 0)
        return sum(map(bool, self.onnx_node.output)) > 1


MENDED: tuple[type[OpRun], ...] = (Softmax, LogSoftmax, Hardmax, BatchNormalization)


class MendedEvaluator(onnx.reference.ReferenceEvaluator):
    """ReferenceEvaluator with the operators above, in functions and subgraphs, too, which it makes by its own class."""

    def __init__(self, proto: Any, **options: Any) -> None:
        super().__init__(proto, **{**options, "new_ops": list(MENDED)})
