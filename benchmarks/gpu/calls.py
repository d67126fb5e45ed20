"""Calls of the CUDA library on torch tensors, for verification and timing."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.bare import parameters
from benchmarks.gpu.expected import EPS, MOMENTUM
from bnexport.native import capi, cuda

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "float64"}


class Calls:
    """Both directions of one input through the C API. Tensors stay alive with it; nothing is allocated in calls.

    `at`: all tensors by their names in the C API; outputs are filled with NaN.
    """

    def __init__(
        self, x: torch.Tensor, dy: torch.Tensor, y: torch.Tensor | None = None, dx: torch.Tensor | None = None
    ) -> None:
        C, device = x.shape[1], x.device
        statistics = torch.float64 if x.dtype == torch.float64 else torch.float32
        self.at = {
            "x": x,
            "dy": dy,
            "y": torch.full_like(x, torch.nan) if y is None else y,
            "dx": torch.full_like(x, torch.nan) if dx is None else dx,
            **{name: torch.randn(C, dtype=statistics, device=device) for name in ("bias", "running_mean")},
            **{name: torch.rand(C, dtype=statistics, device=device) + 0.5 for name in ("weight", "running_var")},
        }
        for name in ("running_mean_out", "running_var_out", "dweight", "dbias"):
            self.at[name] = torch.full((C,), torch.nan, dtype=statistics, device=device)
        for name in ("saved_mean", "saved_invstd"):
            self.at[name] = torch.full((C,), torch.nan, dtype=torch.float64, device=device)
        is_nhwc = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        self.sizes = {
            "dtype": capi.DTYPES[DTYPES[x.dtype]], "stats_dtype": capi.DTYPES[DTYPES[statistics]],
            "layout": capi.LAYOUTS["NSC" if is_nhwc else "NCS"], "N": len(x), "C": C, "S": x[:1, :1].numel() or 1,
            "momentum": MOMENTUM, "eps": EPS,
        }  # fmt: skip
        self.prepare()

    def prepare(self, **changes: Any) -> None:
        """Parameters, which `changes` change, and a workspace."""
        addresses = {name: tensor.data_ptr() for name, tensor in self.at.items()}
        self.parameters = parameters(self.sizes | addresses | changes)
        self.size = cuda.workspace_size(self.parameters["forward"])
        # 256 bytes more to align on a host.
        self.memory = torch.full((self.size + 256,), 0xFF, dtype=torch.uint8, device=self.at["x"].device)
        self.workspace = self.memory.data_ptr() + -self.memory.data_ptr() % 256

    def run(self, direction: str) -> None:
        cuda.run(direction, self.parameters[direction], self.workspace, self.size, self.stream())

    def forward(self) -> None:
        self.run("forward")

    def backward(self) -> None:
        self.run("backward")

    def row(self, direction: str) -> torch.Tensor:
        """This process's row of a group's statistics, (2 C + 1,) float64."""
        x = self.at["x"]
        row = torch.full((2 * x.shape[1] + 1,), torch.nan, dtype=torch.float64, device=x.device)
        name = {"forward": "moments", "backward": "backward_moments"}[direction]
        cuda.run(name, self.parameters[direction], row.data_ptr(), self.workspace, self.size, self.stream())
        return row

    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream if self.at["x"].is_cuda else 0
