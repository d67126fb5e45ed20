"""What an exported model is compared with: the caller's own module, never the copy that was converted."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bnexport
from bnexport import SyncBatchNorm
from bnexport.errors import UnsupportedModelError, VerificationError
from bnexport.exporting import wrapper
from bnexport.folding import torch_module
from tests.sync_bn import lookalikes

X = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
DIFFERS = "differs from torch, nothing was written"


def net(norm=SyncBatchNorm):
    return nn.Sequential(nn.Conv2d(3, 4, 1), norm(4), nn.ReLU())


@pytest.fixture
def wrong_conversion(monkeypatch):
    """Every way of preparing a copy changes one attribute of the batch norms in it; returns a function to choose it."""

    def change(**attributes):
        def wrong(function):
            def call(*arguments, **options):
                copy = function(*arguments, **options)
                for module in copy.modules():
                    if isinstance(module, nn.modules.batchnorm._BatchNorm):
                        module.__dict__.update(attributes)
                return copy

            return call

        for name in ("for_deploy", "for_custom_op"):
            monkeypatch.setattr(wrapper, name, wrong(getattr(wrapper, name)))
        monkeypatch.setattr(torch_module, "replace", wrong(torch_module.replace))

    return change


@pytest.mark.parametrize(
    ("mode", "training", "exporter"),
    [("deploy", False, "dynamo"), ("custom_op", False, "torchscript"), ("custom_op", True, "torchscript")],
)
def test_a_wrong_conversion_to_onnx(mode, training, exporter, wrong_conversion, tmp_path):
    wrong_conversion(eps=0.5)
    with pytest.raises(VerificationError, match=f"{DIFFERS}: output 'output'"):
        bnexport.export(net().train(training), X, tmp_path / "m.onnx", mode=mode, exporter=exporter)
    assert not list(tmp_path.iterdir())


def test_wrong_statistics(wrong_conversion, tmp_path):
    """The outputs are right; the new statistics are held against the buffers of the caller's module after its run."""
    wrong_conversion(momentum=0.9)
    with pytest.raises(VerificationError, match=rf"{DIFFERS}: output '1.running_\w+.new'"):
        bnexport.export(net(), X, tmp_path / "m.onnx", mode="custom_op", exporter="torchscript")


@pytest.mark.parametrize(("suffix", "fold"), [("pt", True), ("pt2", False)])
def test_a_wrong_conversion_to_torchs_formats(suffix, fold, wrong_conversion, tmp_path):
    wrong_conversion(eps=0.5)
    kind = "torchscript" if suffix == "pt" else "pt2"
    with pytest.raises(VerificationError, match=DIFFERS):
        bnexport.export(net().eval(), X, tmp_path / f"m.{suffix}", format=kind, fold=fold)
    assert not list(tmp_path.iterdir())


def test_a_wrong_conversion_in_fold_module(wrong_conversion):
    wrong_conversion(eps=0.5)
    with pytest.raises(VerificationError, match="differs from the original"):
        bnexport.fold_module(net(), X)


def test_a_wrong_conversion_in_a_training_step(wrong_conversion, tmp_path):
    wrong_conversion(momentum=0.9)
    with pytest.raises(VerificationError, match=rf"{DIFFERS}: output '1.running_\w+.new'"):
        bnexport.export_training_step(net(), nn.MSELoss(), (X, torch.randn(4, 4, 5, 5)), tmp_path / "s.onnx")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def process_group():
    """In a group torch's own class trains on GPUs only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_module_that_runs_elsewhere_only(process_group, tmp_path):
    """The conversion stands in for it, and the verdict says so."""
    options = {"exporter": "torchscript"}
    result = bnexport.export(net(nn.SyncBatchNorm), X, tmp_path / "m.onnx", mode="custom_op", **options)
    assert result.verification.passed
    assert result.verification.reference == result.to_dict()["verification"]["reference"] == "converted"
    assert "compared with the converted model, since the model itself cannot run here" in result.verification.summary()
    assert "GPU" in result.verification.reason
    evaluated = bnexport.export(net(nn.SyncBatchNorm).eval(), X, tmp_path / "e.onnx", **options)
    assert (evaluated.verification.passed, evaluated.verification.reference) == (True, "original")
    assert "converted" not in evaluated.verification.summary()


def test_other_formats_say_what_they_were_compared_with(process_group, tmp_path):
    blocked = nn.Sequential(nn.Conv2d(3, 4, 1), lookalikes.InPlaceABNSync(4)).eval()
    result = bnexport.export(blocked, X, tmp_path / "m.pt", format="torchscript")
    assert (result.verification.passed, result.verification.reference) == (True, "converted")
    batch = (X, torch.randn(4, 4, 5, 5))
    step = bnexport.export_training_step(net(nn.SyncBatchNorm), nn.MSELoss(), batch, tmp_path / "s.onnx")
    assert (step.verification.passed, step.verification.reference) == (True, "converted")


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = SyncBatchNorm(3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.norm(x) * 2


def test_a_buffer_that_a_forward_changes(tmp_path):
    """State of a training graph, constant in an inference graph."""
    model = Counts()
    result = bnexport.export(model, X, tmp_path / "m.onnx", mode="custom_op")
    assert "calls.new" in {output.name for output in result.verification.outputs}
    assert result.verification.passed
    assert not result.notes
    evaluated = bnexport.export(model.eval(), X, tmp_path / "n.onnx", mode="custom_op", exporter="torchscript")
    assert [note for note in evaluated.notes if "buffer 'calls' changes in a forward" in note]
    assert model.calls == 0


def test_the_old_weight_norm(tmp_path):
    """It keeps a computed weight, which deepcopy refuses."""
    with pytest.warns(FutureWarning):
        model = nn.Sequential(nn.utils.weight_norm(nn.Conv2d(3, 4, 1)), SyncBatchNorm(4)).eval()
    assert bnexport.export(model, X, tmp_path / "m.onnx").verification.passed


def test_a_module_that_cannot_be_copied(tmp_path):
    model = net().eval()
    model.lock = threading.Lock()
    with pytest.raises(UnsupportedModelError, match=r"Sequential: cannot be copied.*lock"):
        bnexport.export(model, X, tmp_path / "m.onnx")
