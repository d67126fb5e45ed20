"""Small networks whose operators depend on the image size or the batch, and what their exported files declare."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.modules import compose

Function = Callable[[torch.Tensor], torch.Tensor]
IMAGE = frozenset({2, 3})


class Net(nn.Module):
    def __init__(self, function: Function | nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.body(x))


@dataclasses.dataclass(frozen=True)
class Case:
    """fixed: dimensions that are static in the file of an exporter, and a word of the note that says why.

    refused: exporters that do not take it at any size. empty: of the default exporter's file, the shape of the result of an
    empty batch where a defect of an engine makes it another one than torch's, and whose defect; both hold no value.
    """

    function: Function | nn.Module
    fixed: dict[str, tuple[frozenset[int], str]] = dataclasses.field(default_factory=dict)
    refused: tuple[str, ...] = ()
    empty: tuple[tuple[int, ...], str] | None = None


# With axes from 0 on they do not, nor does onnx.reference.
_REDUCE = (0, 4, 8, 8), "ONNX Runtime's reductions along negative axes give an empty tensor its input's sizes"
_UNSHUFFLE = (0, 16, 4, 4), "torch's pixel_unshuffle gives an empty tensor its input's sizes"


def both(dimensions: frozenset[int], word: str) -> dict[str, tuple[frozenset[int], str]]:
    return dict.fromkeys(("dynamo", "torchscript"), (dimensions, word))


def windows(x: torch.Tensor) -> torch.Tensor:
    n, c, h, w = x.shape
    return x.view(n, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 1, 3, 5).reshape(-1, c, 4, 4)


def patches(x: torch.Tensor) -> torch.Tensor:
    """Attention between patches of 2 x 2 of an image that is resized to a multiple of them, and back, as in MobileViT."""
    n, c, h, w = x.shape
    rows, columns = (h + 1) // 2, (w + 1) // 2
    y = F.interpolate(x, size=(2 * rows, 2 * columns), mode="bilinear")
    y = y.reshape(n * c * rows, 2, columns, 2).transpose(1, 2).reshape(n, c, rows * columns, 4)
    y = (y @ y.transpose(-1, -2)).softmax(-1) @ y
    y = y.reshape(n * c * rows, columns, 2, 2).transpose(1, 2).reshape(n, c, 2 * rows, 2 * columns)
    return F.interpolate(y, size=(h, w), mode="bilinear")


def pad_to_multiple(x: torch.Tensor) -> torch.Tensor:
    h, w = x.shape[2:]
    return F.pad(x, (0, (4 - w % 4) % 4, 0, (4 - h % 4) % 4))


def same_padding(x: torch.Tensor) -> torch.Tensor:
    """Pad so that a stride of 2 keeps half of the places, rounded up by dividing by a negative number."""
    missing = [max((-(n // -2) - 1) * 2 + 3 - n, 0) for n in x.shape[2:]]
    return F.max_pool2d(F.pad(x, [m for n in reversed(missing) for m in (n // 2, n - n // 2)]), 3, 2)


def positions(x: torch.Tensor) -> torch.Tensor:
    grid = torch.arange(64.0).reshape(1, 4, 4, 4)
    return x + F.interpolate(grid, x.shape[2:], mode="bicubic")


def coordinates(x: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.meshgrid(torch.arange(x.shape[2]), torch.arange(x.shape[3]), indexing="ij")
    return x + rows + 2.0 * columns


def warp(x: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.meshgrid(
        torch.linspace(-0.9, 0.9, x.shape[2]), torch.linspace(-0.9, 0.9, x.shape[3]), indexing="ij"
    )
    grid = torch.stack((columns, rows), -1)[None].expand(x.shape[0], -1, -1, -1)
    return F.grid_sample(x, grid, align_corners=False)


def skip(x: torch.Tensor) -> torch.Tensor:
    y = F.interpolate(F.max_pool2d(x, 2), scale_factor=2)
    rows, columns = x.shape[2] - y.shape[2], x.shape[3] - y.shape[3]
    return torch.cat([x, F.pad(y, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))], 1)


def pyramid(x: torch.Tensor) -> torch.Tensor:
    pooled = [F.interpolate(F.adaptive_avg_pool2d(x, size), x.shape[2:], mode="bilinear") for size in (1, 2, 3, 6)]
    return torch.cat([x, *pooled], 1)


def attention(pool: int) -> nn.Module:
    """Attention between all places of an image and those of a smaller one, or of itself."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        queries = x.flatten(2).transpose(1, 2)
        keys = F.max_pool2d(x, pool).flatten(2).transpose(1, 2) if pool > 1 else queries
        return self.attention(queries, keys, keys)[0]

    return compose(forward, attention=nn.MultiheadAttention(4, 2, batch_first=True))


def interpolate(mode: str, **options: float) -> Function:
    return lambda x: F.interpolate(x, mode=mode, **options)


# Ways of a factor at which float32 computes other sizes than float64, as torch does.
RESAMPLING: dict[str, dict[str, Any]] = {
    "linear": {"mode": "bilinear"},
    "corners": {"mode": "bilinear", "align_corners": True},
    "cubic": {"mode": "bicubic"},
    "recomputed": {"mode": "bilinear", "recompute_scale_factor": True},
    "area": {"mode": "area"},
    "nearest": {"mode": "nearest"},
    "nearest recomputed": {"mode": "nearest", "recompute_scale_factor": True},
}


def resize(x: torch.Tensor, size: Any, *, mode: str = "bilinear") -> torch.Tensor:
    """As MMSegmentation's does."""
    return F.interpolate(x, tuple(int(n) for n in size), mode=mode, align_corners=False)


def past_a_trace(x: torch.Tensor) -> torch.Tensor:
    """As code outside Python would, it takes the number out of a size; an exporter cannot follow."""
    return F.interpolate(x, [(n * 0.5).__int__() for n in x.shape[2:]], mode="bilinear", align_corners=False)


CASES = {
    "convolution": Case(lambda x: x),
    "global average": Case(nn.AdaptiveAvgPool2d(1), empty=_REDUCE),
    "global maximum": Case(nn.AdaptiveMaxPool2d(1), empty=_REDUCE),
    "average to one number": Case(nn.AdaptiveAvgPool2d(3)),
    "average to a tuple": Case(nn.AdaptiveAvgPool2d((5, 2))),
    "average with None": Case(nn.AdaptiveAvgPool2d((None, 2))),
    "maximum to one number": Case(nn.AdaptiveMaxPool2d(3)),
    "maximum to a tuple": Case(nn.AdaptiveMaxPool2d((5, 2))),
    "maximum with None": Case(nn.AdaptiveMaxPool2d((None, 2))),
    "pyramid": Case(pyramid),
    "pooling with ceil_mode": Case(lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True)),
    "average with ceil_mode": Case(lambda x: F.avg_pool2d(x, 3, 2, padding=1, ceil_mode=True, count_include_pad=False)),
    "window of the image": Case(lambda x: F.avg_pool2d(x, (int(x.shape[2]), 1)), both(frozenset({2}), "stays 8")),
    "scale 2": Case(interpolate("bilinear", scale_factor=2)),
    "scale 1/2": Case(interpolate("bilinear", scale_factor=0.5)),
    "nearest": Case(interpolate("nearest", scale_factor=2)),
    "nearest-exact": Case(interpolate("nearest-exact", scale_factor=1.7)),
    "bicubic": Case(interpolate("bicubic", scale_factor=2)),
    "fixed size": Case(lambda x: F.interpolate(x, (5, 7), mode="bilinear")),
    "area": Case(lambda x: F.interpolate(x, (5, 7), mode="area")),
    "size of another": Case(lambda x: F.interpolate(F.max_pool2d(x, 2), x.shape[2:], mode="bilinear")),
    "twice the size": Case(lambda x: F.interpolate(x, (x.shape[2] * 2, x.shape[3] * 2), mode="bilinear")),
    "int of half": Case(lambda x: F.interpolate(x, (int(x.shape[2] * 0.5), int(x.shape[3] * 0.5)), mode="bilinear")),
    "int of 0.7": Case(lambda x: F.interpolate(x, (int(x.shape[2] * 0.7), x.shape[3]), mode="bilinear"),
        {"torchscript": (frozenset({2}), "differs from torch")}),
    # The kernels of torch for the nearest value differ among themselves where 2 values become 4, as a factor of 2.3 does.
    **{f"{name} by {factor}": Case(interpolate(scale_factor=factor, **way)) for factor in (2.3, 0.7)
        for name, way in RESAMPLING.items() if (name, factor) != ("nearest", 2.3)},
    "area of the width": Case(lambda x: F.interpolate(x, (4, x.shape[3]), mode="area")),
    # A position lies on the border of two, as 10 of 2.3 times 10: Resize takes another neighbour.
    "nearest at ties": Case(interpolate("nearest", scale_factor=0.3)),
    "past a trace": Case(past_a_trace, {"dynamo": (IMAGE, "a condition at"), "torchscript": (IMAGE, "differs from torch at 131")}),
    "operator": Case(lambda x: torch.ops.aten.adaptive_avg_pool2d(x, (2, 2)), {"torchscript": (IMAGE,
        "the exporter cannot write it for other sizes: Unsupported: ONNX export of operator adaptive")}),
    "square": Case(lambda x: x + x.transpose(2, 3)),
    "norm of the batch": Case(nn.BatchNorm2d(4, track_running_stats=False)),
    "norm of the batch without parameters": Case(nn.BatchNorm2d(4, track_running_stats=False, affine=False)),
    "int of two factors": Case(lambda x: resize(x, (x.shape[2] * 0.5, x.shape[3] * 1.375))),
    "int of another's size": Case(lambda x: resize(F.max_pool2d(x, 2), x.shape[2:]) + x),
    "int of a third": Case(lambda x: x[:, :, : int(x.shape[2] / 3), int(x.shape[3] / 7) :]),
    "int, rounded twice": Case(lambda x: resize(x, (x.shape[2] / 7 * 7, x.shape[3])),
        {"torchscript": (frozenset({2}), "differs from torch")}),
    "int, rounded up": Case(lambda x: x[:, :, math.floor(x.shape[2] * 0.7) - 1 : math.ceil(x.shape[2] * 0.7)],
        {"torchscript": (frozenset({2}), "differs from torch")}),
    "flatten into Linear": Case(nn.Sequential(nn.Flatten(), nn.Linear(4 * 8 * 8, 5)),
        both(IMAGE, "the model ran at no other size")),
    "tokens": Case(lambda x: x.view(x.shape[0], 4, x.shape[2] * x.shape[3]).transpose(1, 2).softmax(1)),
    "attention to itself": Case(attention(1), {"torchscript": (IMAGE, "the exported model does not run at")}),
    "attention to a smaller map": Case(attention(2), {"torchscript": (IMAGE, "the exported model does not run at")}),
    "square grid": Case(lambda x: x.flatten(2).unflatten(2, (int((x.shape[2] * x.shape[3]) ** 0.5), -1)).sum(3)),
    "mean by division": Case(lambda x: x.sum((2, 3)) / (x.shape[2] * x.shape[3])),
    "standard deviation": Case(lambda x: x.std((2, 3))),
    "larger side": Case(lambda x: x / max(x.shape[2], x.shape[3]), {"torchscript": (IMAGE, "differs from torch")}),
    "windows": Case(windows),
    "patches": Case(patches),
    "shuffled channels": Case(lambda x: x.view(x.shape[0], 2, 2, *x.shape[2:]).transpose(1, 2).reshape(x.shape)),
    "split attention": Case(lambda x: (x.unflatten(1, (2, 2)) * x.mean((2, 3)).view(-1, 2, 2, 1, 1).softmax(1)).sum(1)),
    "pad to a multiple": Case(pad_to_multiple),
    "same padding": Case(same_padding),
    "half of what is above 9": Case(lambda x: F.pad(x, (0, 8 + (x.shape[2] - 9) // 2))),
    "floor of values": Case(lambda x: x - torch.floor_divide(x - 0.5, 0.25)),
    "positional embedding": Case(positions),
    "coordinates": Case(coordinates),
    "grid_sample": Case(warp, {"dynamo": (IMAGE, "the model fixes it")}),
    "skip of odd size": Case(skip),
    "crop": Case(lambda x: x[:, :, : x.shape[2] // 2 * 2, 1:]),
    "pixel shuffle": Case(lambda x: F.pixel_shuffle(x, 2)),
    "pixel unshuffle": Case(lambda x: F.pixel_unshuffle(x, 2), empty=_UNSHUFFLE),
    "unfold": Case(lambda x: F.unfold(x, 3, padding=1)),
    "fold": Case(lambda x: F.fold(F.unfold(x, 2, stride=2), x.shape[2:], 2, stride=2), refused=("torchscript",)),
    "roll": Case(lambda x: x.roll((2, -3), (2, 3))),
    "roll by half": Case(lambda x: x.roll((x.shape[2] // 2, 1), (2, 3)), {"dynamo": (IMAGE,
        "the exporter cannot write it for other sizes"), "torchscript": (frozenset({0, 2, 3}),
        "the exporter cannot write it for other sizes")}),
    "pairs of the batch": Case(lambda x: x.reshape(x.shape[0] // 2, 2, *x.shape[1:]).sum(1)),
    "halves of the batch": Case(lambda x: x.reshape(2, -1, *x.shape[1:]).sum(0)),
    "batch of a multiple of 3": Case(lambda x: x * 2 if x.shape[0] % 3 == 0 else x,
        both(frozenset({0}), "differs from torch")),
    "large batch": Case(lambda x: x * 2 if x.shape[0] > 6 else x, both(frozenset({0}), "differs from torch")),
    "odd height": Case(lambda x: x[:, :, :-1] if x.shape[2] % 2 else x, both(frozenset({2}), "differs from torch")),
    "upright": Case(lambda x: x * 2 if x.shape[2] > x.shape[3] else x, both(IMAGE, "differs from torch")),
}  # fmt: skip
