"""NaN in a step, which leaves the state."""

import numpy as np
import pytest
import torch
from torch import nn

import bnexport
from bnexport.errors import DivergedError


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
    session.save_checkpoint(folder / "state", overwrite=True)
    return (folder / "state").read_bytes()


def test_a_loss_that_is_nan_leaves_the_state(exported, tmp_path):
    session = bnexport.TrainingSession(exported[1])
    x, target = (tensor.numpy() for tensor in batch())
    session.step((x, target))
    before = everything(session, tmp_path)
    session.load_state_dict({"out.bias": np.array([np.inf], np.float32)}, strict=False)
    broken = everything(session, tmp_path)
    with pytest.raises(DivergedError, match=r"the loss and \d+ other results are NaN; lower the learning rate"):
        session.step((x, np.full_like(target, np.inf)))
    assert everything(session, tmp_path) == broken != before


def test_a_gradient_that_is_nan_leaves_the_state(exported, tmp_path):
    """The loss is a number; the step after would have none."""
    session = bnexport.TrainingSession(exported[1])
    x, target = (tensor.numpy() for tensor in batch())
    session.load_state_dict({"out.weight": np.zeros((1, 2)), "out.bias": np.zeros(1)}, strict=False)
    before = everything(session, tmp_path)
    assert np.isfinite(session.evaluate((x, target)).loss)
    with pytest.raises(DivergedError, match=r"the new value of .* NaN; lower the learning rate"):
        session.step((x, target))
    assert everything(session, tmp_path) == before
    session.load_state_dict({"out.bias": np.ones(1)}, strict=False)
    assert np.isfinite(session.step((x, target)))
