"""Verification does not pass a wrong gradient: 1 % of scale, a dropped term, a swapped operand; and passes the right step.

`make campaign RUN=zoo-training` with `--ways faults` plants the same faults into real networks.
"""

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import bnexport
from bnexport.training import verification
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


def test_small_errors_of_layers_add_up(tmp_path, monkeypatch):
    """Each is within the bound by which the reference follows the graph at a ReLU, and their sum is not."""
    torch.manual_seed(0)
    layers = [layer for _ in range(20) for layer in (nn.Linear(32, 32), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(32, 4)).train()
    with torch.no_grad():
        for layer in layers[::2]:
            layer.weight.mul_(2.4)
    calls, check = [], verification.check
    monkeypatch.setattr(verification, "check", lambda *arguments: calls.append(arguments) or check(*arguments))
    batch = torch.randn(8, 32), torch.randn(8, 4)
    result = bnexport.export_training_step(model, nn.functional.mse_loss, batch, tmp_path / "s.onnx")
    assert result.verification.passed
    wrong = ir.from_proto(ir.to_proto(result.model))
    products = [node for node in faults.makers([wrong.graph.outputs[0]]) if node.op_type == "Gemm"]
    assert len(products) == 21
    for node in products:
        users, output = list(node.outputs[0].uses()), node.outputs[0]
        factor = ir.node("Constant", [], attributes={"value": ir.tensor(np.array(1 + 2.0**-15, np.float32))})
        scaled = ir.node("Mul", [output, factor.outputs[0]])
        scaled.outputs[0].type, scaled.outputs[0].shape = output.type, output.shape
        wrong.graph.insert_after(node, [factor, scaled])
        for user, index in users:
            user.replace_input_with(index, scaled.outputs[0])
    assert check(wrong, *calls[0][1:]).status == "failed"
