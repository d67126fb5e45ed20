"""The graph that stands for a module computes what the module does."""

from __future__ import annotations

import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

from bnexport.modules.module_graph import ModuleGraph
from bnexport.modules.module_trace import trace
from tests.folding.module.nets import trained
from tests.folding.module.test_folds import BACKWARD, FORWARD, JOINED, X2, Joined, PairTwice, Transposed


class Around(nn.Module):
    """Modules and functions next to layers."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.mean = nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, 1, 1, count_include_pad=False)
        self.pad, self.leaky, self.relu = nn.ZeroPad2d((1, 0, 2, 1)), nn.LeakyReLU(0.2), nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.leaky(self.pad(self.mean(self.most(x))) * 0.5 - 1)
        x = torch.cat((x, 2 * x.transpose(2, 3).permute(0, 1, 3, 2)), 1)
        x = self.relu(x.movedim(1, -1).movedim(-1, 1))
        x += 1
        return torch.nn.functional.dropout(x.contiguous(), training=self.training).flatten(1)


# Batch norms of other classes are converted before.
PAIRS = {
    name: pair
    for name, pair in {**BACKWARD, **FORWARD}.items()
    if not name.startswith(("ours", "torch's", "detectron2"))
}
NETS = {
    **{name: (nn.Sequential(first, second), x) for name, (first, second, x) in PAIRS.items()},
    **{f"joined by {name}": (Joined(join), X2) for name, join in JOINED.items() if name != "interpolated"},
    "called twice": (PairTwice(), X2),
    "transposed": (Transposed("permute"), torch.randn(2, 3, 4)),
    "around": (Around(), X2),
}


@pytest.mark.parametrize("name", NETS)
def test_it_computes_what_the_module_does(name: str) -> None:
    net, x = NETS[name]
    traced = trace(trained(net), 1)
    model = ModuleGraph(traced, traced.examples((x,))).model
    assert not any(node.domain for node in model.graph)
    model.opset_imports.pop("torch")
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(got), net(x.clone()), rtol=1e-4, atol=1e-5)
