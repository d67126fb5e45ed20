"""Adaptive pooling for any image size, composed of operators that exporters translate.

Exporters write adaptive pooling as a pooling with fixed windows, which is right at the example's size only, if at all.
Window i of k over n values is [floor(i n / k), ceil((i + 1) n / k)), so that

    value j is at or behind the start  <=>  i n < (j + 1) k
    value j is before the end          <=>  j k < (i + 1) n

The average along one axis is a product with the matrix of both conditions (k, n), its rows divided by their sums. The
maximum gathers the values of each window, the last one repeated up to the length of the longest window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Tensor = torch.Tensor
# A number, or one that an exporter records: a SymInt, or a tensor in a trace.
Size = Any


class AnySizePooling(TorchFunctionMode):
    """Context that computes adaptive pooling by the formulas above.

    dynamic: whether image sizes may vary; else windows of one length are left to the exporter. Pooling to one value is
    always left: exporters write it for any size.
    """

    def __init__(self, *, dynamic: bool) -> None:
        super().__init__()
        self._dynamic = dynamic

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _POOLINGS:
            axes, along = _POOLINGS[func]
            return self._pool(axes, along, func, *args, **kwargs)
        if func is F.interpolate:
            return self._interpolate(*args, **kwargs)
        return func(*args, **kwargs)

    def _interpolate(self, input: Tensor, size: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Compute resampling by area as adaptive average pooling."""
        mode = args[1] if len(args) > 1 else kwargs.get("mode")
        axes = input.dim() - 2
        if mode != "area" or size is None or not 1 <= axes <= 3:
            return F.interpolate(input, size, *args, **kwargs)
        pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[axes - 1]
        return self._pool(axes, _average, pool, input, size)

    def _pool(
        self,
        axes: int,
        along: Callable[[Tensor, int, Size, Size], Tensor],
        func: Any,
        input: Tensor,
        output_size: Any,
        return_indices: bool = False,
    ) -> Any:
        sizes = list(output_size) if isinstance(output_size, (list, tuple)) else [output_size] * axes
        given = [input.shape[axis - axes] if self._dynamic else int(input.shape[axis - axes]) for axis in range(axes)]
        if return_indices or all(_has_equal_windows(n, k) for n, k in zip(given, sizes)):
            return func(input, output_size, **({"return_indices": True} if return_indices else {}))
        for axis, n, k in zip(range(-axes, 0), given, sizes):
            if k is not None:
                input = along(input, axis, n, k)
        return input


def _has_equal_windows(n: Size, k: Size) -> bool:
    """Whether the output size is 1, or all windows have one length that is known at export."""
    if type(k) is not int:
        return False
    return k == 1 or (type(n) is int and n % k == 0)


def _windows(n: Size, k: Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """Compute masks of the values at or after the start of a window and before its end: bool (k, n)."""
    i = torch.arange(k, device=device)[:, None]
    j = torch.arange(n, device=device)
    return i * n < (j + 1) * k, j * k < (i + 1) * n


def _average(input: Tensor, axis: int, n: Size, k: Size) -> Tensor:
    if type(k) is int and k == 1:
        return input.mean(axis, keepdim=True)
    if input.dtype in (torch.float16, torch.bfloat16):  # torch sums them in float32
        return _average(input.float(), axis, n, k).to(input.dtype)
    behind_start, before_end = _windows(n, k, input.device)
    inside = (behind_start & before_end).to(input.dtype)
    matrix = inside / inside.sum(1, keepdim=True)
    if axis == -2:
        return matrix @ input
    if axis == -1:
        return input @ matrix.t()
    return (input.transpose(axis, -1) @ matrix.t()).transpose(axis, -1)


def _maximum(input: Tensor, axis: int, n: Size, k: Size) -> Tensor:
    if type(k) is int and k == 1:
        return input.amax(axis, keepdim=True)
    behind_start, before_end = _windows(n, k, input.device)
    start, end = (~behind_start).sum(1, keepdim=True), before_end.sum(1, keepdim=True)
    longest = n // k + 2
    index = torch.minimum(start + torch.arange(longest, device=input.device), end - 1)
    # An index of two dimensions becomes one Gather; a reshape would bake the example's sizes into declared shapes.
    # ONNX Runtime's ReduceMax leaves an empty tensor as it is: with the axis kept, Squeeze says so.
    return input.transpose(axis, -1)[..., index].amax(-1, keepdim=True).squeeze(-1).transpose(axis, -1)


_POOLINGS: dict[Any, tuple[int, Callable[[Tensor, int, Size, Size], Tensor]]] = {
    F.adaptive_avg_pool1d: (1, _average),
    F.adaptive_avg_pool2d: (2, _average),
    F.adaptive_avg_pool3d: (3, _average),
    F.adaptive_max_pool1d: (1, _maximum),
    F.adaptive_max_pool2d: (2, _maximum),
    F.adaptive_max_pool3d: (3, _maximum),
}
