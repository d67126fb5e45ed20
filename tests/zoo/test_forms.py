"""Small stand-alone forms of the architectures that found the most, through the ways of the zoo.

left: batch norms that stay in the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo import building, catalogue
from tests.zoo.trial import Trial


def conv(inputs: int, outputs: int, size: int = 1, groups: int = 1, stride: int = 1) -> nn.Sequential:
    made = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(made, nn.BatchNorm2d(outputs))


class Ghost(nn.Module):
    """A cheap operation with its input concatenated and cut, as in GhostNet."""

    def __init__(self) -> None:
        super().__init__()
        self.primary, self.cheap, self.end = conv(3, 4), conv(4, 4, 3, groups=4), conv(7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.primary(x))
        return self.end(torch.cat([x, F.relu(self.cheap(x))], 1)[:, :7])


class RepGhost(nn.Module):
    """A batch norm next to a convolution, both behind a shortcut, twice, as in RepGhost."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = conv(3, 4), conv(4, 4)
        self.first, self.cheap = conv(4, 4, 3), conv(4, 4, 3, groups=4)
        self.fusion = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for fusion in self.fusion:
            y = self.first(F.relu(x))
            x = x + (self.cheap(y) + fusion(y))
        return F.relu(self.end(x))


class RepVgg(nn.Module):
    """Branches of a 3 x 3 and a 1 x 1 convolution and of the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.wide, self.narrow, self.same = conv(3, 4), conv(4, 4, 3), conv(4, 4), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.start(x))
        return F.relu(self.wide(x) + self.narrow(x) + self.same(x))


class Shuffle(nn.Module):
    """Halves of the channels, shuffled by a reshape, as in ShuffleNet."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.second, self.end = conv(3, 8), conv(4, 4, 3), conv(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.start(x).chunk(2, 1)
        x = torch.cat([one, F.relu(self.second(two))], 1)
        n, c, h, w = x.shape
        return self.end(x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w))


class SplitAttention(nn.Module):
    """Weights of two groups out of their sum's mean, as in ResNeSt."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.squeeze, self.expand = conv(3, 8, 3), conv(4, 4), nn.Conv2d(4, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.start(x))
        n, c, h, w = x.shape
        x = x.reshape(n, 2, c // 2, h, w)
        y = self.expand(F.relu(self.squeeze(x.sum(1).mean((2, 3), keepdim=True))))
        return (x * F.softmax(y.view(n, 2, c // 2, 1, 1), 1)).sum(1)


class SqueezeExcite(nn.Module):
    """A gate between two batch norms, as in MobileNetV3."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = conv(3, 4, 3), conv(4, 4)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.hardswish(self.start(x))
        return self.end(x * F.hardsigmoid(self.gate(x)))


class Pyramid(nn.Module):
    """Pooling to several sizes, resized to the input's, as in PSPNet."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = conv(3, 4), conv(12, 4, 3)
        self.levels = nn.ModuleList([conv(4, 4), conv(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.start(x))
        levels = [
            F.interpolate(level(F.adaptive_avg_pool2d(x, size)), x.shape[2:], mode="bilinear")
            for size, level in zip((1, 3), self.levels)
        ]
        return self.end(torch.cat([x, *levels], 1))


class Patches(nn.Module):
    """Attention between patches, resized to a multiple of the patch, as in MobileViT."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = conv(3, 4), conv(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.start(x))
        n, c, h, w = x.shape
        rows, columns = (h + 1) // 2, (w + 1) // 2
        y = F.interpolate(x, size=(2 * rows, 2 * columns), mode="bilinear")
        y = y.reshape(n * c * rows, 2, columns, 2).transpose(1, 2).reshape(n, c, rows * columns, 4)
        y = F.softmax(y @ y.transpose(-1, -2), -1) @ y
        y = y.reshape(n * c * rows, columns, 2, 2).transpose(1, 2).reshape(n, c, 2 * rows, 2 * columns)
        return x + self.end(F.interpolate(y, size=(h, w), mode="bilinear"))


class Dense(nn.Module):
    """A batch norm and a ReLU behind a concatenation that others read, as in DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.start = conv(3, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(4 + 2 * index), nn.ReLU(), nn.Conv2d(4 + 2 * index, 2, 3, padding=1))
            for index in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.start(x)), 2)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


class Auxiliary(nn.Module):
    """Two outputs at the size of the input, by name, as in torchvision's FCN."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end, self.auxiliary = conv(3, 4, 3, stride=2), conv(4, 5), conv(4, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = F.relu(self.start(x))
        heads = {"out": self.end(y), "aux": self.auxiliary(y)}
        return {name: F.interpolate(value, x.shape[-2:], mode="bilinear") for name, value in heads.items()}


class Attention(nn.Module):
    """Batch norms behind linear layers, each in the shape that its input asks for, as in LeViT."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.key, self.norm = conv(3, 8, 3, stride=2), nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.start(x)).flatten(2).transpose(1, 2)
        keys = self.key(y)
        keys = self.norm(keys.flatten(0, 1)).reshape_as(keys)
        return (keys @ keys.transpose(1, 2)).mean((1, 2))


class Video(nn.Module):
    """Convolutions in time and space without biases, as in torchvision's R3D; frames are made of the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.norm = nn.Conv3d(1, 4, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False), nn.BatchNorm3d(4)
        self.end = nn.Conv3d(4, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(F.relu(self.norm(self.start(x.unsqueeze(1))))).mean((2, 3, 4))


@dataclasses.dataclass(frozen=True)
class Form:
    make: Callable[[], nn.Module]
    left: int = 0


FORMS = {
    "ghost": Form(Ghost),
    "rep_ghost": Form(RepGhost),
    "rep_vgg": Form(RepVgg),
    "shuffle": Form(Shuffle),
    "split_attention": Form(SplitAttention),
    "squeeze_excite": Form(SqueezeExcite),
    "pyramid": Form(Pyramid),
    "patches": Form(Patches),
    "dense": Form(Dense, left=2),
    "auxiliary": Form(Auxiliary),
    "attention": Form(Attention),
    "video": Form(Video),
}


@pytest.mark.parametrize("exporter", [pytest.param("dynamo", marks=pytest.mark.slow), "torchscript"])
@pytest.mark.parametrize("name", FORMS)
def test_right_at_every_size(name: str, exporter: str, tmp_path: Path) -> None:
    form = FORMS[name]
    torch.manual_seed(0)
    model = form.make().eval()
    building._as_trained(model, torch.randn(4, 3, 16, 16))
    entry = catalogue.Entry("none", name, "torch", (2, 3, 16, 16), ((1, 3, 12, 20), (3, 3, 13, 11)))
    trial = Trial(entry, tmp_path / "result.json")
    for shape in (entry.shape, *entry.others):
        trial._remember(model, shape)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    trial._way("deploy", trial._deploy, model, trial.expected[entry.shape][0], tmp_path, exporter)
    trial._way("kept", trial._kept, model, trial.expected[entry.shape][0], tmp_path, exporter)
    deploy, kept = trial.result["ways"]["deploy"], trial.result["ways"]["kept"]
    assert deploy["status"] == kept["status"] == kept["fold"]["status"] == "right", (deploy, kept)
    assert len(deploy["errors"]) == len(kept["errors"]) == 3
    assert deploy["fixed"] == kept["fixed"] == [], deploy["notes"]
    assert deploy["batch_norm_nodes"] == kept["fold"]["batch_norm_nodes"] == form.left, deploy["kept"]
    assert all(reason for *_, reason in deploy["kept"])
