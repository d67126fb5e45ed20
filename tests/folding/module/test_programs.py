"""Programs of torch.export: folded as they are, and refused by name where a module of one is given."""

import operator

import pytest
import torch
from torch import nn
from torch.export import Dim

import bnexport
from bnexport import tolerances, torch_versions
from bnexport.errors import UsageError, VerificationError
from tests.folding.module.nets import Called, off_by, trained
from tests.support.checks import assert_within

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Layers of each kind; its way depends on a size, which torch.fx cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.up, self.plain = nn.ConvTranspose2d(4, 4, 2, 2, groups=2), nn.BatchNorm2d(4, affine=False)
        self.left, self.right, self.sum = nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.linear, self.last = nn.Linear(256, 5, bias=False), nn.BatchNorm1d(5)

    def forward(self, x):
        x = self.plain(self.up(torch.relu_(self.norm(self.conv(x)))))
        if x.shape[2] > 3:
            x = self.sum(self.left(x) + self.right(x))
        return self.last(self.linear(x.flatten(1)))


def program(net: nn.Module) -> torch.export.ExportedProgram:
    return torch.export.export(net, (X,), dynamic_shapes=({0: Dim("batch")},))


def operators(given: torch.export.ExportedProgram) -> list[str]:
    """Names of the calls; torch 2.4 records a batch norm as `_native_batch_norm_legit_no_training`."""
    targets = [node.target for node in given.graph.nodes if node.op == "call_function"]
    return [target.overloadpacket.__name__ for target in targets if target != operator.getitem]


def norms(given: torch.export.ExportedProgram) -> int:
    return sum("batch_norm" in name for name in operators(given))


def check(folded: torch.export.ExportedProgram, net: nn.Module) -> None:
    """Compare with the module in float64, at another batch; the program is still one that torch accepts."""
    (getattr(folded, "validate", None) or folded._validate)()  # private in torch 2.4
    x = torch.randn(5, 3, 6, 6)
    with torch.no_grad():
        got = folded.module()(x)
        assert_within(net.double()(x.double()), got, tolerances.model("float32", got.numpy()), "program")


@pytest.mark.parametrize("example", [True, False])
def test_every_layer(example: bool) -> None:
    net = trained(Net())
    given = program(net)
    folded = bnexport.fold_module(given, X if example else None)
    report = folded.fold_report
    assert report.verification.passed
    assert report.verification.method == ("both" if example else "local")
    assert (report.before.batch_norm, report.after.batch_norm) == (4, 0)
    assert report.explain("sum").targets == ("left", "right")
    assert (norms(given), norms(folded)) == (4, 0)
    assert not any("norm" in name or "running" in name for name in folded.state_dict)
    check(folded, net)


def test_a_folded_program_is_decomposed_saved_and_loaded(tmp_path) -> None:
    net = trained(Net())
    folded = bnexport.fold_module(program(net))
    torch.export.save(folded, tmp_path / "p.pt2")
    check(torch.export.load(tmp_path / "p.pt2"), net)
    check(folded.run_decompositions(), net.float())
    of_core_aten = bnexport.fold_module(program(net.float()).run_decompositions())
    assert operators(of_core_aten).count("_native_batch_norm_legit_no_training") == 1
    assert "mm (mm()) is not linear" in of_core_aten.fold_report.kept[0].reason
    check(of_core_aten, net)


def test_only_skip_and_their_names() -> None:
    given = program(trained(Net()))
    assert norms(bnexport.fold_module(given, only=["norm"])) == 3
    assert norms(bnexport.fold_module(given, skip=["norm"])) == 1
    with pytest.raises(UsageError, match=r"only: got 'nrm', expected a batch norm of the program: norm, .*'norm'"):
        bnexport.fold_module(given, only=["nrm"])


def shared() -> nn.Module:
    """A weight that two layers share, and one that something else reads."""
    layers = {name: nn.Conv2d(3, 3, 1) for name in "abc"} | {f"{name}n": nn.BatchNorm2d(3) for name in "abc"}
    net = Called(lambda m, x: (m.an(m.a(x)), m.bn(m.b(x)), m.cn(m.c(x)) * m.c.weight.sum()), **layers)
    net.b.weight, net.b.bias = net.a.weight, net.a.bias
    return trained(net)


@pytest.mark.skipif(not torch_versions.has((2, 5)), reason="torch.export of 2.4 fails on a tensor with two names")
def test_parameters_that_others_read_stay() -> None:
    folded = bnexport.fold_module(program(shared()))
    assert {site.nodes: site.refusals[0].code for site in folded.fold_report.kept} == {
        ("an",): "called-elsewhere",
        ("bn",): "called-elsewhere",
        ("cn",): "read-elsewhere",
    }


def test_a_wrong_fold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    off_by(monkeypatch, 1e-3)
    given = program(trained(Net()))
    for options in ({}, {"example_inputs": X, "verify": "whole"}):
        with pytest.raises(VerificationError, match="the folded module differs from the original"):
            bnexport.fold_module(given, **options)


def test_a_module_of_a_program_is_refused_by_name() -> None:
    given = program(trained(Net()))
    for net in (given.module(), nn.Sequential(given.module())):
        with pytest.raises(
            UsageError, match=r"a module of an exported program; fold the program: bnexport\.fold_module"
        ):
            bnexport.fold_module(net, X)


def test_an_input_with_the_name_of_a_function() -> None:
    net = trained(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
    folded = bnexport.fold_module(torch.export.export(net, (X,), dynamic_shapes=({0: Dim("batch")},)), X)
    assert folded.graph_signature.user_inputs == ("input",)
    check(folded, net)


def test_a_program_in_train_mode_is_refused_by_name() -> None:
    given = torch.export.export(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).train(), (X,))
    report = bnexport.fold_module(given).fold_report
    (site,) = report.kept
    assert (report.changed, "batch_norm" in site.op_type, site.refusals[0].code) == (False, True, "training")
