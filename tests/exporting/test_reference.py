"""What an exported model is compared with: the caller's own module, never the copy that was converted; and what rounding hides.

Outputs that rounding errors swamp decide nothing; smaller inputs may. Numbers of float64 models keep their digits.
"""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

import bnexport
from bnexport import SyncBatchNorm
from bnexport.errors import VerificationError
from bnexport.exporting import dynamo, wrapper
from bnexport.folding import torch_module
from tests.exporting.files import run
from tests.folding.module.nets import off_by
from tests.support.modules import compose
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


WRONG = {
    "deploy": ({"eps": 0.5}, "m.onnx", {"exporter": "dynamo"}, "output 'output'"),
    "custom op": ({"eps": 0.5}, "m.onnx", {"mode": "custom_op", "exporter": "torchscript"}, "output 'output'"),
    # The outputs are right; the new statistics are held against the buffers of the caller's module after its run.
    "statistics": ({"momentum": 0.9}, "m.onnx", {"mode": "custom_op", "exporter": "torchscript"}, r"output '1.running_\w+.new'"),
    "torchscript": ({"eps": 0.5}, "m.pt", {}, ""),
    "pt2": ({"eps": 0.5}, "m.pt2", {"fold": False}, ""),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "training"),
    [*((name, False) for name in WRONG if name != "statistics"), ("custom op", True), ("statistics", True)],
)
def test_a_wrong_conversion(name, training, wrong_conversion, tmp_path):
    change, file, options, words = WRONG[name]
    wrong_conversion(**change)
    with pytest.raises(VerificationError, match=f"{DIFFERS}.*{words}"):
        bnexport.export(net().train(training), X, tmp_path / file, **options)
    assert not list(tmp_path.iterdir())


def test_a_wrong_conversion_elsewhere(wrong_conversion, tmp_path):
    wrong_conversion(eps=0.5)
    with pytest.raises(VerificationError, match="differs from the original"):
        bnexport.fold_module(net(), X)
    wrong_conversion(momentum=0.9)
    with pytest.raises(VerificationError, match=rf"{DIFFERS}: output '1.running_\w+.new'"):
        bnexport.export_training_step(net(), nn.MSELoss(), (X, torch.randn(4, 4, 5, 5)), tmp_path / "s.onnx")
    assert not list(tmp_path.iterdir())


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


def counts(self, x):
    self.calls += 1
    return self.norm(x) * 2


def test_a_buffer_that_a_forward_changes(tmp_path):
    """State of a training graph, constant in an inference graph."""
    model = compose(counts, norm=SyncBatchNorm(3), calls=torch.zeros(()))
    result = bnexport.export(model, X, tmp_path / "m.onnx", mode="custom_op")
    assert "calls.new" in {output.name for output in result.verification.outputs}
    assert result.verification.passed
    assert not result.notes
    evaluated = bnexport.export(model.eval(), X, tmp_path / "n.onnx", mode="custom_op", exporter="torchscript")
    assert [note for note in evaluated.notes if "buffer 'calls' changes in a forward" in note]
    assert model.calls == 0


SMALL = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
ILL = "the network is ill-conditioned on these inputs: the reference itself differs from the model in float64 by"


def cancelling():
    """Values of size 1e6 whose mean the batch norm subtracts: three digits are left in torch, all of them when folded."""
    torch.manual_seed(0)
    net = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 1), norm=nn.BatchNorm2d(4))).eval()
    net.conv.bias.data.fill_(1e6)
    net.norm.running_mean.fill_(1e6)
    return net


def cubic(self, x):
    """Adds and subtracts 1e7 x^3, which is small next to the rest where x is small."""
    large = 1e7 * x * x * x
    return (large + self.conv(x)) - large


def test_a_model_that_cannot_be_judged(wrong_weight, tmp_path):
    result = bnexport.export(cancelling(), SMALL, tmp_path / "m.onnx", exporter="torchscript", fold=False)
    assert result.verification.status == "not_verified"
    assert result.verification.summary().startswith(f"not verified: output 'output': {ILL}")
    assert "inputs down to 1/4096 of their size decide nothing either" in result.verification.reason
    assert result.path.exists()


def test_a_model_that_is_more_accurate_than_torch(tmp_path):
    """The folded model has all digits: it is held against the one in float64."""
    result = bnexport.export(cancelling(), SMALL, tmp_path / "m.onnx", exporter="torchscript")
    assert result.verification.passed
    assert all(output.atol < 1e-3 for output in result.verification.outputs)


def test_a_counter_that_only_the_conversion_has(tmp_path):
    """It joins the new state in float64, against which a model that torch rounds is held."""
    forward = {"forward": lambda self, x: nn.functional.batch_norm(x, *self.buffers(), *self.parameters(), True)}
    model = cancelling().train()
    model.norm = type("ABN", (lookalikes.ABN,), {"__module__": lookalikes.ABN.__module__, **forward})(4, "identity")
    del model.norm.num_batches_tracked
    model.conv.bias.data.fill_(1e4)
    result = bnexport.export(model, SMALL, tmp_path / "m.onnx", mode="custom_op", exporter="torchscript")
    assert result.verification.passed and "norm.num_batches_tracked" in result.state


def test_torchs_formats(monkeypatch, tmp_path):
    """Whole modules decide nothing here; the proof of the fold finds the wrong weight."""
    off_by(monkeypatch, 1e-2)
    with pytest.raises(VerificationError, match=r"nothing was written: .*the shift of channel 0 differs by 0\.01"):
        bnexport.export(cancelling(), SMALL, tmp_path / "m.pt", format="torchscript")
    assert not list(tmp_path.iterdir())


def test_a_training_step(tmp_path):
    class Cancels(nn.Conv2d):
        def forward(self, x):
            return (super().forward(x) + 1e6) - 1e6

    batch = (SMALL, torch.zeros(2, 4, 6, 6))
    result = bnexport.export_training_step(Cancels(3, 4, 1), nn.MSELoss(), batch, tmp_path / "s.onnx")
    assert result.verification.status == "not_verified"
    assert "the step is ill-conditioned on this batch" in result.verification.summary()


def test_a_wrong_model_shows_on_smaller_inputs(wrong_weight, tmp_path):
    words = r"nothing was written: output 'output' in .*: differs.* on inputs times"
    with pytest.raises(VerificationError, match=words):
        bnexport.export(
            compose(cubic, conv=nn.Conv2d(3, 3, 1)).eval(), SMALL, tmp_path / "m.onnx", exporter="torchscript"
        )
    assert not list(tmp_path.iterdir())


def test_infinite_outputs_are_compared_on_smaller_inputs(tmp_path):
    exponential = compose(lambda self, x: torch.exp(60.0 * x))
    result = bnexport.export(exponential, SMALL, tmp_path / "m.onnx", exporter="torchscript")
    assert (result.verification.passed, result.verification.input_scale) == (True, 2.0**-3)
    assert "on inputs times 0.125" in result.verification.summary()


WIDE = torch.linspace(0.1, 1.0, 6, dtype=torch.float64).reshape(2, 3)


class Numbers(torch.nn.Module):
    def forward(self, x):
        half = torch.full((3,), 0.3, dtype=x.dtype)
        single = torch.tensor(0.7).to(x.dtype)  # float32 in torch, too
        return torch.add(x * 0.1, half, alpha=0.6) ** 0.9, torch.where(x > 0.2, x / 3, 1 / 3) * single


def test_numbers_are_those_of_the_module(tmp_path):
    bnexport.export(Numbers(), WIDE, tmp_path / "m.onnx", exporter="dynamo", dynamic=False)
    for value, expected in zip(run(tmp_path / "m.onnx", WIDE).values(), Numbers()(WIDE)):
        np.testing.assert_allclose(value, expected.numpy(), rtol=1e-15)


def test_a_number_that_float32_rounded_does_not_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(dynamo, "write_doubles", lambda exported: None)
    with pytest.raises(VerificationError, match="differs"):
        bnexport.export(Numbers(), WIDE, tmp_path / "m.onnx", exporter="dynamo", dynamic=False)


def test_numbers_that_are_float32_in_onnx_pass(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.SELU(), torch.nn.BatchNorm1d(4)).double().eval()
    assert bnexport.export(model, WIDE, tmp_path / "m.onnx", fold=False, dynamic=False).verification.passed
