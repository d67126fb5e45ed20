"""NaN in a step, which leaves the state and names the first node that makes one, and moving averages of the weights."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import bnexport
from bnexport import model_io
from bnexport.errors import DivergedError, UsageError

DECAY = 0.9


class Root(nn.Module):
    """sqrt(|w x + b|), whose gradient is NaN where w x + b is 0, and a batch norm for its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.out = nn.Linear(2, 1)

    def forward(self, x):
        return torch.sqrt(self.out(self.norm(x)).abs())


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 2, generator=generator), torch.rand(6, 1, generator=generator)


@pytest.fixture(scope="module", params=[1, 2], ids=["each", "accumulated"])
def exported(request, tmp_path_factory):
    torch.manual_seed(0)
    model, path = Root().train(), tmp_path_factory.mktemp("root") / "step.onnx"
    options = {"lr": 0.05, "momentum": 0.9}
    bnexport.export_training_step(
        model, nn.functional.mse_loss, batch(), path, optimizer_options=options, accumulate=request.param
    )
    return model, path, request.param


def everything(session, folder):
    session.save_checkpoint(folder / "state")
    return (folder / "state").read_bytes()


def test_a_loss_that_is_nan_leaves_the_state(exported, tmp_path):
    session = bnexport.TrainingSession(exported[1])
    x, target = (tensor.numpy() for tensor in batch())
    session.step((x, target))
    before = everything(session, tmp_path)
    session.load_state_dict({"out.bias": np.array([np.inf], np.float32)}, strict=False)
    broken = everything(session, tmp_path)
    with pytest.raises(DivergedError) as caught:
        session.step((x, np.full_like(target, np.inf)))
    assert "NaN; first in" in str(caught.value) and ", which Sub makes of" in str(caught.value)
    assert "(within inf and inf)" in str(caught.value)
    assert "next to the parameter 'out.bias'" in str(caught.value), str(caught.value)
    assert everything(session, tmp_path) == broken != before


def test_a_gradient_that_is_nan_leaves_the_state(exported, tmp_path):
    """The loss is a number; the step after would have none."""
    session = bnexport.TrainingSession(exported[1])
    x, target = (tensor.numpy() for tensor in batch())
    session.load_state_dict({"out.weight": np.zeros((1, 2)), "out.bias": np.zeros(1)}, strict=False)
    before = everything(session, tmp_path)
    assert np.isfinite(session.evaluate((x, target)).loss)
    with pytest.raises(DivergedError, match=r"the new value of .*NaN; first in .*; lower the learning rate"):
        session.step((x, target))
    assert everything(session, tmp_path) == before
    session.load_state_dict({"out.bias": np.ones(1)}, strict=False)
    assert np.isfinite(session.step((x, target)))


def test_averages_are_torchs(exported, tmp_path):
    model, path, accumulate = exported
    session = bnexport.TrainingSession(path, ema_decay=DECAY)
    average = swa_utils.AveragedModel(
        model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(DECAY), use_buffers=True
    ).requires_grad_(False)
    assert np.array_equal(session.state_dict(averaged=True)["out.weight"], session.state_dict()["out.weight"])
    for seed in range(6):
        session.step([tensor.numpy() for tensor in batch(seed)])
        if seed % accumulate == accumulate - 1:
            model.load_state_dict({name: torch.from_numpy(array) for name, array in session.state_dict().items()})
            average.update_parameters(model)
        if seed == 3:
            session.save_checkpoint(tmp_path / "three")
    expected, got = average.module.state_dict(), session.state_dict(averaged=True)
    expected["norm.num_batches_tracked"] = torch.tensor(6)  # torch rounds the average of a counter down, to 1
    for name, tensor in expected.items():
        np.testing.assert_allclose(got[name], tensor.numpy(), rtol=4e-7, atol=1e-7, err_msg=name)
    assert not np.allclose(got["out.weight"], session.state_dict()["out.weight"], rtol=1e-3)

    resumed = bnexport.TrainingSession(path, ema_decay=DECAY)
    resumed.load_checkpoint(tmp_path / "three")
    for seed in (4, 5):
        resumed.step([tensor.numpy() for tensor in batch(seed)])
    assert everything(resumed, tmp_path) == everything(session, tmp_path)
    without = bnexport.TrainingSession(path)
    without.load_checkpoint(tmp_path / "state")
    assert all(np.array_equal(array, session.state_dict()[name]) for name, array in without.state_dict().items())

    without.load_state_dict(got)
    data = [tensor.numpy() for tensor in batch(9)]
    assert session.evaluate(data, averaged=True).loss == without.evaluate(data).loss != session.evaluate(data).loss
    session.export_inference(tmp_path / "averaged.onnx", averaged=True)
    without.export_inference(tmp_path / "plain.onnx")
    weights = [
        {name: value.const_value.numpy() for name, value in model_io.load(tmp_path / name).graph.initializers.items()}
        for name in ("averaged.onnx", "plain.onnx")
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(np.array_equal(array, weights[1][name]) for name, array in weights[0].items())


def test_averages_that_are_not_there(exported):
    session = bnexport.TrainingSession(exported[1])
    with pytest.raises(UsageError, match="averaged: got True in a session without ema_decay"):
        session.state_dict(averaged=True)
    with pytest.raises(UsageError, match=r"ema_decay: got 1.0, expected a number within \[0, 1\)"):
        bnexport.TrainingSession(exported[1], ema_decay=1.0)
