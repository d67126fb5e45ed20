"""Verification does not pass a wrong gradient: 1 % of scale, a dropped term, a swapped operand; and passes the right step.

`make campaign RUN=zoo-training` with `--ways faults` plants the same faults into real networks.
"""

import itertools

import onnx_ir as ir
import pytest
import torch
from torch import nn

import bnexport
from bnexport.training import verification
from tests.support.modules import compose
from tests.training import faults
from tests.training.networks import NETWORKS


def transformer(self, x):
    """A residual block of a transformer, its last scale zero as at the start of a training."""
    x = self.embed(x).flatten(2).transpose(1, 2)
    q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return self.head(nn.functional.gelu(x + self.scale * y).mean(1))


def _block():
    torch.manual_seed(0)
    parts = {"embed": nn.Conv2d(3, 8, 4, 4), "norm": nn.LayerNorm(8), "qkv": nn.Linear(8, 24), "head": nn.Linear(8, 5)}
    batch = torch.randn(3, 3, 16, 16), torch.randint(0, 5, (3,))
    return compose(transformer, **parts, scale=nn.Parameter(torch.zeros(8))), nn.functional.cross_entropy, batch


def _network(name):
    net = NETWORKS[name]
    return net.model(), net.loss, net.batch(4)


@pytest.mark.parametrize("name", ["block", *(pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS)])
def test_planted_faults_do_not_pass(name, tmp_path, checked):
    model, loss, batch = _block() if name == "block" else _network(name)
    result = bnexport.export_training_step(model, loss, batch, tmp_path / "s.onnx", optimizer="adamw")
    assert result.verification.passed, result.verification.summary()
    arguments = checked[0][1:]
    verdicts = {}
    for kind, seed in itertools.product(faults.KINDS, range(3)):
        wrong = faults.planted(result.model, arguments[0].problem.trainable, kind, seed)
        if wrong is not None:
            verdicts[kind, seed] = verification.check(wrong, *arguments).status
    assert len(verdicts) >= 6 and "passed" not in verdicts.values(), verdicts


def test_small_errors_of_layers_add_up(tmp_path, checked):
    """Each is within the bound by which the reference follows the graph at a ReLU, and their sum is not."""
    torch.manual_seed(0)
    layers = [layer for _ in range(20) for layer in (nn.Linear(32, 32), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(32, 4)).train()
    with torch.no_grad():
        for layer in layers[::2]:
            layer.weight.mul_(2.4)
    batch = torch.randn(8, 32), torch.randn(8, 4)
    result = bnexport.export_training_step(model, nn.functional.mse_loss, batch, tmp_path / "s.onnx")
    assert result.verification.passed
    wrong = ir.from_proto(ir.to_proto(result.model))
    products = [node for node in faults.makers([wrong.graph.outputs[0]]) if node.op_type == "Gemm"]
    assert len(products) == 21
    for node in products:
        faults.scale(wrong.graph, node, node.outputs[0], 1 + 2.0**-15)
    assert verification.check(wrong, *checked[0][1:]).status == "failed"
