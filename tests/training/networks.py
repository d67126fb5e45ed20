"""The networks that are trained in the tests: name -> model, loss and batches. `make campaign RUN=zoo-training` has whole ones."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import avg_pool2d, cross_entropy, interpolate

from models.mobilenet import InvertedResidual
from tests.support.modules import compose

IMAGE, CLASSES, IGNORED = (3, 16, 16), 5, 255


@dataclasses.dataclass(frozen=True)
class Network:
    """dense: labels are maps, some of whose pixels are ignored."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, Any], torch.Tensor] = cross_entropy
    dense: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().train()

    def batch(self, size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(size, *IMAGE, generator=generator)
        shape = (size, *IMAGE[1:]) if self.dense else (size,)
        labels = torch.randint(0, CLASSES, shape, generator=generator)
        if self.dense:
            labels[torch.rand(shape, generator=generator) < 0.1] = IGNORED
        return images, labels


def classifier() -> nn.Module:
    """Each kind of layer of ResNet, DenseNet and MobileNet once, so that its export takes seconds."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = torch.cat([self.block(self.pool(x)), avg_pool2d(x, 2)], 1)
        return self.classify(y.mean((2, 3)))

    stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    options = {"expand": 1, "kernel": 5, "stride": 1, "squeeze": True}
    block = InvertedResidual(4, 4, **options, activation=nn.Hardswish, norm=nn.BatchNorm2d)
    return compose(forward, stem=stem, pool=nn.MaxPool2d(3, 2, padding=1), block=block, classify=nn.Linear(8, CLASSES))


def segmenter() -> nn.Module:
    """Each kind of layer of networks for dense prediction once."""

    def forward(self: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.dilated(self.pool(x))
        auxiliary = interpolate(self.auxiliary(y), x.shape[2:], mode="bilinear", align_corners=False)
        return {"out": self.up(y), "aux": auxiliary}

    dilated = nn.Sequential(nn.Conv2d(3, 6, 3, padding=2, dilation=2), nn.BatchNorm2d(6), nn.ReLU6())
    heads = {"up": nn.ConvTranspose2d(6, CLASSES, 2, 2), "auxiliary": nn.Conv2d(6, CLASSES, 1)}
    return compose(forward, pool=nn.MaxPool2d(3, 2, padding=1), dilated=dilated, **heads)


def _segmentation_loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    main, auxiliary = (cross_entropy(output[name], target, ignore_index=IGNORED) for name in ("out", "aux"))
    return main + 0.4 * auxiliary


NETWORKS = {
    "miniature-classifier": Network(classifier),
    "miniature-segmenter": Network(segmenter, _segmentation_loss, dense=True),
}
