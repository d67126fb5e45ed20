"""Interpolation and other linear maps along axes, with their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bnexport.errors import UnsupportedModelError
from bnexport.training.translations.values import constant, op, reshape, sizes, spread, static_sizes

# Pooling, resizing, padding and windows as separable linear maps.
#
# Average pooling, adaptive average pooling, interpolation, replication padding and windows act on each spatial
# dimension j by a matrix M_j (out_j, in_j), so that in two dimensions
#
#     y = M_1 x M_2^T        dx = M_1^T g M_2
#
# The matrices come from torch itself: the one-dimensional operator applied to the identity in float64,
# rounded once. They need static sizes.

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


def padding_backward(grad_output: Any, input: Any, padding: Sequence[int], *, name: str, mode: str) -> Any:
    """Translate the gradients of aten::reflection_pad1d, _2d, _3d and aten::replication_pad1d, _2d, _3d, with static sizes.

    mode: as torch.nn.functional.pad takes it.
    """
    sides = [int(width) for width in padding]
    pairs = list(zip(sides[::2], sides[1::2]))[::-1]

    def entry(size: int, ends: tuple[int, int]) -> np.ndarray:
        return matrix(size, lambda x: torch.nn.functional.pad(x, ends, mode=mode))

    extents = static_sizes(input, 2, f"aten::{name}_backward")
    return pull_back(grad_output, [entry(*axis) for axis in zip(extents, pairs)])


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


# torch.nn.functional.interpolate as one operator with a gradient.
#
# While a graph is recorded with symbolic sizes, torch takes interpolation apart into index and index_put,
# which scatters the gradient value by value. `Interpolation` records bnexport::interpolate instead, whose
# translation and gradient are matrix products (linear_maps). Measured with ONNX Runtime on two threads,
# (4, 21, 64, 64) to 512 x 512, bilinear: forward 23 ms (Resize 20, torch 59), backward 35 ms (torch 41).

Tensor = torch.Tensor


_OPERATORS = {
    "nearest": ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    "nearest-exact": ("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    "linear": ("upsample_linear1d",),
    "bilinear": ("", "upsample_bilinear2d"),
    "trilinear": ("", "", "upsample_trilinear3d"),
    "bicubic": ("", "upsample_bicubic2d"),
}

library = torch.library.Library("bnexport", "FRAGMENT")
_ARGUMENTS = "str mode, bool align_corners, bool antialias, float[] scales"
library.define(f"interpolate(Tensor input, int[] size, {_ARGUMENTS}) -> Tensor")
library.define(f"interpolate_backward(Tensor grad_output, int[] input_size, {_ARGUMENTS}) -> Tensor")

interpolate = torch.ops.bnexport.interpolate.default
interpolate_backward = torch.ops.bnexport.interpolate_backward.default


def _aten(rank: int, mode: str, align_corners: bool, antialias: bool, suffix: str) -> Callable[..., Tensor]:
    """Compute the aten operator from the sizes and scales alone."""
    name = _OPERATORS[mode][rank - 1]
    overload = getattr(_ATEN, f"_{name}_aa{suffix}" if antialias else f"{name}{suffix}").default
    corners = [] if mode.startswith("nearest") else [align_corners]

    def call(x: Tensor, sizes: list[Sequence[Any]], scales: Sequence[float]) -> Tensor:
        return overload(x, *sizes, *corners, *(scale if scale > 0 else None for scale in scales))

    return call


def _forward(
    input: Tensor, size: list[int], mode: str, align_corners: bool, antialias: bool, scales: list[float]
) -> Tensor:
    return _aten(len(size), mode, align_corners, antialias, "")(input, [size], scales)


def _backward(
    grad_output: Tensor, input_size: list[int], mode: str, align_corners: bool, antialias: bool, scales: list[float]
) -> Tensor:
    size = grad_output.shape[2:]
    call = _aten(len(size), mode, align_corners, antialias, "_backward")
    return call(grad_output, [size, [*grad_output.shape[:2], *input_size]], scales)


def _fake(x: Tensor, size: list[int], *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:2], *size))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.input_size, ctx.arguments = list(inputs[0].shape[2:]), inputs[2:]


def _differentiate(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    return interpolate_backward(grad_output, ctx.input_size, *ctx.arguments), None, None, None, None, None


for _name, _function in (("interpolate", _forward), ("interpolate_backward", _backward)):
    library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bnexport::{_name}", _fake, lib=library)
torch.library.register_autograd("bnexport::interpolate", _differentiate, setup_context=_save, lib=library)


_SETS_STRIDES = {functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d}


class Interpolation(TorchFunctionMode):
    """Context in which torch.nn.functional.interpolate is bnexport::interpolate, with static spatial sizes.

    Adaptive average pooling to one position sets the strides of its result to channels last where its input's are so
    (as_strided_), whose gradient no graph can hold; it gets a contiguous input.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.interpolate:
            return _interpolate(*args, **(kwargs or {}))
        if func in _SETS_STRIDES and args:
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **(kwargs or {}))


def _interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    rank = input.dim() - 2
    extents = [extent for extent in input.shape[2:] if isinstance(extent, int)]
    names = _OPERATORS.get(mode, ())
    supported = 0 < rank <= len(names) and names[rank - 1] != ""
    if len(extents) != rank or not supported or (size is None) == (scale_factor is None):
        # Dynamic sizes, and arguments that torch refuses: its own way.
        return functional.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    if size is not None:
        sizes, scales = _spread(size, rank), [0.0] * rank
    else:
        factors = [float(factor) for factor in _spread(scale_factor, rank)]
        sizes = [int(extent * factor) for extent, factor in zip(extents, factors)]
        # torch computes positions with the given factors, or with those of the rounded sizes.
        scales = [0.0] * rank if recompute_scale_factor else factors
    return interpolate(input, sizes, mode, bool(align_corners), antialias, scales)


def _spread(value: Any, rank: int) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value] * rank


def _matrices(
    extents: Sequence[int],
    size: Sequence[int],
    mode: str,
    align_corners: bool,
    antialias: bool,
    scales: Sequence[float],
) -> list[np.ndarray]:
    single = mode if mode.startswith("nearest") else "linear"

    def entry(extent: int, out: int, scale: float) -> np.ndarray:
        if antialias or mode == "bicubic":
            # These exist in two dimensions only; one of size 1 stays as it is.
            call = _aten(2, mode, align_corners, antialias, "")
            return matrix(extent, lambda x: call(x[:, :, None], [[1, out]], [0.0, scale])[:, :, 0])
        return matrix(extent, lambda x: _aten(1, single, align_corners, False, "")(x, [[out]], [scale]))

    return [entry(*axis) for axis in zip(extents, size, scales)]


def translate(input: Any, size: Sequence[int], *arguments: Any) -> Any:
    return push_forward(input, _matrices(static_sizes(input, 2, "bnexport::interpolate"), size, *arguments))


def translate_backward(grad_output: Any, input_size: Sequence[int], *arguments: Any) -> Any:
    size = static_sizes(grad_output, 2, "bnexport::interpolate_backward")
    return pull_back(grad_output, _matrices(input_size, size, *arguments))
