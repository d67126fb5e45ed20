"""Networks whose blocks add parallel branches: RepVGG, MobileOne, ACNet and Diverse Branch Block.

RepVGG (Ding et al. 2021), MobileOne (Vasu et al. 2023), asymmetric convolutions (Ding et al. 2019) and diverse branch
blocks (Ding et al. 2021). Their authors merge the branches by a method of the network; here nothing does, so that what
an exported file holds is the training form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from models.resnet import Norm

Block = Callable[[int, int, int, Norm], nn.Module]


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int, norm: Norm, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, norm(outputs))


class Branches(nn.Module):
    """The sum of its branches, then ReLU."""

    def __init__(self, branches: Iterable[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.branches[0](x)
        for branch in list(self.branches)[1:]:
            total = total + branch(x)
        return torch.relu(total)


def repvgg_block(inputs: int, outputs: int, stride: int, norm: Norm) -> Branches:
    """3x3, 1x1 and, where shapes allow it, the input itself; a batch norm behind each."""
    branches: list[nn.Module] = [conv_norm(inputs, outputs, kernel, stride, norm) for kernel in (3, 1)]
    if stride == 1 and inputs == outputs:
        branches.append(norm(inputs))
    return Branches(branches)


def asymmetric_block(inputs: int, outputs: int, stride: int, norm: Norm) -> Branches:
    """3x3, 1x3 and 3x1."""
    branches = []
    for height, width in ((3, 3), (1, 3), (3, 1)):
        conv = nn.Conv2d(inputs, outputs, (height, width), stride, padding=(height // 2, width // 2), bias=False)
        branches.append(nn.Sequential(conv, norm(outputs)))
    return Branches(branches)


def diverse_block(inputs: int, outputs: int, stride: int, norm: Norm) -> Branches:
    """3x3, 1x1, 1x1 before 3x3, and 1x1 before an average of 3x3.

    The input is padded in front of the 1x1, so that its border holds what the 1x1 and its batch norm make of zeros.
    """

    def point() -> list[nn.Module]:
        return [nn.ZeroPad2d(1), nn.Conv2d(inputs, inputs, 1, bias=False), norm(inputs)]

    second = nn.Sequential(*point(), nn.Conv2d(inputs, outputs, 3, stride, bias=False), norm(outputs))
    # The average is of the 1x1's outputs.
    first = [nn.ZeroPad2d(1), nn.Conv2d(inputs, outputs, 1, bias=False), norm(outputs)]
    average = nn.Sequential(*first, nn.AvgPool2d(3, stride), norm(outputs))
    return Branches(
        [conv_norm(inputs, outputs, 3, stride, norm), conv_norm(inputs, outputs, 1, stride, norm), second, average]
    )


def mobileone_block(inputs: int, outputs: int, stride: int, norm: Norm, branches: int = 4) -> nn.Sequential:
    """Depthwise: `branches` of 3x3, a 1x1 and the input; then pointwise: `branches` of 1x1 and the input."""
    depthwise: list[nn.Module] = [conv_norm(inputs, inputs, 3, stride, norm, inputs) for _ in range(branches)]
    depthwise.append(conv_norm(inputs, inputs, 1, stride, norm, inputs))
    if stride == 1:
        depthwise.append(norm(inputs))
    pointwise: list[nn.Module] = [conv_norm(inputs, outputs, 1, 1, norm) for _ in range(branches)]
    if inputs == outputs:
        pointwise.append(norm(inputs))
    return nn.Sequential(Branches(depthwise), Branches(pointwise))


class BranchNet(nn.Module):
    """Images (N, 3, H, W) to logits (N, classes). stages: (outputs, blocks) of each; the first block has stride 2."""

    def __init__(
        self,
        block: Block,
        stem: int,
        stages: tuple[tuple[int, int], ...],
        classes: int = 1000,
        norm: Norm = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        self.stem = repvgg_block(3, stem, 2, norm)
        inputs, blocks = stem, []
        for outputs, count in stages:
            for index in range(count):
                blocks.append(block(inputs, outputs, 1 if index else 2, norm))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


def randomise_statistics(net: nn.Module) -> nn.Module:
    """Statistics, scales and shifts as after training: none is neutral."""
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
    return net


def repvgg_a0(classes: int = 1000, norm: Norm = nn.BatchNorm2d) -> BranchNet:
    """Widths and depths of RepVGG-A0."""
    return BranchNet(repvgg_block, 48, ((48, 2), (96, 4), (192, 14), (1280, 1)), classes, norm)


def mobileone_s0(classes: int = 1000, norm: Norm = nn.BatchNorm2d) -> BranchNet:
    """Widths, depths and branches of MobileOne-S0."""
    return BranchNet(mobileone_block, 48, ((48, 2), (128, 8), (256, 10), (1024, 1)), classes, norm)
