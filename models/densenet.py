"""A network in the manner of DenseNet (Huang et al. 2017): each layer reads all those before it."""

from __future__ import annotations

import torch
from torch import nn

from models.resnet import Norm


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int, norm: Norm) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            norm(inputs),
            nn.ReLU(),
            nn.Conv2d(inputs, 4 * growth, 1, bias=False),
            norm(4 * growth),
            nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.layers(x)], 1)


class DenseNet(nn.Module):
    """Images (N, 3, H, W) to logits (N, classes)."""

    def __init__(
        self,
        growth: int = 8,
        depths: tuple[int, ...] = (2, 2),
        classes: int = 1000,
        norm: Norm = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        channels = 2 * growth
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, 2, padding=1, bias=False)]
        for block, depth in enumerate(depths):
            if block:
                layers += [
                    norm(channels),
                    nn.ReLU(),
                    nn.Conv2d(channels, channels // 2, 1, bias=False),
                    nn.AvgPool2d(2),
                ]
                channels //= 2
            for _ in range(depth):
                layers.append(DenseLayer(channels, growth, norm))
                channels += growth
        self.features = nn.Sequential(*layers, norm(channels), nn.ReLU())
        self.classify = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(self.features(x).mean((2, 3)))
