"""The models of the comparison with other tools: small torch modules, and ONNX files that torch does not write.

Each is the smallest network that shows one thing. A case that folds into wrong numbers is a trap: a right tool
leaves its batch norm alone, or folds it right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx.parser
import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Case:
    """`build` gives a module, for the exporters, or a model with its input: `what` says it in the table."""

    what: str
    shape: tuple[int, ...]
    build: Callable[[], nn.Module | onnx.ModelProto]
    dtype: str = "float32"
    scale: float = 1.0  # of the random input


def trained(module: nn.Module) -> nn.Module:
    """Returns the module in eval mode, its batch norms with statistics and weights as training leaves them."""
    generator = torch.Generator().manual_seed(0)
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.running_mean.normal_(generator=generator)  # type: ignore[union-attr]
            layer.running_var.uniform_(0.5, 2, generator=generator)  # type: ignore[union-attr]
            with torch.no_grad():
                layer.weight.uniform_(0.5, 2, generator=generator)
                layer.bias.normal_(generator=generator)
    return module.eval()


class Positions(nn.Module):
    """A linear layer over (N, L, C), and a batch norm over C: sequence models."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.linear(x).transpose(1, 2)))


class Residual(nn.Module):
    """A batch norm behind a sum of two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(6, 8, 1), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.one(x) + self.two(x)))


class Joined(nn.Module):
    """A batch norm behind a Concat."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Conv2d(6, 4, 3, padding=1), nn.Conv2d(6, 4, 1), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(torch.cat([self.one(x), self.two(x)], 1)))


class Branches(nn.Module):
    """A block of RepVGG: a 3x3 convolution, a 1x1 convolution and the input itself, each with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.small = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.same = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.large(x) + self.small(x) + self.same(x))


def network(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return trained(build())

    return make


def text(graph: str, values: dict[str, Any], *, dtype: str = "float32", opset: int = 18) -> onnx.ModelProto:
    """Returns a model from ONNX text with its parameters: an array, or the shape of random ones."""
    generator = np.random.default_rng(0)
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}, "mmcv": 1]>\n{graph}')
    for name, value in values.items():
        array = np.asarray(generator.standard_normal(value) if isinstance(value, tuple) else value)
        array = np.abs(array) + 0.5 if name == "v" and isinstance(value, tuple) else array
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(array.astype(dtype if array.dtype.kind == "f" else array.dtype), name)
        )
    return model


NORM = dict.fromkeys("sbmv", (8,))


def node() -> onnx.ModelProto:
    body = 'z = Conv (x, w)\n t = mmcv.MMCVSyncBatchNorm <eps: float = 1e-5, momentum: float = 0.1, group: string = "",'
    body += " group_size: int = 1> (z, m, v, s, b)\n y = Relu (t)"
    return text(f"g (float[2,6,9,9] x) => (float[2,8,9,9] y) {{ {body} }}", {"w": (8, 6, 1, 1), **NORM})


def overflow() -> onnx.ModelProto:
    """A float16 convolution whose weights overflow when they are multiplied; its outputs do not."""
    body = "t = Conv (x, w)\n y = BatchNormalization <epsilon = 1e-3> (t, s, b, m, v)"
    norm = {"s": np.full(8, 4.0), "b": np.zeros(8), "m": np.zeros(8), "v": np.full(8, 2.0**-10)}
    graph = f"g (float16[2,6,9,9] x) => (float16[2,8,9,9] y) {{ {body} }}"
    return text(graph, {"w": np.full((8, 6, 1, 1), 1000.0), **norm}, dtype="float16")


def positions() -> onnx.ModelProto:
    """MatMul over the last axis, BatchNormalization over axis 1, of the same size by chance."""
    body = "t = MatMul (x, w)\n y = BatchNormalization (t, s, b, m, v)"
    return text(f"g (float[2,8,6] x) => (float[2,8,8] y) {{ {body} }}", {"w": (6, 8), **NORM})


def training() -> onnx.ModelProto:
    """BatchNormalization that uses the statistics of its batch."""
    body = "t = Conv (x, w)\n y, m2, v2 = BatchNormalization <training_mode = 1> (t, s, b, m, v)"
    return text(f"g (float[2,6,9,9] x) => (float[2,8,9,9] y) {{ {body} }}", {"w": (8, 6, 1, 1), **NORM})


def last_axis() -> onnx.ModelProto:
    """Mul by a vector over the last axis behind a convolution, of as many values as there are channels."""
    body = "t = Conv (x, w)\n y = Mul (t, k)"
    return text(f"g (float[2,6,8,8] x) => (float[2,8,8,8] y) {{ {body} }}", {"w": (8, 6, 1, 1), "k": (8,)})


def foreign() -> onnx.ModelProto:
    """An operator of another domain that is called BatchNormalization too, with a body of its own."""
    model = text(
        "g (float[2,6,9,9] x) => (float[2,8,9,9] y) { t = Conv (x, w)\n y = mmcv.BatchNormalization (t, s, b, m, v) }",
        {"w": (8, 6, 1, 1), **NORM},
    )
    body = '<domain: "mmcv", opset_import: ["": 18]> BatchNormalization (x, s, b, m, v) => (y) { y = Neg (x) }'
    model.functions.append(onnx.parser.parse_function(body))
    return model


IMAGE = (2, 6, 9, 9)
FOLDS = {
    "sync batch norm": Case(
        "Conv, SyncBatchNorm, in eval mode",
        IMAGE,
        network(lambda: nn.Sequential(nn.Conv2d(6, 8, 3), nn.SyncBatchNorm(8), nn.ReLU())),
    ),
    "transposed": Case(
        "ConvTranspose with groups",
        IMAGE,
        network(lambda: nn.Sequential(nn.ConvTranspose2d(6, 8, 3, groups=2), nn.BatchNorm2d(8), nn.ReLU())),
    ),
    "linear": Case(
        "Linear (Gemm)", (4, 6), network(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()))
    ),
    "positions": Case("Linear over positions (MatMul, Add, Transpose)", (2, 5, 6), network(Positions)),
    "forward": Case(
        "a batch norm in front of a convolution",
        IMAGE,
        network(lambda: nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 8, 3), nn.ReLU())),
    ),
    "residual": Case("a sum of two convolutions", IMAGE, network(Residual)),
    "concat": Case("through a Concat", IMAGE, network(Joined)),
    "branches": Case("parallel branches (RepVGG), three batch norms", (2, 8, 9, 9), network(Branches)),
    "pre-activation": Case(
        "a batch norm between the input and a Relu",
        IMAGE,
        network(lambda: nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3))),
    ),
    "node": Case("an ONNX file with `MMCVSyncBatchNorm`", IMAGE, node),
}
TRAPS = {
    "overflow": Case("float16 weights that would overflow", IMAGE, overflow, "float16", 1e-3),
    "wrong axis": Case("MatMul and a batch norm over another axis of the same size", (2, 8, 6), positions),
    "last axis": Case("a product over the last axis behind a convolution", (2, 6, 8, 8), last_axis),
    "training mode": Case("BatchNormalization with `training_mode = 1`", IMAGE, training),
    "foreign": Case("another domain's operator named BatchNormalization", IMAGE, foreign),
}
CASES = {**FOLDS, **TRAPS}
