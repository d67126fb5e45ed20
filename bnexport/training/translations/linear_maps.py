"""Pooling, resizing, padding and windows as separable linear maps.

Average pooling, adaptive average pooling, interpolation, replication padding and windows act on each spatial
dimension j by a matrix M_j (out_j, in_j), so that in two dimensions

    y = M_1 x M_2^T        dx = M_1^T g M_2

The matrices come from torch itself: the one-dimensional operator applied to the identity in float64,
rounded once. They need static sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from bnexport.errors import UnsupportedModelError
from bnexport.training.translations.values import constant, ints, op, reshape, sizes, spread, static_sizes

_ATEN = torch.ops.aten


def matrix(size: int, operator: Callable[[torch.Tensor], torch.Tensor]) -> np.ndarray:
    """Compute the matrix M (out, in) of an operator on the last dimension of (1, N, in)."""
    identity = torch.eye(size, dtype=torch.float64)[None]
    return operator(identity)[0].T.numpy()


def push_forward(input: Any, matrices: Sequence[np.ndarray]) -> Any:
    """Compute M_1 x M_2^T ...: one matrix product for each dimension that changes."""
    extents = [M.shape[1] for M in matrices]
    result = input
    # Dimensions that shrink first: the products after them are smaller. Then the last: one large product.
    for axis in sorted(range(len(matrices)), key=lambda j: (matrices[j].shape[0] / matrices[j].shape[1], -j)):
        M = matrices[axis]
        rows, columns = M.shape
        if rows == columns and np.array_equal(M, np.eye(rows)):
            continue
        before, after = math.prod(extents[:axis]), math.prod(extents[axis + 1 :])
        if after == 1:
            result = op.MatMul(reshape(result, [0, 0, before, columns]), constant(M.T, input.dtype))
        else:
            result = op.MatMul(constant(M, input.dtype), reshape(result, [0, 0, before, columns, after]))
        extents[axis] = rows
    return reshape(result, [0, 0, *extents])


def pull_back(grad_output: Any, matrices: Sequence[np.ndarray]) -> Any:
    """Compute M_1^T g M_2 ...: the gradient by the input."""
    return push_forward(grad_output, [M.T for M in matrices])


def avg_pool_backward(
    grad_output: Any,
    input: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None = None,
) -> Any:
    """Translate aten::avg_pool2d_backward and aten::avg_pool3d_backward."""
    extents = static_sizes(input, 2, "aten::avg_pool{}d_backward")
    rank = len(extents)
    kernel, pads = spread(kernel_size, rank), spread(padding, rank)
    strides = spread(stride, rank) if len(stride) else kernel

    def average(size: int, k: int, s: int, p: int) -> np.ndarray:
        return matrix(size, lambda x: _avg_pool1d(x, k, s, p, bool(ceil_mode), bool(count_include_pad)))

    def total(size: int, k: int, s: int, p: int) -> np.ndarray:
        return matrix(size, lambda x: _avg_pool1d(x, k, s, p, bool(ceil_mode), True, 1))

    entry = average if divisor_override is None else total
    result = pull_back(grad_output, [entry(*window) for window in zip(extents, kernel, strides, pads)])
    return result if divisor_override is None else op.Div(result, constant(divisor_override, grad_output.dtype))


def _avg_pool1d(
    x: torch.Tensor, k: int, s: int, p: int, ceil_mode: bool, count_include_pad: bool, divisor: int | None = None
) -> torch.Tensor:
    wide = _ATEN.avg_pool2d(x[:, :, None], [1, k], [1, s], [0, p], ceil_mode, count_include_pad, divisor)
    return wide[:, :, 0]


def adaptive_avg_pool(input: Any, output_size: Sequence[int]) -> Any:
    """Translate aten::_adaptive_avg_pool2d and aten::_adaptive_avg_pool3d, with static sizes."""
    pairs = zip(static_sizes(input, 2, "aten::_adaptive_avg_pool{}d"), output_size)
    return push_forward(input, [_adaptive(size, out) for size, out in pairs])


def adaptive_avg_pool_backward(grad_output: Any, input: Any) -> Any:
    """Translate aten::_adaptive_avg_pool2d_backward and aten::_adaptive_avg_pool3d_backward, with static sizes."""
    name = "aten::_adaptive_avg_pool{}d_backward"
    pairs = zip(static_sizes(input, 2, name), static_sizes(grad_output, 2, name))
    return pull_back(grad_output, [_adaptive(size, out) for size, out in pairs])


def _adaptive(size: int, out: int) -> np.ndarray:
    return matrix(size, lambda x: torch.nn.functional.adaptive_avg_pool1d(x, out))


def padding(input: Any, padding: Sequence[int], *, name: str, mode: str, onnx_mode: str) -> Any:
    """Translate aten::reflection_pad1d, _2d, _3d and aten::replication_pad1d, _2d, _3d; modes: torch's and ONNX's."""
    sides = [int(width) for width in padding]
    if min(sides) < 0:
        return push_forward(input, _pad_matrices(input, sides, name, mode))
    starts, ends = sides[::2][::-1], sides[1::2][::-1]
    others = [0] * (len(sizes(input)) - len(starts))
    return op.Pad(input, ints([*others, *starts, *others, *ends]), mode=onnx_mode)


def padding_backward(grad_output: Any, input: Any, padding: Sequence[int], *, name: str, mode: str) -> Any:
    """Translate their gradients, with static sizes."""
    return pull_back(grad_output, _pad_matrices(input, padding, f"{name}_backward", mode))


def _pad_matrices(input: Any, padding: Sequence[int], name: str, mode: str) -> list[np.ndarray]:
    sides = [int(width) for width in padding]
    pairs = list(zip(sides[::2], sides[1::2]))[::-1]

    def entry(size: int, ends: tuple[int, int]) -> np.ndarray:
        return matrix(size, lambda x: torch.nn.functional.pad(x, ends, mode=mode))

    return [entry(*axis) for axis in zip(static_sizes(input, 2, f"aten::{name}"), pairs)]


def unfold_backward(grad_in: Any, input_sizes: Any, dim: int, size: int, step: int) -> Any:
    """Translate aten::unfold_backward, the gradient of windows of one dimension: grad_in (*, count, *, size)."""
    shape = sizes(grad_in)
    rank = len(shape) - 1
    dim %= rank
    count = static_sizes(grad_in, dim, "aten::unfold_backward")[0]
    extent = input_sizes[dim] if isinstance(input_sizes, (list, tuple)) else None
    if not isinstance(extent, int):
        raise UnsupportedModelError(
            f"aten::unfold_backward: got a dynamic size of dimension {dim}, expected static sizes of windows; export with"
            " only the batch dimension dynamic"
        )
    M = matrix(extent, lambda x: x.unfold(2, size, step).flatten(2))
    others = [axis for axis in range(rank) if axis != dim]
    rows = reshape(op.Transpose(grad_in, perm=[*others, dim, rank]), [*[0] * len(others), count * size])
    back = [others.index(axis) if axis != dim else rank - 1 for axis in range(rank)]
    return op.Transpose(op.MatMul(rows, constant(M, grad_in.dtype)), perm=back)
