"""Ten ways through bnexport with every option left as it is: what a version of torch must allow."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import bnexport
from tests.support.checks import needs_dynamo, needs_training_step

X = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A residual block and a classifier, with sync batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.SyncBatchNorm(8), nn.ReLU())
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.SyncBatchNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        value = self.stem(image)
        value = torch.relu(value + self.norm(self.conv(value)))
        return self.head(nn.functional.adaptive_avg_pool2d(value, 1).flatten(1))


def trained() -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    for module in net.modules():
        if isinstance(module, nn.SyncBatchNorm):
            nn.init.uniform_(module.running_mean, -1, 1)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 2)
    return net.eval()


def expected() -> torch.Tensor:
    with torch.no_grad():
        return trained()(X)


def close(got: object) -> None:
    np.testing.assert_allclose(np.asarray(got), expected().numpy(), rtol=1e-4, atol=1e-5)


def run(path: Path, options: onnxruntime.SessionOptions | None = None) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: X.numpy()})


def convert(folder: Path) -> None:
    with torch.no_grad():
        close(bnexport.convert_sync_batchnorm(trained())(X))


def train(folder: Path) -> None:
    ours, theirs = bnexport.convert_sync_batchnorm(trained()).train(), plain(trained()).train()
    for net in (ours, theirs):
        net(X).square().mean().backward()
    for got, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-3, atol=1e-5)
    for got, wanted in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(got, wanted)


def plain(net: nn.Module) -> nn.Module:
    """Replace sync batch norms, which torch trains on GPUs only, by plain ones."""
    for name, child in net.named_children():
        if isinstance(child, nn.SyncBatchNorm):
            norm = nn.BatchNorm2d(child.num_features)
            norm.load_state_dict(child.state_dict())
            setattr(net, name, norm)
        else:
            plain(child)
    return net


def onnx(exporter: str | None) -> Callable[[Path], None]:
    def way(folder: Path) -> None:
        result = bnexport.export(trained(), X, folder / "m.onnx", exporter=exporter)
        assert result.report.after.batch_norm == 0 and result.verification.status == "passed"
        assert any("TorchScript" in note for note in result.notes) == (exporter is None and result.exporter != "dynamo")
        close(run(folder / "m.onnx")[0])

    return way


def kept_node(folder: Path) -> None:
    bnexport.export(trained(), X, folder / "m.onnx", mode="custom_op")
    close(run(folder / "m.onnx")[0])
    options = onnxruntime.SessionOptions()
    bnexport.register(options)
    close(run(folder / "m.onnx", options)[0])


def torchscript(folder: Path) -> None:
    bnexport.export(trained(), X, folder / "m.pt")
    close(torch.jit.load(folder / "m.pt")(X))


def pt2(folder: Path) -> None:
    bnexport.export(trained(), X, folder / "m.pt2")
    close(torch.export.load(folder / "m.pt2").module()(X).detach())


def fold_module(folder: Path) -> None:
    folded = bnexport.fold_module(trained())
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in folded.modules())
    with torch.no_grad():
        close(folded(X))


def compiled(folder: Path) -> None:
    net = bnexport.convert_sync_batchnorm(trained())
    with torch.no_grad():
        close(torch.compile(copy.deepcopy(net), backend="aot_eager")(X))


def training_step(folder: Path) -> None:
    net, target = bnexport.convert_sync_batchnorm(trained()).train(), torch.tensor([0, 1, 2, 3])
    bnexport.export_training_step(net, nn.functional.cross_entropy, (X, target), folder / "step.onnx")
    session = bnexport.TrainingSession(folder / "step.onnx")
    session.learning_rate = 0.05
    losses = [session.step((X.numpy(), target.numpy())) for _ in range(3)]
    assert losses[2] < losses[0]


WAYS: dict[str, Callable[[Path], None]] = {
    "convert": convert,
    "train": train,
    "ONNX, by default": onnx(None),
    "ONNX, dynamo": onnx("dynamo"),
    "ONNX, TorchScript": onnx("torchscript"),
    "kept node": kept_node,
    "`.pt`": torchscript,
    "`.pt2`": pt2,
    "`fold_module`": fold_module,
    "`torch.compile`": compiled,
    "training step": training_step,
}


NEEDS = {"ONNX, dynamo": needs_dynamo, "training step": needs_training_step}


@pytest.mark.parametrize("way", [pytest.param(way, marks=NEEDS.get(way, ())) for way in WAYS])
def test_way(way: str, tmp_path: Path) -> None:
    WAYS[way](tmp_path)
