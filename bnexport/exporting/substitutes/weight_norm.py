"""torch.nn.utils.weight_norm in operators that every exporter knows.

    weight = v * (g / norm),   norm = sqrt(sum of v^2 over all axes but `dim`)

torch.onnx translates aten::_weight_norm for matrices and kernels; for a vector, such as the weight of a
batch norm, it sums over no axes, which in ONNX means over all of them. Training steps have no translation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bnexport import torch_versions


class PlainWeightNorm(TorchFunctionMode):
    """Context that records the formula above instead of the operator."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch_versions.weight_norm:
            return _weight_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Compute the formula. dim: -1 for one norm of the whole tensor."""
    axes = [axis for axis in range(v.dim()) if axis != dim]
    norm = v.square().sum(axes, keepdim=dim != -1).sqrt() if axes else v.abs()
    return v * (g / norm)
