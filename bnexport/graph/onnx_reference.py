"""onnx.reference, with its wrong operators, and those that are far too slow, replaced by right ones in NumPy.

Wrong, whatever the model says (onnx 1.23): Softmax, LogSoftmax and Hardmax before opset 13, which are those of opset 13;
BatchNormalization before opset 14, which blends the statistics of the batch into the given ones, or takes them alone;
GlobalMaxPool of data that is no image; Squeeze of an empty list of axes, Unsqueeze of one that is not sorted, and Shape up to
an end before the first axis. `tests/graph/test_constants.py` fails once onnx has mended one of them.
Inexact: DequantizeLinear, of integers beyond 2**24. Slow: Conv and ConvTranspose,

    y[n, o](p) = sum_ij W[o, i, j] x[n, i](stride p + dilation j - begin)    and its transpose,

one matrix product for each position j of the kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx.reference
from onnx.helper import tensor_dtype_to_np_dtype
from onnx.reference.op_run import OpRun

from bnexport.graph import mmcv_reference

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


class Shape(_Operator):
    def _run(self, x: np.ndarray, start: int = 0, end: int | None = None) -> tuple[np.ndarray]:
        return (np.asarray(x.shape[start:end], np.int64),)


class Squeeze(_Operator):
    """axes: an attribute before opset 13, then an input; all of size 1 where there are none."""

    def _run(self, x: np.ndarray, axes: Sequence[int] | np.ndarray | None = None) -> tuple[np.ndarray]:
        return (np.squeeze(x, tuple(axes) if axes is not None and len(axes) else None),)


class Unsqueeze(_Operator):
    def _run(self, x: np.ndarray, axes: Sequence[int] | np.ndarray) -> tuple[np.ndarray]:
        return (np.expand_dims(x, tuple(axes)),)


class GlobalMaxPool(_Operator):
    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x.max(tuple(range(2, x.ndim)), keepdims=True),)


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


class DequantizeLinear(_Operator):
    """(x - zero) * scale, exact for all integers, rounded to the type of the scale; for each tensor, axis or block."""

    def _run(
        self,
        x: np.ndarray,
        scale: np.ndarray,
        zero: np.ndarray | None = None,
        axis: int = 1,
        block_size: int = 0,
        output_dtype: int = 0,
    ) -> tuple[np.ndarray]:
        def along(values: np.ndarray) -> np.ndarray:
            wide = values.astype(np.float64)
            if block_size:
                return np.repeat(wide, block_size, axis).take(range(x.shape[axis]), axis)
            return wide.reshape([-1 if place == axis % x.ndim else 1 for place in range(x.ndim * (wide.size > 1))])

        exact = (x.astype(np.float64) - (0.0 if zero is None else along(zero))) * along(scale)
        return (exact.astype(tensor_dtype_to_np_dtype(output_dtype) if output_dtype else scale.dtype),)


class QuantizeLinear(_Operator):
    """round(x / scale) + zero, to even and saturated, with the quotient in float32, as engines compute it."""

    def _run(
        self,
        x: np.ndarray,
        scale: np.ndarray,
        zero: np.ndarray | None = None,
        axis: int = 1,
        saturate: int = 1,
    ) -> tuple[np.ndarray]:
        def along(values: np.ndarray) -> np.ndarray:
            place = axis % max(x.ndim, 1)
            return values.reshape([-1 if each == place else 1 for each in range(x.ndim * (values.size > 1))])

        dtype = np.dtype(np.uint8) if zero is None else zero.dtype
        rounded = np.rint(x.astype(np.float32) / along(scale.astype(np.float32)))
        total = rounded if zero is None else rounded + along(zero.astype(np.float32))
        limits = np.iinfo(dtype)
        return (np.clip(total, limits.min, limits.max).astype(dtype),)


class _Windowed(_Operator):
    """Conv or ConvTranspose: x is (N, C, *S), w has its kernel behind two axes."""

    def _run(
        self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, group: int = 1, **attributes: Any
    ) -> tuple[np.ndarray]:
        dims, kernel = x.ndim - 2, w.shape[2:]
        if tuple(attributes.get("kernel_shape") or kernel) != kernel or dims < 1:
            raise ValueError(f"a kernel of {kernel}, declared as {attributes.get('kernel_shape')}, over {x.shape}")
        self._auto = attributes.get("auto_pad") or "NOTSET"
        self._strides, self._dilations = (attributes.get(name) or [1] * dims for name in ("strides", "dilations"))
        extent = [(size - 1) * step + 1 for size, step in zip(kernel, self._dilations, strict=True)]
        y = self.slide(x, w.reshape(group, len(w) // group, *w.shape[1:]), extent, attributes)
        return (y if b is None else y + b.reshape(-1, *[1] * dims),)

    def slide(self, x: np.ndarray, w: np.ndarray, extent: Sequence[int], attributes: dict[str, Any]) -> np.ndarray:
        """w: (groups, rows of a group, columns, *kernel). extent: of the dilated kernel."""
        raise NotImplementedError

    def windows(self, w: np.ndarray, sizes: Sequence[int]) -> Iterator[tuple[np.ndarray, tuple[Any, ...]]]:
        """Yield the matrix (groups, rows, columns) of each position of the kernel, and the elements that it meets."""
        for place in itertools.product(*map(range, w.shape[3:])):
            starts = [position * step for position, step in zip(place, self._dilations, strict=True)]
            met = [
                slice(start, start + (size - 1) * stride + 1, stride)
                for start, size, stride in zip(starts, sizes, self._strides, strict=True)
            ]
            yield w.transpose(*range(3, w.ndim), 0, 1, 2)[place], (slice(None), slice(None), *met)

    def halves(self, total: int) -> tuple[int, int]:
        """Part a padding that `auto_pad` sets."""
        small = total // 2
        return (small, total - small) if self._auto == "SAME_UPPER" else (total - small, small)


class Conv(_Windowed):
    def slide(self, x: np.ndarray, w: np.ndarray, extent: Sequence[int], attributes: dict[str, Any]) -> np.ndarray:
        dims, count, groups = x.ndim - 2, len(x), len(w)
        given = attributes.get("pads") or [0] * 2 * dims
        pads = list(zip(given[:dims], given[dims:], strict=True))
        if self._auto != "NOTSET":
            spans = [
                max(0, (-(-size // stride) - 1) * stride + span - size)
                for size, stride, span in zip(x.shape[2:], self._strides, extent, strict=True)
            ]
            pads = [self.halves(0 if self._auto == "VALID" else span) for span in spans]
        x = np.pad(x, [(0, 0), (0, 0), *pads])
        sizes = [
            (size - span) // stride + 1 for size, span, stride in zip(x.shape[2:], extent, self._strides, strict=True)
        ]
        if min(sizes) < 1:
            raise ValueError(f"a kernel of extent {extent} does not fit into {x.shape}")
        y = np.zeros((count, groups, w.shape[1], math.prod(sizes)), x.dtype)
        times = (
            np.multiply if w.shape[2] == 1 else np.matmul
        )  # depthwise: products of matrices with one column are slow
        for matrix, met in self.windows(w, sizes):
            y += times(matrix, x[met].reshape(count, groups, w.shape[2], math.prod(sizes)))
        return y.reshape(count, groups * w.shape[1], *sizes)


class ConvTranspose(_Windowed):
    def slide(self, x: np.ndarray, w: np.ndarray, extent: Sequence[int], attributes: dict[str, Any]) -> np.ndarray:
        dims, count, groups, sizes = x.ndim - 2, len(x), len(w), x.shape[2:]
        more = attributes.get("output_padding") or [0] * dims
        lasts = zip(sizes, self._strides, extent, more, strict=True)
        full = [(size - 1) * stride + span + extra for size, stride, span, extra in lasts]
        y = np.zeros((count, groups * w.shape[2], *full), x.dtype)
        columns = x.reshape(count, groups, w.shape[1], math.prod(sizes))
        for matrix, met in self.windows(w, sizes):
            y[met] += (matrix.swapaxes(1, 2) @ columns).reshape(count, groups * w.shape[2], *sizes)
        given = attributes.get("pads") or [0] * 2 * dims
        pads = list(zip(given[:dims], given[dims:], strict=True))
        wanted = attributes.get("output_shape")
        if not wanted and self._auto.startswith("SAME"):
            wanted = [size * stride for size, stride in zip(sizes, self._strides, strict=True)]
        if wanted:
            pads = [self.halves(size - target) for size, target in zip(full, wanted, strict=True)]
        if min(map(min, pads)) < 0 or any(size < sum(pair) for size, pair in zip(full, pads, strict=True)):
            raise ValueError(f"negative padding, or more than {full} elements of it")
        kept = [slice(low, size - high) for size, (low, high) in zip(full, pads, strict=True)]
        return y[tuple([slice(None)] * 2 + kept)]


MENDED: tuple[type[OpRun], ...] = (
    *(Softmax, LogSoftmax, Hardmax, Shape, Squeeze, Unsqueeze, GlobalMaxPool, BatchNormalization),
    *(DequantizeLinear, QuantizeLinear, Conv, ConvTranspose),
)


class MendedEvaluator(onnx.reference.ReferenceEvaluator):
    """ReferenceEvaluator with the operators above, in functions and subgraphs, too, which it makes by its own class."""

    def __init__(self, proto: Any, **options: Any) -> None:
        super().__init__(proto, **{**options, "new_ops": [*MENDED, *mmcv_reference.OPERATORS]})
