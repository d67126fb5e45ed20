"""ResNet-18 and ResNet-50 for large images (He et al. 2016), of any width."""

from __future__ import annotations

import torch
from torch import nn

from models.resnet import BasicBlock, Norm


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1; the output has four times `width` channels."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = norm(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = norm(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class DeepResNet(nn.Module):
    """Images (N, 3, H, W) to logits (N, classes)."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, ...],
        width: int = 64,
        classes: int = 1000,
        norm: Norm = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False), norm(width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
        )
        expansion = getattr(block, "expansion", 1)
        inputs, stages = width, []
        for stage, depth in enumerate(depths):
            for index in range(depth):
                channels = width * 2**stage
                stages.append(block(inputs, channels, 2 if stage and not index else 1, norm))
                inputs = expansion * channels
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(torch.flatten(self.pool(self.stages(self.stem(x))), 1))


def resnet18(width: int = 64, classes: int = 1000, norm: Norm = nn.BatchNorm2d) -> DeepResNet:
    return DeepResNet(BasicBlock, (2, 2, 2, 2), width, classes, norm)


def resnet50(width: int = 64, classes: int = 1000, norm: Norm = nn.BatchNorm2d) -> DeepResNet:
    return DeepResNet(Bottleneck, (3, 4, 6, 3), width, classes, norm)
