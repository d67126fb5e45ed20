"""Each workaround for torch's exporters is still needed: plain torch is tried on what it is for, and fails.

A test that fails here says that this torch no longer needs the workaround. It goes once no supported version does
(`make campaign RUN=torch` runs these tests in each).
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from bnexport import torch_versions
from tests.support.checks import needs_dynamo


class Function(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x)


def is_right(
    module: nn.Module, example: torch.Tensor, path: Path, *more: torch.Tensor, dynamo: bool, axes: tuple[int, ...] = ()
) -> bool:
    """Whether plain torch.onnx.export writes a file that runs and is right, for these inputs as well."""
    if dynamo:
        sizes = {"dynamic_shapes": (dict.fromkeys(axes, torch.export.Dim.DYNAMIC),)} if axes else {}
    else:
        sizes = {"dynamic_axes": {"x": {axis: f"d{axis}" for axis in axes}}} if axes else {}
    chosen: dict[str, bool] = {"dynamo": False} if torch_versions.has((2, 5)) else {}
    if dynamo:
        chosen = {"dynamo": True, "optimize": False}
    with contextlib.suppress(Exception):
        torch.onnx.export(module.eval(), (example,), str(path), input_names=["x"], opset_version=18, **sizes, **chosen)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        for x in (example, *more):
            with torch.no_grad():
                expected = module(x).numpy()
            got = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
            if got.shape != expected.shape or not np.allclose(got, expected, rtol=1e-4, atol=1e-5):
                return False
        return True
    return False


def image(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def test_plain_parameters() -> None:
    layer = nn.Linear(2, 2)
    parametrize.register_parametrization(layer, "weight", Doubled())
    with pytest.raises(torch.jit.Error):
        torch.jit.script(layer)(image(3, 2))


def test_weight_norm_of_a_vector(tmp_path: Path) -> None:
    norm = nn.utils.weight_norm(nn.BatchNorm2d(3))
    with torch.no_grad():
        norm.weight_v.copy_(torch.tensor([1.0, -2.0, 3.0]))
    assert not is_right(norm, image(2, 3, 4, 4), tmp_path / "m.onnx", dynamo=False)


def half(x: torch.Tensor) -> torch.Tensor:
    return x[:, :, : int(x.shape[2] / 2)]


SIZES = {
    "symbolic int": (Function(half), (8, 8), (12, 8), (2,)),
    "average pooling": (nn.AdaptiveAvgPool2d(3), (7, 8), (10, 11), (2, 3)),
    "maximum pooling": (nn.AdaptiveMaxPool2d(3), (7, 8), (10, 11), (2, 3)),
    "linspace of one": (Function(lambda x: x + torch.linspace(-1, 1, x.shape[2])[:, None]), (4, 4), (1, 4), (2,)),
    "floor divide": (Function(lambda x: x[:, :, : -(-x.shape[2] // 2)]), (4, 4), (5, 4), (2,)),
}


@pytest.mark.parametrize("name", SIZES)
def test_another_size(name: str, tmp_path: Path) -> None:
    module, size, other, axes = SIZES[name]
    assert not is_right(module, image(2, 3, *size), tmp_path / "m.onnx", image(2, 3, *other), dynamo=False, axes=axes)


@needs_dynamo
def test_conv3d_without_a_bias(tmp_path: Path) -> None:
    assert not is_right(nn.Conv3d(3, 4, 1, bias=False), image(2, 3, 4, 4, 4), tmp_path / "m.onnx", dynamo=True)


@needs_dynamo
def test_batch_statistics_with_running_ones(tmp_path: Path) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("var", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.batch_norm(x, self.mean.clone(), self.var.clone(), training=True)

    assert not is_right(Functional(), image(4, 3, 5, 5) + 3, tmp_path / "m.onnx", dynamo=True)
