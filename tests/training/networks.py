"""The networks that are trained in the tests: name -> model, loss and batches. Narrow, and small images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from models.deep_resnet import resnet18, resnet50
from models.densenet import DenseNet
from models.mobilenet import MobileNet
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


NETWORKS = {
    "demo-resnet": Network(digits_resnet, (1, 8, 8), 10),
    "resnet18": Network(lambda: resnet18(8, 7), (3, 32, 32), 7),
    "resnet50": Network(lambda: resnet50(4, 7), (3, 64, 64), 7),
    "mobilenet-v2": Network(lambda: MobileNet(2, 8, 7), (3, 32, 32), 7),
    "mobilenet-v3": Network(lambda: MobileNet(3, 8, 7), (3, 32, 32), 7),
    "densenet": Network(lambda: DenseNet(4, classes=7), (3, 32, 32), 7),
    "segmenter": Network(lambda: Segmenter(5, 4, nn.BatchNorm2d), (3, 32, 32), 5, _segmentation_loss, dense=True),
    "unet": Network(
        lambda: UNet(4),
        (3, 16, 16),
        5,
        lambda output, target: nn.functional.cross_entropy(output, target, ignore_index=IGNORED),
        dense=True,
    ),
}
