"""Classes that derive from a batch norm and compute something else; batch norms that no module holds."""

import onnx
import pytest
import torch
from torch import nn

import bnexport
from bnexport import SyncBatchNorm
from bnexport.errors import UnsupportedModelError

EXPORTERS = pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])


class _Activated(nn.BatchNorm2d):
    def forward(self, x):
        return torch.relu(super().forward(x))


class _ActivatedOurs(SyncBatchNorm):
    def forward(self, x):
        return torch.relu(super().forward(x))


@EXPORTERS
def test_a_subclass_that_computes_something_else_is_refused_by_name(exporter, tmp_path):
    net, x = nn.Sequential(nn.Conv2d(3, 3, 1), _Activated(3)), torch.randn(4, 3, 5, 5)
    with pytest.raises(UnsupportedModelError, match=r"^1 \(.*_Activated changes forward\): .* mode='deploy'"):
        bnexport.export(net, x, tmp_path / "m.onnx", mode="custom_op", exporter=exporter)
    assert not list(tmp_path.iterdir())
    assert bnexport.export(net, x, tmp_path / "m.onnx", exporter=exporter).verification.passed


@EXPORTERS
def test_a_subclass_of_ours_deploys_as_standard_operators(exporter, tmp_path):
    net, x = nn.Sequential(nn.Conv2d(3, 3, 1), _ActivatedOurs(3)), torch.randn(4, 3, 5, 5)
    result = bnexport.export(net, x, tmp_path / "m.onnx", exporter=exporter, fold=False)
    assert result.verification.passed
    assert {opset.domain for opset in onnx.load(result.path).opset_import} == {""}
    result = bnexport.export(net, x, tmp_path / "c.onnx", exporter=exporter, mode="custom_op")
    assert result.state == ("1.running_mean", "1.running_var", "1.num_batches_tracked")


@pytest.mark.filterwarnings("ignore:scripting fails")
@pytest.mark.parametrize("name", ["m.pt", "m.pt2"])
def test_a_subclass_of_ours_in_torchs_formats(name, tmp_path):
    net, x = nn.Sequential(nn.Conv2d(3, 3, 1), _ActivatedOurs(3)), torch.randn(4, 3, 5, 5)
    kind = {"m.pt": "torchscript", "m.pt2": "pt2"}[name]
    assert bnexport.export(net, x, tmp_path / name, format=kind).verification.passed


@EXPORTERS
def test_batch_statistics_that_no_module_holds_are_refused(exporter, tmp_path):
    def forward(x):
        return nn.functional.batch_norm(x, norm.running_mean, norm.running_var, None, None, True)

    norm = nn.BatchNorm2d(3)
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Identity())
    net[1].norm, net[1].forward = norm, forward
    with pytest.raises(UnsupportedModelError, match=r"batch.norm.*put that module into eval mode"):
        bnexport.export(
            net, torch.randn(4, 3, 5, 5), tmp_path / "m.onnx", mode="custom_op", exporter=exporter, verify=False
        )


def test_errors_of_an_exporter_name_the_model(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 3, 1), torch.jit.script(nn.BatchNorm2d(3))).eval()
    with pytest.raises(
        UnsupportedModelError, match=r"^1 \(.*compiled by TorchScript.*\): torch cannot export it, though it runs: "
    ):
        bnexport.export(net, torch.randn(4, 3, 5, 5), tmp_path / "m.onnx", exporter="torchscript")
