"""Batch norms with statistics to speak of, and checks against the model in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils import _pytree

import bnexport
from bnexport import tolerances
from bnexport.folding import torch_module
from tests.support.checks import assert_within


class Called(nn.Module):
    """Layers under their names, and a forward given as a function of them."""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.calls = forward

    def forward(self, x):
        return self.calls(self, x)


def trained(net: nn.Module) -> nn.Module:
    """Batch norms as after training: scales of both signs, means and variances of their own; eval mode."""
    for module in net.modules():
        if getattr(module, "running_mean", None) is not None:
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.2, 3.0)
        if hasattr(module, "running_mean") and getattr(module, "weight", None) is not None:
            with torch.no_grad():
                module.weight.copy_(torch.rand_like(module.weight) * 2 + 0.2)
                module.weight[::2] *= -1
                module.bias.normal_()
    return net.eval()


def fold_and_check(net: nn.Module, *inputs: torch.Tensor, example: bool = True, **options: object) -> nn.Module:
    """Folds, and compares with the model in float64, also on other inputs; the model stays as it was."""
    before = {name: value.clone() for name, value in net.state_dict().items()}
    folded = bnexport.fold_module(net, inputs if example else None, **options)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    owned = {tensor.untyped_storage().data_ptr() for tensor in (*net.parameters(), *net.buffers())}
    assert not any(tensor.untyped_storage().data_ptr() in owned for tensor in folded.parameters() if tensor.numel())
    exact = copy.deepcopy(net).eval().double()
    dtype = str(next(net.parameters()).dtype).removeprefix("torch.")
    for feed in (inputs, tuple(torch.randn_like(value) * 3 for value in inputs)):
        with torch.no_grad():
            expected = _pytree.tree_leaves(exact(*(value.double() for value in feed)))
            got = _pytree.tree_leaves(folded(*feed))
        for one, two in zip(expected, got, strict=True):
            assert_within(two.double(), one, tolerances.model(dtype, one.numpy()), type(net).__name__)
    return folded


def left(module: nn.Module) -> list[str]:
    """Paths of the batch norms that are left."""
    return [path for path, child in module.named_modules() if isinstance(child, nn.modules.batchnorm._BatchNorm)]


def reasons(module: nn.Module) -> dict[str, list[str]]:
    """The codes of the refusals of each batch norm that is left."""
    report = module.fold_report
    return {site.nodes[0]: [refusal.code for refusal in site.refusals] for site in report.kept}


def off_by(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    """Everything else being right, each new bias of a folded layer is off."""
    real = torch_module.from_array

    def wrong(array, like):
        return real(array, like) + error * (array.ndim == 1)

    monkeypatch.setattr(torch_module, "from_array", wrong)
