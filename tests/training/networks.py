"""The networks that are trained in the tests: name -> model, loss and batches. Narrow, and small images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from models.deep_resnet import resnet18, resnet50
from models.densenet import DenseNet
from models.mobilenet import InvertedResidual, MobileNet
from models.resnet import digits_resnet
from models.segmentation import Segmenter
from models.unet import UNet

IGNORED = 255


def _segmentation_loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    main, auxiliary = (
        nn.functional.cross_entropy(output[name], target, ignore_index=IGNORED) for name in ("out", "aux")
    )
    return main + 0.4 * auxiliary


@dataclasses.dataclass(frozen=True)
class Network:
    build: Callable[[], nn.Module]
    image: tuple[int, int, int]
    classes: int
    loss: Callable[[Any, Any], torch.Tensor] = nn.functional.cross_entropy
    dense: bool = False

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build().train()

    def batch(self, size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Images, and labels or label maps, some of whose pixels are ignored."""
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(size, *self.image, generator=generator)
        shape = (size, *self.image[1:]) if self.dense else (size,)
        labels = torch.randint(0, self.classes, shape, generator=generator)
        if self.dense:
            labels[torch.rand(shape, generator=generator) < 0.1] = IGNORED
        return images, labels


class MiniatureClassifier(nn.Module):
    """Each kind of layer of the classifiers below once, so that its export takes seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        self.block = InvertedResidual(
            4, 4, expand=1, kernel=5, stride=1, squeeze=True, activation=nn.Hardswish, norm=nn.BatchNorm2d
        )
        self.classify = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = torch.cat([self.block(self.pool(x)), nn.functional.avg_pool2d(x, 2)], 1)
        return self.classify(y.mean((2, 3)))


class MiniatureSegmenter(nn.Module):
    """Each kind of layer of the networks for dense prediction once."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        self.dilated = nn.Sequential(nn.Conv2d(3, 6, 3, padding=2, dilation=2), nn.BatchNorm2d(6), nn.ReLU6())
        self.up = nn.ConvTranspose2d(6, 5, 2, 2)
        self.auxiliary = nn.Conv2d(6, 5, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.dilated(self.pool(x))
        size = x.shape[2:]
        auxiliary = nn.functional.interpolate(self.auxiliary(y), size, mode="bilinear", align_corners=False)
        return {"out": self.up(y), "aux": auxiliary}


NETWORKS = {
    "miniature-classifier": Network(MiniatureClassifier, (3, 16, 16), 5),
    "miniature-segmenter": Network(MiniatureSegmenter, (3, 16, 16), 5, _segmentation_loss, dense=True),
    "demo-resnet": Network(digits_resnet, (1, 8, 8), 10),
    "resnet18": Network(lambda: resnet18(8, 7), (3, 32, 32), 7),
    "resnet50": Network(lambda: resnet50(4, 7), (3, 64, 64), 7),
    "mobilenet-v2": Network(lambda: MobileNet(2, 8, 7), (3, 32, 32), 7),
    "mobilenet-v3": Network(lambda: MobileNet(3, 8, 7), (3, 32, 32), 7),
    "densenet": Network(lambda: DenseNet(4, classes=7), (3, 32, 32), 7),
    "segmenter": Network(lambda: Segmenter(5, 4, nn.BatchNorm2d), (3, 32, 32), 5, _segmentation_loss, dense=True),
    "unet": Network(lambda: UNet(4), (3, 16, 16), 5, lambda output,
        target: nn.functional.cross_entropy(output, target, ignore_index=IGNORED), dense=True),
}  # fmt: skip
