"""A small U-Net (Ronneberger et al. 2015) with batch norm and transposed convolutions."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from models.resnet import Norm


def _double(inputs: int, outputs: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        norm(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        norm(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Images (N, 3, H, W), H and W multiples of 2^depth, to logits (N, classes, H, W)."""

    def __init__(self, width: int = 16, depth: int = 2, classes: int = 5, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(_double(a, b, norm) for a, b in zip([3, *widths[:-1]], widths))
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(widths))
        self.merge = nn.ModuleList(_double(2 * a, a, norm) for a in widths[:-1])
        self.decode = nn.Conv2d(width, classes, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x, skips = image, []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            skips.append(x)
        for up, merge, skip in reversed(list(zip(self.up, self.merge, skips))):
            x = merge(torch.cat([skip, up(x)], 1))
        return self.decode(x)
