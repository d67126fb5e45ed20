"""A residual network for small images (He et al. 2016, with basic blocks), any batch norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import bnexport

Norm = Callable[[int], nn.Module]


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = norm(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images (N, in_channels, H, W) to logits (N, classes)."""

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 10,
        widths: tuple[int, ...] = (16, 32, 64),
        blocks: int = 2,
        norm: Norm = bnexport.SyncBatchNorm,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False), norm(widths[0]), nn.ReLU()
        )
        stages: list[nn.Module] = []
        inputs = widths[0]
        for index, width in enumerate(widths):
            for block in range(blocks):
                stages.append(BasicBlock(inputs, width, 2 if index and not block else 1, norm))
                inputs = width
        self.stages = nn.Sequential(*stages)
        self.classify = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(self.stages(self.stem(x)).mean((2, 3)))


def digits_resnet() -> ResNet:
    """The demo's network: 8 x 8 grey digits, ten classes."""
    return ResNet(in_channels=1)
