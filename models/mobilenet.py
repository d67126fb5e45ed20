"""Networks in the manner of MobileNetV2 (Sandler et al. 2018) and MobileNetV3 (Howard et al. 2019)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from models.resnet import Norm

Activation = Callable[[], nn.Module]


class SqueezeExcite(nn.Module):
    """Hu et al. 2018, with a hard sigmoid."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.squeeze = nn.Conv2d(channels, channels // 4, 1)
        self.excite = nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * nn.functional.hardsigmoid(self.excite(torch.relu(self.squeeze(self.pool(x)))))


class InvertedResidual(nn.Module):
    """Expand by 1x1 (not where expand is 1), depthwise k x k, project by 1x1; a shortcut where shapes allow it."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        expand: int,
        kernel: int,
        stride: int,
        squeeze: bool,
        activation: Activation,
        norm: Norm,
    ) -> None:
        super().__init__()
        hidden = expand * inputs
        self.shortcut = stride == 1 and inputs == outputs
        layers: list[nn.Module] = []
        if expand > 1:
            layers += [nn.Conv2d(inputs, hidden, 1, bias=False), norm(hidden), activation()]
        layers += [
            nn.Conv2d(hidden, hidden, kernel, stride, padding=kernel // 2, groups=hidden, bias=False),
            norm(hidden),
            activation(),
        ]
        if squeeze:
            layers.append(SqueezeExcite(hidden))
        self.layers = nn.Sequential(*layers, nn.Conv2d(hidden, outputs, 1, bias=False), norm(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        return x + y if self.shortcut else y


class MobileNet(nn.Module):
    """Images (N, 3, H, W) to logits (N, classes). A few blocks of either version."""

    def __init__(
        self,
        version: int = 2,
        width: int = 16,
        classes: int = 1000,
        dropout: float = 0.0,
        norm: Norm = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        activation: Activation = nn.ReLU6 if version == 2 else nn.Hardswish
        kernel = 3 if version == 2 else 5

        def block(inputs: int, outputs: int, stride: int) -> InvertedResidual:
            return InvertedResidual(
                inputs,
                outputs,
                expand=4,
                kernel=kernel,
                stride=stride,
                squeeze=version == 3,
                activation=activation,
                norm=norm,
            )

        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, padding=1, bias=False), norm(width), activation())
        self.blocks = nn.Sequential(
            block(width, width, 1),
            block(width, 2 * width, 2),
            block(2 * width, 2 * width, 1),
            block(2 * width, 4 * width, 2),
        )
        self.head = nn.Sequential(nn.Conv2d(4 * width, 8 * width, 1, bias=False), norm(8 * width), activation())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.classify = nn.Linear(8 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = torch.flatten(self.pool(self.head(self.blocks(self.stem(x)))), 1)
        return self.classify(self.dropout(features))


class MobileNetV2(nn.Module):
    """All seventeen blocks of MobileNetV2; images (N, 3, H, W) to logits (N, classes)."""

    # Expansion, outputs, blocks, stride of the first: table 2 of Sandler et al. 2018.
    STAGES = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, classes: int = 1000, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, padding=1, bias=False), norm(32), nn.ReLU6())
        inputs, blocks = 32, []
        for expand, outputs, count, stride in self.STAGES:
            for index in range(count):
                blocks.append(
                    InvertedResidual(
                        inputs,
                        outputs,
                        expand=expand,
                        kernel=3,
                        stride=1 if index else stride,
                        squeeze=False,
                        activation=nn.ReLU6,
                        norm=norm,
                    )
                )
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.Conv2d(inputs, 1280, 1, bias=False), norm(1280), nn.ReLU6())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(1280, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(torch.flatten(self.pool(self.head(self.blocks(self.stem(x)))), 1))
