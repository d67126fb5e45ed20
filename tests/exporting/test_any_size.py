"""Adaptive pooling, resampling and norms of the batch in an ONNX file are right at every size."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bnexport

EXPORTERS = ["dynamo", "torchscript"]
# For each number of spatial dimensions the pooling and the sizes to compare at: divisible, prime, smaller than the
# output (values repeat), one.
SIZES = {1: [(6,), (11,), (2,), (1,)], 2: [(6, 8), (11, 7), (2, 13), (1, 1)], 3: [(4, 6, 5), (7, 1, 3)]}
POOLINGS = {
    "average 1d": (1, nn.AdaptiveAvgPool1d(3)),
    "average 2d": (2, nn.AdaptiveAvgPool2d((3, 2))),
    "average of rows": (2, nn.AdaptiveAvgPool2d((1, 3))),
    "average with None": (2, nn.AdaptiveAvgPool2d((None, 2))),
    "average 3d": (3, nn.AdaptiveAvgPool3d((2, None, 3))),
    "maximum 1d": (1, nn.AdaptiveMaxPool1d(3)),
    "maximum 2d": (2, nn.AdaptiveMaxPool2d((3, 2))),
    "maximum with None": (2, nn.AdaptiveMaxPool2d((3, None))),
    "maximum 3d": (3, nn.AdaptiveMaxPool3d((2, 3, 1))),
}
DEFAULT = ["average 2d"]
CASES = [("torchscript", name) for name in POOLINGS] + [
    pytest.param("dynamo", name, marks=[] if name in DEFAULT else pytest.mark.slow) for name in POOLINGS
]


def run(result, x):
    session = onnxruntime.InferenceSession(result.path)
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


@pytest.mark.parametrize(("exporter", "name"), CASES)
def test_every_size(exporter, name, tmp_path):
    rank, model = POOLINGS[name]
    x = torch.randn(2, 3, *(7, 6, 8)[:rank])
    result = bnexport.export(model, x, tmp_path / "m.onnx", exporter=exporter)
    assert result.verification.passed
    assert not result.notes
    for shape in SIZES[rank]:
        x = torch.randn(5, 3, *shape)
        np.testing.assert_allclose(run(result, x), model(x), rtol=1e-5, atol=1e-6, err_msg=str(shape))


@pytest.mark.parametrize(("mode", "factor"), [("nearest", 2.3), ("nearest", 0.3), ("nearest-exact", 1.7)])
@pytest.mark.parametrize("exporter", [pytest.param("dynamo", marks=pytest.mark.slow), "torchscript"])
def test_neighbours_at_ties(exporter, mode, factor, tmp_path):
    """Resize takes another neighbour than torch where a position lies on the border of two, as 10 of 2.3 times 10."""

    class Resampling(nn.Module):
        def forward(self, x):
            return F.interpolate(x, scale_factor=factor, mode=mode)

    result = bnexport.export(Resampling(), torch.randn(2, 3, 46, 46), tmp_path / "m.onnx", exporter=exporter)
    assert result.verification.passed
    assert not result.notes
    for shape in (46, 46), (14, 31), (97, 99):
        x = torch.randn(1, 3, *shape)
        np.testing.assert_array_equal(run(result, x), Resampling()(x), err_msg=str(shape))


@pytest.mark.parametrize(("factor", "kind"), [(2, "Resize"), (0.5, "Resize"), (1.7, "Resize"), (2.3, "Gather")])
def test_resize_stays_where_it_is_exact(factor, kind, tmp_path):
    result = bnexport.export(
        nn.Upsample(scale_factor=factor), torch.randn(2, 3, 8, 8), tmp_path / "m.onnx", exporter="torchscript"
    )
    assert kind in {node.op_type for node in onnx.load(result.path).graph.node}


def test_a_norm_without_statistics_in_half_precision(tmp_path):
    """As operators that every runtime takes: BatchNormalization would have to train, and fix the batch."""
    model = nn.BatchNorm2d(3, track_running_stats=False).half().eval()
    result = bnexport.export(model, torch.randn(2, 3, 7, 6).half(), tmp_path / "m.onnx", exporter="torchscript")
    assert result.verification.passed
    x = torch.randn(5, 3, 9, 4).half()
    np.testing.assert_allclose(run(result, x), model(x).detach(), rtol=0, atol=4e-3)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_types(dtype, tmp_path):
    """float16 values are added in float32, as torch does."""
    model, dtype = nn.AdaptiveAvgPool2d(2), getattr(torch, dtype)
    x = torch.full((1, 1, 64, 66), 100.0).to(dtype)
    result = bnexport.export(model, torch.randn(2, 1, 6, 6).to(dtype), tmp_path / "m.onnx", exporter="torchscript")
    assert result.verification.passed
    np.testing.assert_allclose(run(result, x), model(x), rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("model", "exporter", "operators"),
    [
        (nn.AdaptiveAvgPool2d(1), "torchscript", ["GlobalAveragePool"]),
        (nn.AdaptiveAvgPool2d(1), "dynamo", ["ReduceMean"]),
        (nn.AdaptiveMaxPool2d(1), "torchscript", ["GlobalMaxPool"]),
    ],
    ids=str,
)
def test_global_pooling_stays_one_operator(model, exporter, operators, tmp_path):
    result = bnexport.export(model, torch.randn(2, 3, 6, 6), tmp_path / "m.onnx", exporter=exporter)
    assert [node.op_type for node in result.model.graph] == operators


def test_static_sizes_keep_the_window(tmp_path):
    x = torch.randn(2, 3, 6, 6)
    result = bnexport.export(nn.AdaptiveAvgPool2d(3), x, tmp_path / "m.onnx", exporter="torchscript", dynamic=False)
    assert [node.op_type for node in result.model.graph] == ["AveragePool"]
