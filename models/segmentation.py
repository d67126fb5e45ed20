"""A segmentation network in the manner of MMSegmentation: dilated backbone, pyramid pooling, two heads."""

from __future__ import annotations

import torch
from torch import nn

import bnexport
from models.resnet import Norm


class ConvModule(nn.Sequential):
    """Convolution, norm, ReLU: MMCV's building block."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, norm: Norm, *, stride: int = 1, dilation: int = 1, groups: int = 1
    ) -> None:
        padding = dilation * (kernel // 2)
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias=False)
        super().__init__(convolution, norm(outputs), nn.ReLU(inplace=True))


class PyramidPooling(nn.Module):
    """Zhao et al. 2017: averages over windows of several sizes, resized and concatenated."""

    def __init__(self, inputs: int, outputs: int, windows: tuple[int, ...], norm: Norm) -> None:
        super().__init__()
        self.windows = windows
        self.branches = nn.ModuleList(ConvModule(inputs, outputs, 1, norm) for _ in windows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branches = [x]
        for window, branch in zip(self.windows, self.branches):
            pooled = x.mean((2, 3), keepdim=True) if window == 0 else nn.functional.avg_pool2d(x, window, window)
            y = branch(pooled)
            branches.append(nn.functional.interpolate(y, size=x.shape[2:], mode="bilinear", align_corners=False))
        return torch.cat(branches, 1)


class Segmenter(nn.Module):
    """Images (N, 3, H, W), H and W multiples of 8, to logits {"out", "aux"} of (N, classes, H, W)."""

    def __init__(self, classes: int = 5, width: int = 16, norm: Norm = bnexport.SyncBatchNorm) -> None:
        super().__init__()
        self.stem = ConvModule(3, width, 3, norm, stride=2)
        self.down = ConvModule(width, 2 * width, 3, norm, stride=2)
        self.depthwise = ConvModule(2 * width, 2 * width, 3, norm, dilation=2, groups=2 * width)
        self.pointwise = ConvModule(2 * width, 4 * width, 1, norm)
        self.pooling = PyramidPooling(4 * width, width, (0, 2, 4), norm)
        self.fuse = ConvModule(7 * width, 2 * width, 3, norm)
        self.up = nn.Sequential(
            nn.ConvTranspose2d(2 * width, width, 2, 2, bias=False), norm(width), nn.ReLU(inplace=True)
        )
        self.decode = nn.Conv2d(width, classes, 1)
        self.auxiliary = nn.Sequential(ConvModule(2 * width, width, 3, norm), nn.Conv2d(width, classes, 1))

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        size = image.shape[2:]
        low = self.down(self.stem(image))
        high = self.fuse(self.pooling(self.pointwise(self.depthwise(low))))
        logits = {"out": self.decode(self.up(high)), "aux": self.auxiliary(low)}
        return {
            name: nn.functional.interpolate(value, size=size, mode="bilinear", align_corners=False)
            for name, value in logits.items()
        }
