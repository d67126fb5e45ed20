"""Outputs that rounding errors swamp decide nothing; smaller inputs may."""

from collections import OrderedDict

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import bnexport
from bnexport.errors import VerificationError
from bnexport.exporting import onnx_target
from tests.folding.module.nets import off_by

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
ILL = "the network is ill-conditioned on these inputs: the reference itself differs from the model in float64 by"


def cancelling():
    """Values of size 1e6 whose mean the batch norm subtracts: three digits are left in torch, all of them when folded."""
    torch.manual_seed(0)
    net = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 1), norm=nn.BatchNorm2d(4))).eval()
    net.conv.bias.data.fill_(1e6)
    net.norm.running_mean.fill_(1e6)
    return net


class Cubic(nn.Module):
    """Adds and subtracts 1e7 x^3, which is small next to the rest where x is small."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        large = 1e7 * x * x * x
        return (large + self.conv(x)) - large


@pytest.fixture
def wrong_weight(monkeypatch):
    """The exported weight is off by 5 %."""

    def wrong(model, *arguments, finish=onnx_target.finish):
        finish(model, *arguments)
        (name,) = [name for name in model.graph.initializers if name.endswith("weight") and "conv" in name]
        value = model.graph.initializers[name]
        value.const_value = ir.tensor(value.const_value.numpy() * np.float32(1.05), name=name)

    monkeypatch.setattr(onnx_target, "finish", wrong)


def test_a_model_that_cannot_be_judged(wrong_weight, tmp_path):
    result = bnexport.export(cancelling(), X, tmp_path / "m.onnx", exporter="torchscript", fold=False)
    assert result.verification.status == "not_verified"
    assert result.verification.summary().startswith(f"not verified: output 'output': {ILL}")
    assert "inputs down to 1/4096 of their size decide nothing either" in result.verification.reason
    assert result.path.exists()


def test_a_model_that_is_more_accurate_than_torch(tmp_path):
    """The folded model has all digits: it is held against the one in float64."""
    result = bnexport.export(cancelling(), X, tmp_path / "m.onnx", exporter="torchscript")
    assert result.verification.passed
    assert all(output.atol < 1e-3 for output in result.verification.outputs)


def test_torchs_formats(monkeypatch, tmp_path):
    """Whole modules decide nothing here; the proof of the fold finds the wrong weight."""
    off_by(monkeypatch, 1e-2)
    with pytest.raises(VerificationError, match=r"nothing was written: .*the shift of channel 0 differs by 0\.01"):
        bnexport.export(cancelling(), X, tmp_path / "m.pt", format="torchscript")
    assert not list(tmp_path.iterdir())


def test_a_training_step(tmp_path):
    class Cancels(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            return (self.conv(x) + 1e6) - 1e6

    batch = (X, torch.zeros(2, 4, 6, 6))
    result = bnexport.export_training_step(Cancels(), nn.MSELoss(), batch, tmp_path / "s.onnx")
    assert result.verification.status == "not_verified"
    assert "the step is ill-conditioned on this batch" in result.verification.summary()


def test_a_wrong_model_shows_on_smaller_inputs(wrong_weight, tmp_path):
    with pytest.raises(
        VerificationError, match=r"nothing was written: output 'output' in .*: differs.* on inputs times"
    ):
        bnexport.export(Cubic().eval(), X, tmp_path / "m.onnx", exporter="torchscript")
    assert not list(tmp_path.iterdir())


def test_infinite_outputs_are_compared_on_smaller_inputs(tmp_path):
    class Exponential(nn.Module):
        def forward(self, x):
            return torch.exp(60.0 * x)

    result = bnexport.export(Exponential(), X, tmp_path / "m.onnx", exporter="torchscript")
    assert (result.verification.passed, result.verification.input_scale) == (True, 2.0**-3)
    assert "on inputs times 0.125" in result.verification.summary()
