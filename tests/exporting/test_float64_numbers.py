"""Numbers of float64 models keep their digits in the file of the dynamo exporter."""

import numpy as np
import onnxruntime
import pytest
import torch

import bnexport
from bnexport.errors import VerificationError
from bnexport.exporting import dynamo


class Numbers(torch.nn.Module):
    def forward(self, x):
        half = torch.full((3,), 0.3, dtype=x.dtype)
        single = torch.tensor(0.7).to(x.dtype)  # float32 in torch, too
        return torch.add(x * 0.1, half, alpha=0.6) ** 0.9, torch.where(x > 0.2, x / 3, 1 / 3) * single


def test_numbers_are_those_of_the_module(tmp_path):
    x = torch.linspace(0.1, 1.0, 6, dtype=torch.float64).reshape(2, 3)
    bnexport.export(Numbers(), x, tmp_path / "m.onnx", exporter="dynamo", dynamic=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    got = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for value, expected in zip(got, Numbers()(x)):
        np.testing.assert_allclose(value, expected.numpy(), rtol=1e-15)


def test_a_number_that_float32_rounded_does_not_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(dynamo, "write_doubles", lambda exported: None)
    x = torch.linspace(0.1, 1.0, 6, dtype=torch.float64).reshape(2, 3)
    with pytest.raises(VerificationError, match="differs"):
        bnexport.export(Numbers(), x, tmp_path / "m.onnx", exporter="dynamo", dynamic=False)


def test_numbers_that_are_float32_in_onnx_pass(tmp_path):
    """The slope of a Selu, and eps of a batch norm."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.SELU(), torch.nn.BatchNorm1d(4)).double().eval()
    result = bnexport.export(
        model, torch.randn(2, 3, dtype=torch.float64), tmp_path / "m.onnx", fold=False, dynamic=False
    )
    assert result.verification.passed
