"""Sizes that a model computes with int() stay dynamic in an ONNX file."""

import sys

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bnexport
from bnexport.errors import UnsupportedModelError
from bnexport.exporting.tracer_notes import is_tracer_note


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.function = function

    def forward(self, x):
        return self.function(self.body(x))


def resize(x, size):
    """As MMSegmentation's does."""
    return F.interpolate(x, tuple(int(n) for n in size), mode="bilinear", align_corners=False)


def other_uses(x):
    """int as a function of other things, as a class, and as a type."""
    assert isinstance(int(x.shape[2]), int) and not isinstance(2.0, int) and issubclass(bool, int)
    assert int("7") + int(3.9) + int("ff", base=16) + int.from_bytes(b"\1", "big") == 266
    return x * int(x.shape[1])


KEPT = {
    "half": lambda x: F.interpolate(x, (int(x.shape[2] * 0.5), int(x.shape[3] * 1.375)), mode="bilinear"),
    "same": lambda x: resize(F.max_pool2d(x, 2), x.shape[2:]) + x,
    "third": lambda x: x[:, :, : int(x.shape[2] / 3), int(x.shape[3] / 7) :],
    "grid": lambda x: x.flatten(2).reshape(x.shape[0], 4, int((x.shape[2] * x.shape[3]) ** 0.5), -1).sum(3),
    "other uses": other_uses,
}
# float32 gives 63 for 90 * 0.7, float64 62.999...; 10 / 3 * 3 is 10 in one of them only; a window has to be a number.
FIXED = {
    "inexact factor": (lambda x: resize(x, (x.shape[2] * 0.7, x.shape[3])), "interpolate", 2),
    "rounded twice": (lambda x: resize(x, (x.shape[2] / 3 * 3, x.shape[3])), "interpolate", 2),
    "window": (lambda x: F.avg_pool2d(x, (int(x.shape[2]), 1)), "", 2),
}
DEFAULT = ["half"]


def cases(names):
    return [("torchscript", name) for name in names] + [
        pytest.param("dynamo", name, marks=[] if name in DEFAULT else pytest.mark.slow) for name in names
    ]


@pytest.mark.parametrize(("exporter", "name"), cases(KEPT))
def test_kept(exporter, name, tmp_path):
    model = Net(KEPT[name]).eval()
    result = bnexport.export(model, torch.randn(2, 3, 6, 6), tmp_path / "m.onnx", exporter=exporter)
    assert result.verification.passed
    assert not result.notes
    session = onnxruntime.InferenceSession(result.path)
    for size in [(8, 8), (45, 20), (90, 90)]:
        if name == "grid" and size[0] != size[1]:
            continue  # the model itself does not take it
        x = torch.randn(1, 3, *size)
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(got, model(x).detach(), rtol=1e-4, atol=1e-4, err_msg=str(size))


@pytest.mark.parametrize(("exporter", "name"), cases(FIXED))
def test_fixed(exporter, name, tmp_path):
    function, operator, dimension = FIXED[name]
    model = Net(function).eval()
    result = bnexport.export(model, torch.randn(2, 3, 6, 6), tmp_path / "m.onnx", exporter=exporter)
    assert result.verification.passed
    (note,) = (note for note in result.notes if not is_tracer_note(note))
    assert f"dimension {dimension}" in note and operator in note


def test_int_is_itself_afterwards(tmp_path):
    """After an export that fails as well, which runs again with ever fewer open sizes, and where a size was kept."""
    seen = []

    def fails(x):
        seen.append(int)
        raise RuntimeError("stop")

    def fails_with_size(x):
        return fails(x[:, :, int(x.shape[2]) :])

    for function, runs in ((fails, 4), (fails_with_size, 5)):
        seen.clear()
        with pytest.raises(UnsupportedModelError, match="stop"):
            bnexport.export(
                Net(function), torch.randn(2, 3, 6, 6), tmp_path / "m.onnx", exporter="torchscript", verify=False
            )
        assert len(seen) == runs
        assert seen[0] is not int
        assert "int" not in vars(sys.modules[__name__])
