"""TorchScript and pt2 files: torch's operators only, equal to the module, loadable in a process without bnexport."""

import json
import math
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import bnexport
from bnexport.cli import main
from bnexport.errors import MissingDependencyError, UnsupportedModelError, VerificationError
from bnexport.exporting import torch_target, torchscript
from bnexport.exporting.torch_target import FreshProcess
from bnexport.folding import torch_module
from bnexport.runtime.engine import EngineFailure
from bnexport.verification import process
from bnexport.verification.verdict import Verification
from models.segmentation import Segmenter
from tests.exporting.size_corpus import Net
from tests.folding.module.nets import off_by, trained
from tests.support import warm
from tests.support.modules import compose
from tests.sync_bn import lookalikes

FORMATS = ["torchscript", "pt2"]


def operators(result):
    read = torchscript.operators if result.format == "torchscript" else torch_target.program_operators
    return read(result.model)


def batch_norms(result):
    return {name for name in operators(result) if "norm" in name}


def load(result):
    if result.format == "pt2":
        return torch.export.load(str(result.path)).module()
    return torch.jit.load(str(result.path))


def pair(*layers):
    return trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), *layers))


@pytest.fixture(params=FORMATS)
def format(request):
    return request.param


@pytest.fixture(autouse=True)
def _warm(monkeypatch):
    """The process that checks a file starts without importing torch anew; bnexport it does not have either way."""
    for module in (process, torch_target):
        monkeypatch.setattr(module, "sys", types.SimpleNamespace(executable=warm.executable()))


def test_a_network_at_any_size(format, tmp_path):
    net = trained(Segmenter()).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    result = bnexport.export(net, torch.randn(2, 3, 32, 32), tmp_path / f"m.{format}", format=format)
    assert result.verification.passed
    assert all(output.max_abs_diff < 1e-5 for output in result.verification.outputs)
    assert result.exporter == ("script" if format == "torchscript" else "torch.export")
    assert result.outputs == ("out", "aux")
    assert not batch_norms(result)
    assert not result.report.kept
    assert {proof.method for proof in result.report.verification.sites} == {"proved"}
    assert len(result.report.proofs) == len(result.report.folded)
    assert result.notes == ("the module is in train mode; mode 'deploy' writes it in eval mode",)
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    other = torch.randn(1, 3, 48, 40)
    with torch.no_grad():
        torch.testing.assert_close(load(result)(other), net.eval()(other), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "norm",
    [bnexport.SyncBatchNorm(4), nn.SyncBatchNorm(4), lookalikes.NaiveSyncBatchNorm(4), lookalikes.FrozenBatchNorm2d(4)],
    ids=["ours", "torch", "detectron2", "frozen"],
)
@pytest.mark.parametrize("fold", [True, False], ids=["folded", "kept"])
def test_every_kind_of_batch_norm(norm, fold, tmp_path):
    net = trained(nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU()))
    x = torch.randn(2, 3, 6, 6)
    result = bnexport.export(net, x, tmp_path / "m.pt", format="torchscript", fold=fold, verify=False)
    torch.testing.assert_close(load(result)(x), net(x).detach(), rtol=0, atol=1e-5)
    assert batch_norms(result) == (set() if fold else {"aten::batch_norm"})
    assert (result.report is None) is not fold


def test_freezing_does_not_fold_along_the_wrong_axis(tmp_path):
    net = trained(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    result = bnexport.export(net, torch.randn(2, 4, 4), tmp_path / "m.pt", format="torchscript")
    assert result.verification.passed
    assert batch_norms(result) == {"aten::batch_norm"}


class Chooses(nn.Module):
    def __init__(self, takes_apart=False):
        super().__init__()
        self.body, self.takes_apart = pair(), takes_apart

    def forward(self, x):
        return self.body(x) if bool(x.sum() > 0) else self.body[0](x) if self.takes_apart else x


@pytest.mark.parametrize("takes_apart", [False, True])
def test_control_flow_is_scripted(takes_apart, tmp_path):
    """torch.fx cannot trace the model, but its body, which is folded first; both ways stay in the file."""
    net, x = Chooses(takes_apart).eval(), torch.ones(1, 3, 5, 5)
    if not takes_apart:
        net.body = bnexport.fold_module(net.body, x)
    result = bnexport.export(net, x, tmp_path / "m.pt", format="torchscript")
    assert (result.exporter, result.report) == ("script", None)
    assert batch_norms(result) == ({"aten::batch_norm"} if takes_apart else set())
    assert "nothing was folded: Chooses: its forward cannot be traced" in result.notes[0]
    for feed in (x, -x):
        torch.testing.assert_close(load(result)(feed), net(feed).detach(), rtol=0, atol=1e-5)
    with pytest.raises(UnsupportedModelError, match=r"torch\.export fails"):
        bnexport.export(net, x, tmp_path / "m.pt2", format="pt2")
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]


def doubles(above):
    return trained(Net(lambda y: y * 2 if y.shape[0] > above else y))


@pytest.mark.parametrize("batch", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_batch_that_the_model_fixes(batch, tmp_path):
    """torch.export takes the condition for a constant at a batch of 2, to which it gets a batch of 1 doubled."""
    net, x = doubles(2), torch.randn(batch, 3, 5, 5)
    verify = batch == 2  # with a batch that the program takes
    result = bnexport.export(net, x, tmp_path / "m.pt2", format="pt2", verify=verify)
    assert bool(result.verification.passed) == verify
    assert result.notes[-1].startswith(f"input 'x': dimension 0 (batch) stays {batch}, the model fixes it")
    torch.testing.assert_close(load(result)(x), net(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("whole", [True, False])
def test_a_program_is_folded_where_torch_fx_cannot_follow(whole, tmp_path):
    """The condition is one on a size: the program has one way through it."""
    net = doubles(5) if whole else trained(nn.Sequential(doubles(5), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))
    x = torch.randn(2, 3, 5, 5)
    result = bnexport.export(net, x, tmp_path / "m.pt2", format="pt2")
    assert result.verification.passed
    assert not batch_norms(result)
    assert (result.report.before.batch_norm, result.report.after.batch_norm) == ((1, 0) if whole else (2, 0))
    torch.testing.assert_close(load(result)(x), net(x), rtol=0, atol=1e-5)


def test_what_cannot_be_scripted_is_traced_and_says_so(tmp_path):
    net = trained(Net(lambda y: y * max({2 * value for value in (0, 1)})))  # the compiler knows no set comprehensions
    with pytest.warns(UserWarning, match="scripting fails .* traced instead"):
        result = bnexport.export(net, torch.randn(2, 3, 5, 5), tmp_path / "m.pt", format="torchscript")
    assert result.exporter == "trace"
    assert result.verification.passed
    assert "traced instead" in result.notes[-1]
    assert not batch_norms(result)


def test_a_trace_that_fixes_the_batch_is_refused(tmp_path):
    path = tmp_path / "m.pt"
    path.write_bytes(b"what was there")
    arguments = (trained(Net(lambda y: y * int(y.shape[0]) * max({1}))), torch.randn(2, 3, 5, 5), path)
    options = {"format": "torchscript", "overwrite": True}
    with pytest.raises(VerificationError, match="differs from torch, nothing was written"):
        bnexport.export(*arguments, **options)
    assert path.read_bytes() == b"what was there"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.warns(UserWarning, match="traced instead"):
        assert bnexport.export(*arguments, **options, dynamic=False).verification.passed


class _Halved(nn.Module):
    """A parametrization of which torch keeps one tensor."""

    def forward(self, weight):
        return weight / 2


@pytest.mark.parametrize("fold", [True, False])
def test_parametrized_weights_are_plain_ones_in_torchscript(fold, tmp_path):
    """torch does not run a scripted parametrization; one original is a plain weight elsewhere, and shared."""
    net = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1, bias=False) for _ in range(4)), nn.BatchNorm2d(3)).eval()
    for layer in net[1:3]:
        layer.weight = net[0].weight
        nn.utils.parametrize.register_parametrization(layer, "weight", _Halved())
    net[1].parametrizations.weight.original = net[0].weight
    nn.utils.parametrizations.weight_norm(net[3])
    x, before = torch.randn(2, 3, 8, 8), {name: value.clone() for name, value in net.state_dict().items()}
    bnexport.export(net, x, tmp_path / "m.pt", verify=False, fold=fold)
    torch.testing.assert_close(torch.jit.load(tmp_path / "m.pt")(x), net(x))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("suffix", [".pt", ".pt2", pytest.param(".onnx", marks=pytest.mark.slow)])
def test_a_hundred_and_twenty_nested_modules(suffix, tmp_path):
    net, limit = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), sys.getrecursionlimit()
    for _ in range(120):
        net = nn.Sequential(net)
    bnexport.export(net.eval(), torch.randn(2, 3, 4, 4), tmp_path / f"m{suffix}", verify=suffix == ".onnx")
    assert sys.getrecursionlimit() == limit


class Neither(nn.Module):
    def forward(self, x):
        return type("Result", (), {"value": x})()


def foreign():
    def forward(self, x):
        norm = torch.ops.bnexport.sync_batch_norm
        return norm(x, self.mean, self.var, None, None, False, 0.1, 1e-5, "", 1, "exact", "local", 0)[0]

    return compose(forward, mean=torch.zeros(3), var=torch.ones(3))


class RoundsUp(nn.Module):
    """Its program calls math.ceil, which torch.export.save does not write."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = math.ceil(x.shape[2] / 2) * 2
        return nn.functional.interpolate(x, size=(side, side))


FOREIGN = r"needs bnexport::sync_batch_norm.*, which torch alone cannot load"
REFUSED = [
    (Neither, "torchscript", r"can neither script it \(.*\) nor trace it \(.*format='onnx'"),
    (foreign, "torchscript", FOREIGN),
    (foreign, "pt2", FOREIGN),
    (RoundsUp, "pt2", r"torch.export.save fails: .*; use format='torchscript'"),
]


@pytest.mark.parametrize(("make", "kind", "message"), REFUSED)
def test_what_cannot_be_written(make, kind, message, tmp_path):
    with pytest.raises(UnsupportedModelError, match=message):
        bnexport.export(make().eval(), torch.randn(2, 3, 8, 8), tmp_path / "m", format=kind)
    assert not list(tmp_path.iterdir())


def test_a_wrong_fold_is_never_written(format, tmp_path, monkeypatch):
    off_by(monkeypatch, 1e-3)
    x = torch.randn(2, 3, 6, 6)
    with pytest.raises(VerificationError, match=r"nothing was written: site 1: at .*: the shift of channel \d differs"):
        bnexport.export(pair(), x, tmp_path / "m", format=format)
    # Without the proof the file itself tells.
    monkeypatch.setattr(torch_module, "prove_module", lambda *_: Verification.skipped("not asked for"))
    with pytest.raises(VerificationError, match=r"nothing was written: output 'output' in .*: differs"):
        bnexport.export(pair(), x, tmp_path / "m", format=format)
    assert not list(tmp_path.iterdir())


def test_a_file_is_written_quietly_and_for_other_readers(format, tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = bnexport.export(pair(), torch.randn(2, 3, 6, 6), tmp_path / "m", format=format, verify=False)
    assert not [str(warning.message) for warning in seen]
    assert result.path.stat().st_mode == plain.stat().st_mode


def test_command_line(format, tmp_path, capsys):
    path = tmp_path / f"m.{format}"
    arguments = ["export", "models.resnet:digits_resnet", str(path), "--input", "x:2,1,8,8", "--json", "-"]
    assert main([*arguments, "--format", format]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["format"], result["verification"]["passed"], result["path"]) == (format, True, str(path))
    assert path.stat().st_size > 100_000


def test_a_batch_norm_that_stays_is_said_to_fold_in_onnx(tmp_path):
    model = nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3), nn.ReLU()).eval()
    result = bnexport.export(model, torch.randn(2, 3, 8, 8), tmp_path / "m.pt2")
    assert any(note.startswith("ONNX files fold more") for note in result.notes)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval()
    assert not bnexport.export(model, torch.randn(2, 3, 8, 8), tmp_path / "n.pt2").notes


def test_a_program_allows_the_sizes_of_its_range():
    size = torch.export.Dim("h", min=3, max=9)
    program = torch.export.export(nn.Identity(), (torch.randn(1, 5),), dynamic_shapes=({1: size},))
    allowed = [rows for rows in range(2, 12) if torch_target.program_allows(program, (torch.randn(1, rows),))]
    assert allowed == list(range(3, 10))


class Speaks(torch.nn.Module):
    """Prints, takes three columns alone, and returns two tensors."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        print("what a model prints is no answer")
        return x @ torch.ones(3, 2), x


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(Speaks()).save(str(tmp_path / "m.pt"))
    return tmp_path / "m.pt"


def test_one_process_runs_every_feed(file: Path) -> None:
    with FreshProcess(file, "torchscript") as engine:
        for rows in (2, 5):
            total, same = engine.run({"x": torch.ones(rows, 3)}, ["y", "z"])
            assert (total.tolist(), same.shape) == ([[3.0, 3.0]] * rows, (rows, 3))
        with pytest.raises(EngineFailure, match=r"RuntimeError: .*") as caught:
            engine.run({"x": torch.ones(2, 4)}, ["y", "z"])
        assert caught.value.detail.startswith("RuntimeError")
        assert engine.run({"x": torch.ones(1, 3)}, ["y", "z"])[1].shape == (1, 3)
        process = engine._process
    assert process.returncode is not None


def test_a_tensor_that_an_exporter_has_marked(file: Path) -> None:
    """torch.export leaves attributes of its own classes on example inputs where it fails."""
    x = torch.ones(2, 3)
    x.marked = types.SimpleNamespace()  # type: ignore[attr-defined]
    with FreshProcess(file, "torchscript") as engine:
        assert engine.run({"x": x}, ["y", "z"])[0].tolist() == [[3.0, 3.0]] * 2


def test_a_file_that_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(b"nothing")
    with (
        FreshProcess(tmp_path / "m.pt", "torchscript") as engine,
        pytest.raises(VerificationError, match="torch cannot load and run the exported file without bnexport: "),
    ):
        engine.run({}, [])


def test_a_process_that_does_not_answer(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_target, "_TIMEOUT", 0)
    with FreshProcess(file, "torchscript") as engine, pytest.raises(MissingDependencyError, match="longer than 0 s"):
        engine.run({"x": torch.ones(1, 3)}, ["y", "z"])


def test_no_process(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_target, "sys", types.SimpleNamespace(executable=str(file)))
    with pytest.raises(MissingDependencyError, match="cannot be checked in a new process"):
        FreshProcess(file, "torchscript")
