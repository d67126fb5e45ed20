"""Resampling by a factor gives the sizes of torch, which computes them in float64: 100 * 2.3 is 230 in float32 only."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bnexport
from bnexport.exporting import exact_sizes
from tests.exporting.size_corpus import RESAMPLING
from tests.support.checks import needs_dynamo

# At the first three, float32 computes another size for 2.3 or 0.7.
SIZES = [(50, 90), (100, 7), (170, 4), (10, 13), (230, 6)]


class Resampling(nn.Module):
    def __init__(self, factor, **options):
        super().__init__()
        self.options = {"scale_factor": factor, **options}

    def forward(self, x):
        return F.interpolate(x, **self.options)


def check(result, model, shapes):
    session = onnxruntime.InferenceSession(result.path)
    for shape in shapes:
        x = torch.randn(1, 2, *shape)
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(got, model(x).detach(), rtol=1e-3, atol=1e-3, err_msg=str(shape))


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_batch_norm_behind_it_folds(dynamic, tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Upsample(scale_factor=2.3, mode="bilinear"), nn.BatchNorm2d(2)).eval()
    for values in (model[2].running_mean, model[2].weight, model[2].bias):
        nn.init.normal_(values)
    result = bnexport.export(
        model, torch.randn(1, 3, 100, 50), tmp_path / "m.onnx", dynamic={"input": {2: "height"}} if dynamic else False
    )
    assert result.verification.passed
    assert result.report.after.batch_norm == 0


def test_a_program_is_right_as_well(tmp_path):
    """Its calls are those of aten's operators."""
    sizes = {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    for mode in "nearest", "bilinear":
        model = Resampling(2.3, mode=mode)
        program = torch.export.export(model, (torch.randn(1, 2, 16, 12),), dynamic_shapes=(sizes,))
        result = bnexport.export(program, torch.randn(1, 2, 16, 12), tmp_path / "m.onnx", overwrite=True)
        assert result.verification.passed
        check(result, model, SIZES)


def test_an_exact_factor_stays_a_factor(tmp_path):
    """2, 0.5 and 1.7 give the same sizes in both types."""
    for factor in 2, 0.5, 1.7:
        model = Resampling(factor, mode="bilinear")
        result = bnexport.export(
            model, torch.randn(1, 2, 8, 8), tmp_path / "m.onnx", exporter="torchscript", overwrite=True
        )
        assert [node.op_type for node in onnx.load(result.path).graph.node] == ["Resize"]


@pytest.mark.slow
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("factor", [2.3, 1.7, 0.7, 0.3, 1 / 3])
def test_every_size_up_to_512(exporter, factor, tmp_path):
    for options in RESAMPLING.values():
        model = Resampling(factor, **options)
        result = bnexport.export(
            model, torch.randn(1, 2, 16, 12), tmp_path / "m.onnx", exporter=exporter, overwrite=True
        )
        assert result.verification.passed
        check(result, model, [(size, 5) for size in range(4, 513)])


@needs_dynamo
def test_floor_divisions_of_negative_sizes(tmp_path):
    """Rounded up by a negative dividend, and by a negative divisor."""

    class Halves(nn.Module):
        def forward(self, x):
            rows = x.shape[2]
            return x[:, :, : -(-rows // 2)].sum((2, 3)) + 2 * x[:, :, : -(rows // -2)].sum((2, 3))

    bnexport.export(Halves(), torch.randn(2, 3, 8, 4), tmp_path / "m.onnx", exporter="dynamo", verify=False)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    for rows in (8, 7, 13):
        x = torch.randn(2, 3, rows, 4)
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(got, Halves()(x).numpy(), rtol=1e-5, atol=1e-5)


def test_scales_with_a_computed_part_are_not_constant():
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[N,3,4,4] x, float[2] s) => (float[N,3,A,B] y) {
        c = Constant <value_floats = [1.0, 1.0]> () t = Concat <axis = 0> (c, s) y = Resize <mode = "linear"> (x, , t) }"""
    *_, resize = ir.from_onnx_text(text).graph
    assert exact_sizes._scales(resize) is None
