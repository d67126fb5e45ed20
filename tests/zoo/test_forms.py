"""Small stand-alone forms of the architectures that found the most, through the ways of the zoo."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo import building, catalogue
from tests.zoo.trial import Trial

FORMS: dict[str, Callable[[], nn.Module]] = {}
LEFT = {"dense": 2}  # batch norms that stay in the file


def conv(inputs: int, outputs: int, size: int = 1, groups: int = 1, stride: int = 1) -> nn.Sequential:
    made = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(made, nn.BatchNorm2d(outputs))


def form(make_parts: Callable[[], dict[str, nn.Module]]) -> Callable[..., None]:
    """Add the decorated forward to FORMS, as a network that has these parts as attributes."""

    def add(forward: Callable[[Any, torch.Tensor], Any]) -> None:
        def make() -> nn.Module:
            net = type(forward.__name__, (nn.Module,), {"forward": forward})()
            for name, part in make_parts().items():
                setattr(net, name, part)
            return net

        FORMS[forward.__name__] = make

    return add


@form(lambda: {"primary": conv(3, 4), "cheap": conv(4, 4, 3, groups=4), "end": conv(7, 4)})
def ghost(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A cheap operation with its input concatenated and cut, as in GhostNet."""
    x = F.relu(self.primary(x))
    return self.end(torch.cat([x, F.relu(self.cheap(x))], 1)[:, :7])


@form(
    lambda: {
        "start": conv(3, 4),
        "end": conv(4, 4),
        "first": conv(4, 4, 3),
        "cheap": conv(4, 4, 3, groups=4),
        "fusion": nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)]),
    }
)
def rep_ghost(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A batch norm next to a convolution, both behind a shortcut, twice, as in RepGhost."""
    x = self.start(x)
    for fusion in self.fusion:
        y = self.first(F.relu(x))
        x = x + (self.cheap(y) + fusion(y))
    return F.relu(self.end(x))


@form(lambda: {"start": conv(3, 4), "wide": conv(4, 4, 3), "narrow": conv(4, 4), "same": nn.BatchNorm2d(4)})
def rep_vgg(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Branches of a 3 x 3 and a 1 x 1 convolution and of the input itself."""
    x = F.relu(self.start(x))
    return F.relu(self.wide(x) + self.narrow(x) + self.same(x))


@form(lambda: {"start": conv(3, 8), "second": conv(4, 4, 3), "end": conv(8, 4)})
def shuffle(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Halves of the channels, shuffled by a reshape, as in ShuffleNet."""
    one, two = self.start(x).chunk(2, 1)
    x = torch.cat([one, F.relu(self.second(two))], 1)
    n, c, h, w = x.shape
    return self.end(x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w))


@form(lambda: {"start": conv(3, 8, 3), "squeeze": conv(4, 4), "expand": nn.Conv2d(4, 8, 1)})
def split_attention(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Weights of two groups out of their sum's mean, as in ResNeSt."""
    x = F.relu(self.start(x))
    n, c, h, w = x.shape
    x = x.reshape(n, 2, c // 2, h, w)
    y = self.expand(F.relu(self.squeeze(x.sum(1).mean((2, 3), keepdim=True))))
    return (x * F.softmax(y.view(n, 2, c // 2, 1, 1), 1)).sum(1)


@form(lambda: {"start": conv(3, 4, 3), "end": conv(4, 4), "narrow": nn.Conv2d(4, 2, 1), "widen": nn.Conv2d(2, 4, 1)})
def squeeze_excite(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A gate between two batch norms, as in MobileNetV3."""
    x = F.hardswish(self.start(x))
    return self.end(x * F.hardsigmoid(self.widen(F.relu(self.narrow(F.adaptive_avg_pool2d(x, 1))))))


@form(lambda: {"start": conv(3, 4), "end": conv(12, 4, 3), "levels": nn.ModuleList([conv(4, 4), conv(4, 4)])})
def pyramid(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Pooling to several sizes, resized to the input's, as in PSPNet."""
    x = F.relu(self.start(x))
    pooled = [level(F.adaptive_avg_pool2d(x, size)) for size, level in zip((1, 3), self.levels)]
    return self.end(torch.cat([x, *(F.interpolate(each, x.shape[2:], mode="bilinear") for each in pooled)], 1))


@form(lambda: {"start": conv(3, 4), "end": conv(4, 4)})
def patches(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Attention between patches, resized to a multiple of the patch, as in MobileViT."""
    x = F.silu(self.start(x))
    n, c, h, w = x.shape
    rows, columns = (h + 1) // 2, (w + 1) // 2
    y = F.interpolate(x, size=(2 * rows, 2 * columns), mode="bilinear")
    y = y.reshape(n * c * rows, 2, columns, 2).transpose(1, 2).reshape(n, c, rows * columns, 4)
    y = F.softmax(y @ y.transpose(-1, -2), -1) @ y
    y = y.reshape(n * c * rows, columns, 2, 2).transpose(1, 2).reshape(n, c, 2 * rows, 2 * columns)
    return x + self.end(F.interpolate(y, size=(h, w), mode="bilinear"))


def dense_layer(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 2, 3, padding=1))


@form(lambda: {"start": conv(3, 4), "layers": nn.ModuleList([dense_layer(4), dense_layer(6)])})
def dense(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A batch norm and a ReLU behind a concatenation that others read, as in DenseNet."""
    x = F.max_pool2d(F.relu(self.start(x)), 2)
    for layer in self.layers:
        x = torch.cat([x, layer(x)], 1)
    return x


@form(lambda: {"start": conv(3, 4, 3, stride=2), "out": conv(4, 5), "aux": conv(4, 5)})
def auxiliary(self: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two outputs at the size of the input, by name, as in torchvision's FCN."""
    y = F.relu(self.start(x))
    return {name: F.interpolate(getattr(self, name)(y), x.shape[-2:], mode="bilinear") for name in ("out", "aux")}


@form(lambda: {"start": conv(3, 8, 3, stride=2), "key": nn.Linear(8, 16, bias=False), "norm": nn.BatchNorm1d(16)})
def attention(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Batch norms behind linear layers, each in the shape that its input asks for, as in LeViT."""
    keys = self.key(F.relu(self.start(x)).flatten(2).transpose(1, 2))
    keys = self.norm(keys.flatten(0, 1)).reshape_as(keys)
    return (keys @ keys.transpose(1, 2)).mean((1, 2))


@form(
    lambda: {
        "start": nn.Conv3d(1, 4, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False),
        "norm": nn.BatchNorm3d(4),
        "end": nn.Conv3d(4, 5, 1),
    }
)
def video(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Convolutions in time and space without biases, as in torchvision's R3D; frames are made of the channels."""
    return self.end(F.relu(self.norm(self.start(x.unsqueeze(1))))).mean((2, 3, 4))


@pytest.mark.parametrize("exporter", [pytest.param("dynamo", marks=pytest.mark.slow), "torchscript"])
@pytest.mark.parametrize("name", FORMS)
def test_right_at_every_size(name: str, exporter: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FORMS[name]().eval()
    building.as_trained(model, torch.randn(4, 3, 16, 16))
    entry = catalogue.Entry("none", name, "torch", (2, 3, 16, 16), ((1, 3, 12, 20), (3, 3, 13, 11)))
    trial = Trial(entry, tmp_path / "result.json")
    trial.remember(model)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for way in ("deploy", "kept"):
        trial.go(way, lambda folder, way=way: getattr(trial, way)(model, exporter, folder))
    deploy, kept = trial.result["ways"]["deploy"], trial.result["ways"]["kept"]
    assert deploy["status"] == kept["status"] == kept["fold"]["status"] == "right", (deploy, kept)
    assert len(deploy["errors"]) == len(kept["errors"]) == 3
    assert deploy["fixed"] == kept["fixed"] == [], deploy["notes"]
    assert deploy["batch_norm_nodes"] == kept["fold"]["batch_norm_nodes"] == LEFT.get(name, 0), deploy["kept"]
    assert all(reason for *_, reason in deploy["kept"])
