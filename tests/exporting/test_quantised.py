"""A module of quantisation-aware training: its file is judged as it is written, and folding it again gives the same verdict."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import nn

import bnexport


def quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao import quantization

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.relu = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()
            self.enter, self.leave = quantization.QuantStub(), quantization.DeQuantStub()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.leave(self.relu(self.bn(self.conv(self.enter(x)))))

    torch.manual_seed(0)
    model = Network().train()
    quantization.fuse_modules_qat(model, [["conv", "bn", "relu"]], inplace=True)
    observers = quantization.MovingAverageMinMaxObserver, quantization.MovingAveragePerChannelMinMaxObserver
    model.qconfig = quantization.QConfig(
        activation=quantization.FakeQuantize.with_args(observer=observers[0], quant_min=0, quant_max=255),
        weight=quantization.FakeQuantize.with_args(
            observer=observers[1],
            quant_min=-128,
            quant_max=127,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
            ch_axis=0,
        ),
    )
    quantization.prepare_qat(model, inplace=True)
    for _ in range(5):
        model(torch.randn(4, 3, 10, 10))
    model.apply(quantization.disable_observer)
    return model.eval()


def test_export_and_fold_give_one_verdict(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, x = quantised(), torch.randn(2, 3, 10, 10)
        exported = bnexport.export(model, x, tmp_path / "deploy.onnx", exporter="torchscript")
        kept = bnexport.export(model, x, tmp_path / "kept.onnx", exporter="torchscript", fold=False)
    folded = bnexport.fold(kept.path, tmp_path / "folded.onnx")
    assert exported.verification.passed
    assert folded.report.verification is not None
    assert folded.report.verification.passed
    assert exported.report is not None
    assert len(exported.report.folded) == len(folded.report.folded) == 1
    for notes in (exported.notes, folded.report.notes):
        assert any("without ONNX Runtime's optimisations" in note for note in notes)
