"""Verification does not pass a wrong gradient: 1 % of scale, a dropped term, a swapped operand; and passes the right step.

`make test-zoo-training` with `--ways faults` plants the same faults into real networks.
"""

import pytest
import torch
from torch import nn

import bnexport
from bnexport.training.building import verification
from tests.training import faults
from tests.training.networks import NETWORKS


class Block(nn.Module):
    """A residual block of a transformer, its last scale zero as at the start of a training."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8)
        self.qkv, self.scale, self.head = nn.Linear(8, 24), nn.Parameter(torch.zeros(8)), nn.Linear(8, 5)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(nn.functional.gelu(x + self.scale * y).mean(1))


def _block():
    torch.manual_seed(0)
    batch = torch.randn(3, 3, 16, 16), torch.randint(0, 5, (3,))
    return Block().train(), nn.functional.cross_entropy, batch


def _network(name):
    net = NETWORKS[name]
    return net.model(), net.loss, net.batch(4)


MODELS = {
    "block": _block,
    **{name: lambda name=name: _network(name) for name in NETWORKS},
}
# An export of a whole network takes ten seconds and more.
QUICK = {"block", "miniature"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MODELS]
)
def test_planted_faults_do_not_pass(name, tmp_path, monkeypatch):
    calls, check = [], verification.check
    monkeypatch.setattr(verification, "check", lambda *arguments: calls.append(arguments) or check(*arguments))
    model, loss, batch = MODELS[name]()
    result = bnexport.export_training_step(model, loss, batch, tmp_path / "s.onnx", optimizer="adamw")
    assert result.verification.passed, result.verification.summary()
    arguments = calls[0][1:]
    passed, planted = [], 0
    for kind in faults.KINDS:
        for seed in range(3):
            wrong = faults.planted(result.model, calls[0][1].problem.trainable, kind, seed)
            if wrong is not None:
                planted += 1
                if verification.check(wrong, *arguments).passed:
                    passed.append((kind, seed))
    assert planted >= 6 and not passed, passed
