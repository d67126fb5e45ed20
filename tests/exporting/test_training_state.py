"""Buffers that a training forward changes are state of the exported graph, each once."""

import numpy as np
import pytest
import torch
from torch import nn

import bnexport
from bnexport import SyncBatchNorm
from bnexport.errors import UnsupportedModelError

EXPORTERS = pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])


def _run(path, x):
    session = bnexport.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {session.get_inputs()[0].name: x.numpy()})))


class _Stateful(nn.Module):
    """A buffer that a forward replaces without reading it, and one that it changes in place."""

    def __init__(self):
        super().__init__()
        self.norm = SyncBatchNorm(3)
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("total", torch.ones(3))

    def forward(self, x):
        if self.training:
            self.last = x.mean((0, 2))
            self.total += self.last
        return self.norm(x) + self.total[:, None]


def test_every_buffer_that_a_training_forward_changes_is_returned(tmp_path):
    net, x = _Stateful(), torch.randn(4, 3, 5)
    result = bnexport.export(net, x, tmp_path / "m.onnx", mode="custom_op")
    assert result.verification.passed
    assert set(result.state) == {name for name, _ in net.named_buffers()}
    got = _run(result.path, x)
    net(x)
    for name, value in net.named_buffers():
        torch.testing.assert_close(torch.from_numpy(np.asarray(got[f"{name}.new"])), value, msg=name)
    with pytest.raises(
        UnsupportedModelError, match="last: the forward changes this buffer, and exporter='torchscript'"
    ):
        bnexport.export(_Stateful(), x, tmp_path / "t.onnx", mode="custom_op", exporter="torchscript")


@EXPORTERS
def test_a_module_under_two_names_updates_its_statistics_twice(exporter, tmp_path):
    norm = nn.BatchNorm2d(3, momentum=0.3)
    net, x = nn.Sequential(nn.Conv2d(3, 3, 1), norm, nn.ReLU(), norm), torch.randn(4, 3, 5, 5)
    result = bnexport.export(net, x, tmp_path / "m.onnx", mode="custom_op", exporter=exporter)
    assert result.state == ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    got = _run(result.path, x)
    net(x)
    assert got["1.num_batches_tracked.new"] == 2
    torch.testing.assert_close(torch.from_numpy(got["1.running_var.new"]), norm.running_var, rtol=1e-5, atol=1e-6)


@EXPORTERS
@pytest.mark.parametrize("momentum", [0.1, None])
def test_an_empty_batch_does_not_count(exporter, momentum, tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 3, 1), SyncBatchNorm(3, momentum=momentum))
    result = bnexport.export(net, torch.randn(4, 3, 5, 5), tmp_path / "m.onnx", mode="custom_op", exporter=exporter)
    full, empty = (_run(result.path, torch.randn(size, 3, 5, 5)) for size in (2, 0))
    assert (full["1.num_batches_tracked.new"], empty["1.num_batches_tracked.new"]) == (1, 0)
    np.testing.assert_array_equal(empty["1.running_var.new"], net[1].running_var)
