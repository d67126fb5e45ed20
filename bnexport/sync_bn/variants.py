"""Batch norm variants: with a following activation, or with fixed statistics.

Sync classes are what modules of other packages become; plain ones are what those return to.
"""

from __future__ import annotations

import torch
from torch import nn

from bnexport.sync_bn.module import SyncBatchNorm

# The submodule that holds an activation which its class had fused (inplace_abn, apex).
FUSED = "fused_activation"


class SyncBatchNormAct(SyncBatchNorm):
    """SyncBatchNorm, then the submodules `drop` and `act` of timm's classes, or a fused activation."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _drop_and_activate(self, super().forward(input))


class BatchNormAct(nn.BatchNorm2d):
    """torch.nn.BatchNorm2d, then the submodules `drop` and `act` of timm's classes, or a fused activation."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _drop_and_activate(self, super().forward(input))


class FrozenSyncBatchNorm(SyncBatchNorm):
    """Fixed statistics and parameters, whatever train() says, as detectron2's FrozenBatchNorm2d."""

    def train(self, mode: bool = True) -> FrozenSyncBatchNorm:
        return super().train(False)


class FrozenBatchNorm(nn.BatchNorm2d):
    """torch.nn.BatchNorm2d with fixed statistics, whatever train() says."""

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        return super().train(False)


def fuse(module: nn.Module, activation: nn.Module) -> None:
    """Make a SyncBatchNormAct run `activation` after the norm, and nothing else."""
    module._modules[FUSED] = activation


def _drop_and_activate(module: nn.Module, output: torch.Tensor) -> torch.Tensor:
    for name in (FUSED,) if FUSED in module._modules else ("drop", "act"):
        layer = module._modules.get(name)
        if layer is not None:
            output = layer(output)
    return output
