"""The networks in models/ through the whole product."""

import json
from pathlib import Path

import onnxruntime
import pytest
import torch

import bnexport
from models.segmentation import Segmenter
from tests.support import warm

ROOT = Path(__file__).parents[1]
EXPORTERS = ["dynamo", "torchscript"]


def _trained():
    net = Segmenter().train()
    for _ in range(2):
        net(torch.randn(2, 3, 32, 32))
    return net


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_segmenter_deploys_without_batch_norms(exporter, tmp_path):
    net = _trained()
    result = bnexport.export(net, torch.randn(2, 3, 32, 32), tmp_path / "m.onnx", exporter=exporter)
    assert result.verification.passed
    assert result.outputs == ("out", "aux")
    assert (result.report.after.batch_norm, result.report.after.sync_batch_norm) == (0, 0)
    if exporter == "dynamo":
        image = torch.randn(1, 3, 48, 40)
        got = onnxruntime.InferenceSession(result.path).run(None, {"image": image.numpy()})
        for name, value in zip(result.outputs, got):
            torch.testing.assert_close(torch.from_numpy(value), net.eval()(image)[name].detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("training", "exporter"), [(True, "dynamo"), (True, "torchscript"), (False, "torchscript")])
def test_segmenter_keeps_its_nodes(exporter, training, tmp_path):
    net = _trained().train(training)
    result = bnexport.export(net, torch.randn(2, 3, 32, 32), tmp_path / "m.onnx", mode="custom_op", exporter=exporter)
    assert result.verification.passed, result.verification.summary()
    folded = bnexport.fold(tmp_path / "m.onnx", tmp_path / "f.onnx").report
    assert (folded.verification.passed, folded.meaning_changed) == (True, training)
    assert (folded.after.batch_norm, folded.after.sync_batch_norm) == (0, 0)


@pytest.mark.parametrize("epochs", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_demo_keeps_its_promises(epochs, tmp_path):
    """The demo exits with 1 where accuracy, differences or folding miss their bounds: one epoch is not enough."""
    rounds = "1" if epochs == 1 else "20"
    done = warm.run(*("-m", "models.demo", "--output", tmp_path, "--epochs", str(epochs), "--rounds", rounds), cwd=ROOT)
    if epochs == 1:
        assert done.returncode == 1
        unmet = done.stderr.strip().removeprefix("not as promised: ").split("; ")
        assert len(unmet) == 4 and all(": accuracy " in it for it in unmet), done.stderr
    else:
        assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "demo.json").read_text())["rows"]
    assert [row["batch_norms"] for row in rows] == [15, 15, 15, 0]
    assert (tmp_path / "demo.png").stat().st_size > 10_000
