"""Operators of MMCV and MMDeploy for onnx.reference, from their definitions, in the type of their input.

No stock runtime has them: what `standard_ops` makes of a file is compared with these. tests/frameworks compares them with
MMCV's own kernels.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

from bnexport import schema

Array = np.ndarray


def _interpolate(planes: Array, y_at: Array, x_at: Array) -> Array:
    """Return values of planes (..., H, W) between pixels, at points (..., P); beyond the borders lie zeros."""
    height, width = planes.shape[-2:]
    flat, total = planes.reshape(*planes.shape[:-2], height * width), np.zeros(y_at.shape, planes.dtype)
    for down, right in itertools.product((0, 1), repeat=2):
        row, column = np.floor(y_at) + down, np.floor(x_at) + right
        share = (1 - abs(y_at - row)) * (1 - abs(x_at - column))
        there = (row >= 0) & (column >= 0) & (row < height) & (column < width)
        place = np.where(there, row * width + column, 0).astype(np.int64)
        total += np.where(there, share * np.take_along_axis(flat, place, -1), 0).astype(planes.dtype)
    return total


class MMCVModulatedDeformConv2d(OpRun):
    """y[n, o, p] = b[o] + sum W[o, c, k] mask[n, g, k, p] x[n, c](stride p - padding + dilation k + offset[n, g, k, p])."""

    op_schema = None

    def _run(self, x: Array, offset: Array, mask: Array | None, w: Array, b: Array | None = None, **given: Any) -> Any:
        stride, padding, dilation = (
            given.get(name) or [default] * 2 for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
        )
        groups, parts = given.get("groups") or 1, given.get("deform_groups") or 1
        (count, channels), kernel, sizes = x.shape[:2], w.shape[2:], offset.shape[2:]
        positions, points = kernel[0] * kernel[1], sizes[0] * sizes[1]
        moved = offset.reshape(count, parts, 1, positions, 2, *sizes)
        at, shape = [], (count, parts, channels // parts, positions * points)
        for axis in (0, 1):
            steps = np.arange(kernel[axis]) * dilation[axis] - padding[axis]
            steps = np.repeat(steps, kernel[1]) if axis == 0 else np.tile(steps, kernel[0])
            starts = np.arange(sizes[axis]) * stride[axis]
            place = steps[:, None, None] + (starts[:, None] if axis == 0 else starts)
            at.append(np.broadcast_to((place + moved[..., axis, :, :]).reshape(count, parts, 1, -1), shape))
        values = _interpolate(x.reshape(*shape[:3], *x.shape[2:]), *at)
        if mask is not None:
            values = values * mask.reshape(count, parts, 1, -1)
        columns = values.reshape(count, groups, channels // groups * positions, points)
        y = (w.reshape(groups, len(w) // groups, -1) @ columns).reshape(count, len(w), *sizes)
        return (y if b is None else y + b[:, None, None],)


class MMCVDeformConv2d(MMCVModulatedDeformConv2d):
    """The same without a mask and a bias."""

    def _run(self, x: Array, offset: Array, w: Array, **given: Any) -> Any:  # type: ignore[override]
        return super()._run(x, offset, None, w, **given)


class MMCVRoiAlign(OpRun):
    """The mean of interpolated values of each cell of each box [batch index, x1, y1, x2, y2]."""

    op_schema = None

    def _run(self, x: Array, rois: Array, **given: Any) -> Any:
        if given["mode"] != "avg":
            raise NotImplementedError("MMCVRoiAlign of the largest value")
        size, (height, width) = (given["output_height"], given["output_width"]), x.shape[2:]
        y = np.zeros((len(rois), x.shape[1], *size), x.dtype)
        for number, (index, *box) in enumerate(rois):
            left, top, right, bottom = np.array(box) * given["spatial_scale"] - (0.5 if given["aligned"] else 0)
            at = []
            for start, end, cells in ((top, bottom, size[0]), (left, right, size[1])):
                cell = (end - start if given["aligned"] else max(end - start, 1)) / cells
                samples = given["sampling_ratio"] if given["sampling_ratio"] > 0 else int(np.ceil(cell))
                at.append(start + (np.arange(cells * samples) + 0.5) * cell / max(samples, 1))
            y_at, x_at = (each.reshape(-1) for each in np.meshgrid(*at, indexing="ij"))
            near = (y_at >= -1) & (x_at >= -1) & (y_at <= height) & (x_at <= width)
            points = np.clip(y_at, 0, height - 1), np.clip(x_at, 0, width - 1)
            planes = x[int(index)]
            values = _interpolate(planes, *(np.broadcast_to(each, (len(planes), each.size)) for each in points)) * near
            grid = values.reshape(len(planes), size[0], len(at[0]) // size[0], size[1], len(at[1]) // size[1])
            y[number] = grid.sum((2, 4)) / max(grid.shape[2] * grid.shape[4], 1)
        return (y,)


class grid_sampler(OpRun):
    """Values at places of [-1, 1] x [-1, 1]: between four pixels, of the nearest one, or of a cubic through sixteen.

    padding_mode: zeros around, the border's values, or the image reflected.
    """

    op_schema = None

    def _run(
        self, x: Array, grid: Array, interpolation_mode: int = 0, padding_mode: int = 0, align_corners: int = 0
    ) -> Any:
        count, channels, height, width = x.shape

        def padded(at: Array, size: int) -> Array:
            if padding_mode == 2:
                low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
                folded = np.mod(abs(at - low), 2 * span) if span else at * 0
                at = low + np.minimum(folded, 2 * span - folded)
            return np.clip(at, 0, size - 1) if padding_mode else at

        def points(at: Array) -> Array:
            return np.broadcast_to(at.reshape(count, 1, -1), (count, channels, at[0].size))

        ends = [(grid[..., axis] + 1) / 2 * (size - 1) if align_corners else ((grid[..., axis] + 1) * size - 1) / 2
                for axis, size in ((1, height), (0, width))]  # fmt: skip
        if interpolation_mode != 2:
            ends = [padded(at, size) for at, size in zip(ends, (height, width), strict=True)]
            y_at, x_at = (points(np.rint(at) if interpolation_mode == 1 else at) for at in ends)
            return (_interpolate(x, y_at, x_at).reshape(count, channels, *grid.shape[1:3]),)
        (row, y_part), (column, x_part) = ((np.floor(at), at - np.floor(at)) for at in ends)
        total = np.zeros((count, channels, row[0].size), x.dtype)
        for down, right in itertools.product(range(-1, 3), repeat=2):
            share = points(_cubic(y_part - down) * _cubic(x_part - right))
            at = padded(row + down, height), padded(column + right, width)
            total += (share * _interpolate(x, *map(points, at))).astype(x.dtype)
        return (total.reshape(count, channels, *grid.shape[1:3]),)


def _cubic(distance: Array) -> Array:
    """Return the share of a pixel at a distance of at most two, by the cubic convolution of a = -0.75."""
    d, a = abs(distance), -0.75
    return np.where(d <= 1, ((a + 2) * d - (a + 3)) * d * d + 1, ((d - 5) * d + 8) * d * a - 4 * a)


class NonMaxSuppression(OpRun):
    """Indices of the boxes that stay, the best first. offset: 1 where both borders of a box are inside."""

    op_schema = None

    def _run(self, boxes: Array, scores: Array, iou_threshold: float = 0.0, offset: int = 0) -> Any:
        areas = (boxes[:, 2:] - boxes[:, :2] + offset).prod(1)
        kept: list[int] = []
        for one in np.argsort(-scores, kind="stable"):
            sides = np.minimum(boxes[kept, 2:], boxes[one, 2:]) - np.maximum(boxes[kept, :2], boxes[one, :2]) + offset
            shared = np.maximum(sides, 0).prod(1)
            if not (shared / (areas[kept] + areas[one] - shared) > iou_threshold).any():
                kept.append(int(one))
        return (np.array(kept, np.int64),)


class MMCVCornerPool(OpRun):
    """The largest value from here to the end of axis 2 (mode 0) or 3 (2), or from its start to here (1 and 3)."""

    op_schema = None

    def _run(self, x: Array, mode: int) -> Any:
        axis, backwards = 2 + mode // 2, mode % 2 == 0
        found = np.maximum.accumulate(np.flip(x, axis) if backwards else x, axis)
        return (np.flip(found, axis) if backwards else found,)


_CLASSES = (
    *(MMCVModulatedDeformConv2d, MMCVDeformConv2d, grid_sampler),
    *(MMCVRoiAlign, NonMaxSuppression, MMCVCornerPool),
)
OPERATORS: tuple[type[OpRun], ...] = tuple(
    type(each.__name__, (each,), {"op_domain": domain}) for each in _CLASSES for domain in schema.MMCV_DOMAINS
)
