"""Ten ways through bnexport with every option left as it is: what a version of torch must allow."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import bnexport
from tests.runtimes.files import network
from tests.support.checks import needs_dynamo, needs_training_step

X = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def trained(norm: type[nn.Module] = nn.SyncBatchNorm) -> nn.Module:
    return network(norm=norm).eval()


def close(got: Any) -> None:
    with torch.no_grad():
        expected = trained()(X).numpy()
    np.testing.assert_allclose(got.detach() if isinstance(got, torch.Tensor) else got, expected, rtol=1e-4, atol=1e-5)


def run(path: Path, options: onnxruntime.SessionOptions | None = None) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: X.numpy()})[0]


def convert(folder: Path) -> None:
    close(bnexport.convert_sync_batchnorm(trained())(X))


def train(folder: Path) -> None:
    # torch trains its sync batch norm on GPUs only.
    ours, theirs = bnexport.convert_sync_batchnorm(trained()).train(), trained(nn.BatchNorm2d).train()
    for net in (ours, theirs):
        net(X).square().mean().backward()
    for got, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-3, atol=1e-5)
    for got, wanted in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(got, wanted)


def onnx(exporter: str | None) -> Callable[[Path], None]:
    def way(folder: Path) -> None:
        result = bnexport.export(trained(), X, folder / "m.onnx", exporter=exporter)
        assert result.report.after.batch_norm == 0 and result.verification.status == "passed"
        assert any("TorchScript" in note for note in result.notes) == (exporter is None and result.exporter != "dynamo")
        close(run(folder / "m.onnx"))

    return way


def kept_node(folder: Path) -> None:
    bnexport.export(trained(), X, folder / "m.onnx", mode="custom_op")
    close(run(folder / "m.onnx"))
    options = onnxruntime.SessionOptions()
    bnexport.register(options)
    close(run(folder / "m.onnx", options))


def torchscript(folder: Path) -> None:
    bnexport.export(trained(), X, folder / "m.pt")
    close(torch.jit.load(folder / "m.pt")(X))


def pt2(folder: Path) -> None:
    bnexport.export(trained(), X, folder / "m.pt2")
    close(torch.export.load(folder / "m.pt2").module()(X))


def fold_module(folder: Path) -> None:
    folded = bnexport.fold_module(trained())
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in folded.modules())
    close(folded(X))


def compiled(folder: Path) -> None:
    with torch.no_grad():
        close(torch.compile(bnexport.convert_sync_batchnorm(trained()), backend="aot_eager")(X))


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
