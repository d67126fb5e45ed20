"""A layer of the CUDA library over torch tensors, for verification and timing: parameters, outputs, workspace."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from bnexport.native import capi, cuda

DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float64",
}
EPS, MOMENTUM = 1e-5, 0.1


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_channels_last(x: torch.Tensor) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def stream_of(x: torch.Tensor) -> int:
    return torch.cuda.current_stream().cuda_stream if x.is_cuda else 0


@dataclasses.dataclass
class Layer:
    """What belongs to the channels of x; outputs are filled with NaN."""

    weight: torch.Tensor
    bias: torch.Tensor
    running_mean: torch.Tensor
    running_var: torch.Tensor
    new_mean: torch.Tensor
    new_var: torch.Tensor
    saved_mean: torch.Tensor
    saved_invstd: torch.Tensor
    dweight: torch.Tensor
    dbias: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> Layer:
        C, S, device = x.shape[1], statistics_dtype(x.dtype), x.device
        options: dict[str, Any] = {"dtype": S, "device": device}
        statistics: dict[str, Any] = {"dtype": torch.float64, "device": device}
        return cls(
            torch.rand(C, **options) + 0.5,
            torch.randn(C, **options),
            torch.randn(C, **options),
            torch.rand(C, **options) + 0.5,
            *(torch.full((C,), torch.nan, **options) for _ in range(2)),
            *(torch.full((C,), torch.nan, **statistics) for _ in range(2)),
            *(torch.full((C,), torch.nan, **options) for _ in range(2)),
        )


class Calls:
    """Forward and backward of one input through the C API. Tensors stay alive with it; nothing is allocated in calls."""

    def __init__(self, x: torch.Tensor, dy: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, layer: Layer) -> None:
        self.tensors = (x, dy, y, dx)
        self.layer = layer
        N, C = x.shape[:2]
        self.common = {
            "dtype": capi.DTYPES[DTYPES[x.dtype]],
            "stats_dtype": capi.DTYPES[DTYPES[statistics_dtype(x.dtype)]],
            "layout": capi.LAYOUTS["NSC" if is_channels_last(x) else "NCS"],
            "N": N,
            "C": C,
            "S": x[0, 0].numel() if N and C else 1,
            "x": x.data_ptr(),
            "saved_mean": layer.saved_mean.data_ptr(),
            "saved_invstd": layer.saved_invstd.data_ptr(),
            "weight": layer.weight.data_ptr(),
        }
        self.forward_only = {
            "y": y.data_ptr(),
            "bias": layer.bias.data_ptr(),
            "running_mean": layer.running_mean.data_ptr(),
            "running_var": layer.running_var.data_ptr(),
            "running_mean_out": layer.new_mean.data_ptr(),
            "running_var_out": layer.new_var.data_ptr(),
            "momentum": MOMENTUM,
            "eps": EPS,
        }
        self.backward_only = {
            "dy": dy.data_ptr(),
            "dx": dx.data_ptr(),
            "dweight": layer.dweight.data_ptr(),
            "dbias": layer.dbias.data_ptr(),
        }
        self.prepare()

    def prepare(self, **changes: Any) -> None:
        """Parameters and a workspace; `changes` to the parameters, where a direction has them."""
        forward = {k: v for k, v in changes.items() if k not in {"local_moments", "grad_reduction"}}
        self.forward_parameters = capi.forward_params(**self.common, **self.forward_only, **forward)
        self.backward_parameters = capi.backward_params(**self.common, **self.backward_only, **changes)
        self.size = cuda.workspace_size(self.forward_parameters)
        # 256 bytes more to align on a host.
        self.memory = torch.full((self.size + 256,), 0xFF, dtype=torch.uint8, device=self.tensors[0].device)
        self.workspace = self.memory.data_ptr() + -self.memory.data_ptr() % 256

    def forward(self) -> None:
        cuda.run("forward", self.forward_parameters, self.workspace, self.size, stream_of(self.tensors[0]))

    def backward(self) -> None:
        cuda.run("backward", self.backward_parameters, self.workspace, self.size, stream_of(self.tensors[0]))

    def row(self, *, backward: bool) -> torch.Tensor:
        """This process's row of a group's statistics, (2 C + 1,) float64."""
        x = self.tensors[0]
        row = torch.full((2 * x.shape[1] + 1,), torch.nan, dtype=torch.float64, device=x.device)
        call, parameters = (
            ("backward_moments", self.backward_parameters) if backward else ("moments", self.forward_parameters)
        )
        cuda.run(call, parameters, row.data_ptr(), self.workspace, self.size, stream_of(x))
        return row
