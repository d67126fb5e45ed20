"""Folds of torch modules, proved by a checker that shares nothing with the folder."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import bnexport
from bnexport.modules.copies import copy_model
from bnexport.modules.module_graph import ModuleGraph
from bnexport.modules.module_trace import trace
from bnexport.verification.reference import prove_module
from bnexport.verification.verdict import Verification
from tests.folding.module.nets import Called, trained
from tests.support.claims import outcome


def residual() -> nn.Module:
    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(net.n(net.a(x)))
        return net.k(net.f(net.p(net.t(x + net.m(net.b(x)))).mean((2, 3))))

    last = {
        "t": nn.ConvTranspose2d(8, 6, 2, stride=2),
        "p": nn.BatchNorm2d(6),
        "f": nn.Linear(6, 4),
        "k": nn.BatchNorm1d(4),
    }
    padded = nn.Conv2d(8, 8, 3, padding=1, bias=False, padding_mode="reflect")
    return Called(forward, a=nn.Conv2d(3, 8, 3, padding=1), n=nn.BatchNorm2d(8), b=padded, m=nn.BatchNorm2d(8), **last)


def branches() -> nn.Module:
    layers = {"c3": nn.Conv2d(3, 3, 3, padding=1, bias=False), "c1": nn.Conv2d(3, 3, 1, bias=False)}
    norms = {name: nn.BatchNorm2d(3) for name in ("n3", "n1", "ni")}
    return Called(lambda net, x: torch.relu(net.n3(net.c3(x)) + net.n1(net.c1(x)) + net.ni(x)), **layers, **norms)


class Undecided(nn.Module):
    """Code that looks at values, which is not traced."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.rest(x)
        return y if y.sum() > 0 else 2 * y


def undecided() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Undecided())


def forward() -> nn.Module:
    """A Linear behind a flattening, whose sizes only inputs tell."""
    layers = (nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))
    return nn.Sequential(*layers)


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
NETS = {"residual": residual, "branches": branches, "forward": forward, "undecided": undecided}


def proved(original: nn.Module, folded: nn.Module) -> Verification:
    """The proof of what the report of `folded` says."""
    traced = trace(original, 1)
    examples = traced.examples((X,))
    claims = [site.claim for site in folded.fold_report.sites if site.changed]
    return prove_module(ModuleGraph(traced, examples), trace(folded, 1), examples, claims)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_fold_is_proved(name: str, dtype: torch.dtype) -> None:
    report = bnexport.fold_module(trained(NETS[name]()).to(dtype), X.to(dtype)).fold_report
    verdict = report.verification
    assert (verdict.method, outcome(verdict)) == ("both", ("passed", ["proved"] * len(report.proofs)))
    assert report.changed and report.proofs


def altered(folded: nn.Module, path: str = "", **attributes: object) -> nn.Module:
    """Return a copy of a folded module with other attributes of one of its modules."""
    wrong = copy_model(folded)
    wrong.fold_report = folded.fold_report
    vars(wrong.get_submodule(path)).update(attributes)
    return wrong


@pytest.mark.parametrize("name", NETS)
def test_each_changed_tensor_is_found(name: str) -> None:
    """Four units in the last place of the largest, in any parameter or buffer that the folded module has."""
    net = trained(NETS[name]())
    folded = bnexport.fold_module(net, X, verify=False)
    assert proved(net, folded).passed
    paths = [path for path, tensor in folded.state_dict().items() if tensor.is_floating_point()]
    assert len(paths) > 1
    for path in paths:
        wrong = altered(folded)
        tensor = wrong.state_dict()[path]
        tensor.view(-1)[0] += 4 * float(np.spacing(np.float32(tensor.abs().max())))
        assert proved(net, wrong).status == "failed", path


@pytest.mark.parametrize(
    "change", [{"padding": (0, 0), "_reversed_padding_repeated_twice": [0, 0, 0, 0]}, {"stride": (2, 2)}], ids=str
)
def test_a_changed_attribute_is_found(change: dict[str, object]) -> None:
    net = trained(residual())
    assert proved(net, altered(bnexport.fold_module(net, X, verify=False), "a", **change)).status != "passed"


def test_a_changed_rest_is_found() -> None:
    """Outside every fold, in a module that is not traced."""
    net = trained(undecided())
    folded = bnexport.fold_module(net, X, verify=False)
    folded[2].rest = copy.deepcopy(folded[2].rest)
    folded[2].rest.weight.data[0, 0] += 1
    verdict = proved(net, folded)
    assert verdict.status == "failed"
    assert "(Undecided) is computed in another way" in verdict.reason


def test_what_only_inputs_tell_is_not_folded() -> None:
    report = bnexport.fold_module(trained(forward())).fold_report
    assert report.verification.passed
    assert [site.nodes for site in report.folded] == [("0",)]
    assert "the shape before 4 is not known" in report.explain("3").reason
