"""The command line on real files: output, exit codes, one-line errors, no leftovers."""

import json
import os

import numpy as np
import onnx
import pytest
import torch

import bnexport
from bnexport.cli import doctor
from bnexport.errors import LibraryError
from models.resnet import ResNet
from tests.support import warm
from tests.support.onnx_text import array_of


def tiny():
    torch.manual_seed(0)
    return ResNet(in_channels=1, widths=(4, 8), blocks=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    torch.save(tiny().state_dict(), folder / "tiny.pt")
    bnexport.export(tiny().eval(), torch.randn(4, 1, 8, 8), folder / "eval.onnx", mode="custom_op")
    return folder


def test_fold_then_verify_run_and_inspect(folder, tmp_path, call):
    target = tmp_path / "folded.onnx"
    _, _, err = call("fold", folder / "eval.onnx", target, code=0)
    assert "6 of 6 batch norms folded into convolutions" in err and "verification passed" in err
    call("verify", folder / "eval.onnx", target, code=0)
    _, out, err = call("verify", folder / "eval.onnx", target, "--method", "local", "-v", code=0)
    assert "verification passed: 6 folds proved, 0 compared only" in err
    assert "verified without inputs: no model was run" in err and "6 of 6 folds" in out
    _, out, _ = call("run", target, "--input", "x:3,1,8,8", "--output", tmp_path / "out.npz", "--json", "-", code=0)
    assert json.loads(out)["outputs"][0]["shape"] == [3, 10]
    assert np.load(tmp_path / "out.npz")["output"].shape == (3, 10)
    _, out, _ = call("inspect", target, "--json", "-", code=0)
    assert json.loads(out)["batch_norms"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folded.onnx", "out.npz"]


def test_fold_of_a_training_graph_says_so(tmp_path, call):
    bnexport.export(tiny().train(), torch.randn(4, 1, 8, 8), tmp_path / "train.onnx", mode="custom_op")
    _, _, err = call("fold", tmp_path / "train.onnx", tmp_path / "f.onnx", code=0)
    assert "the graph trained; it is an inference graph now" in err
    session = bnexport.InferenceSession(tmp_path / "f.onnx")
    names = [output.name for output in session.get_outputs()]
    got = dict(zip(names, session.run(None, {"x": np.ones((2, 1, 8, 8), np.float32)})))
    old = onnx.load(tmp_path / "train.onnx")
    state = [name for name in names if name.endswith(".new")]
    assert len(state) == 3 * 6
    for name in state:
        np.testing.assert_array_equal(got[name], array_of(old, name.removesuffix(".new")), err_msg=name)


def test_folding_can_be_limited_and_nothing_to_fold_is_an_unchanged_copy(folder, tmp_path, call):
    name, once, twice = "stem.1/MMCVSyncBatchNorm", tmp_path / "1.onnx", tmp_path / "2.onnx"
    _, _, err = call("fold", folder / "eval.onnx", once, "--skip", name, "--explain", name, code=0)
    assert "5 of 6 batch norms folded" in err
    assert "stem.1: kept, as BatchNormalization: it was left alone on request" in err
    call("fold", once, twice, "--skip", "stem.1", code=0)
    assert onnx.load(once).graph == onnx.load(twice).graph


EXPORT = ["export", "tests.cli.test_cli:tiny"]


def test_export(folder, tmp_path, call):
    command = [*EXPORT, tmp_path / "e.onnx", "--checkpoint", folder / "tiny.pt", "--input", "x:2,1,8,8"]
    assert "verification passed" in call(*command, code=0)[2]
    call("verify", folder / "eval.onnx", tmp_path / "e.onnx", code=0)
    more = ["--mode", "custom_op", "--train", "--exporter", "torchscript", "--json", "-", "--overwrite"]
    assert "stem.1.running_var" in json.loads(call(*command, *more, code=0)[1])["state"]


def test_export_reads_checkpoints_of_frameworks(tmp_path, call):
    weights = {f"module.{name}": value for name, value in tiny().state_dict().items()}
    wrong = {**weights, "module.head.weight": torch.ones(1)}
    torch.save({"meta": {}, "ema": weights, "state_dict": wrong}, tmp_path / "c.pth")
    command = [*EXPORT, tmp_path / "m.onnx", "--checkpoint", tmp_path / "c.pth", "-i", "x:2,1,8,8"]
    _, _, err = call(*command, code=2)
    assert "1 unexpected" in err and "module.head.weight" not in err.split("unexpected")[0]
    assert not (tmp_path / "m.onnx").exists()
    assert "unexpected: head.weight" in call(*command, "--allow-unexpected", code=0)[2]
    call(*command, "--key", "ema", "--overwrite", code=0)


def test_the_certificate_of_a_fold(folder, tmp_path, call):
    """`verify` says whether it was used; a file may go without it."""
    for name, options in (("with.onnx", ()), ("without.onnx", ("--no-certificate",))):
        command = ["fold", folder / "eval.onnx", tmp_path / name, "--no-verify", "--json", "-", *options]
        assert json.loads(call(*command, code=0)[1])["certificate"] is not bool(options)
    model = onnx.load(tmp_path / "with.onnx")
    model.metadata_props[0].value = "{}"
    onnx.save(model, tmp_path / "forged.onnx")
    forged = "not used: its version is not 1, the only one that is known here"
    for name, used in (("with.onnx", "used"), ("without.onnx", ""), ("forged.onnx", forged)):
        command = ["verify", folder / "eval.onnx", tmp_path / name, "--method", "local", "--json", "-"]
        _, out, err = call(*command, code=0)
        assert json.loads(out)["certificate"] == used
        assert "6 folds proved, 0 compared only" in err
        assert (f"note: the certificate in {tmp_path / name} was {used}" in err) == (used == forged)


def test_npy_inputs(folder, tmp_path, call):
    x = np.random.default_rng(0).standard_normal((2, 1, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    _, out, _ = call("run", folder / "eval.onnx", "--input", f"x:{tmp_path / 'x.npy'}", "--json", "-", code=0)
    expected = float(tiny().eval()(torch.from_numpy(x)).detach().max())
    assert json.loads(out)["outputs"][0]["max"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("deep", [False, True])
def test_doctor_looks_deeper_on_request(call, deep):
    _, out, err = call("doctor", *["--deep"] * deep, "--json", "-", code=0)
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert err.startswith("all good: ") and err.count("\n") == 1
    assert checks["registration in ONNX Runtime"]["ok"]
    assert ("operators in torch" in checks) is deep
    assert not deep or (checks["operators in torch"]["ok"] and checks["torch"]["value"] == torch.__version__)


def test_an_operator_that_computes_something_else(monkeypatch):
    monkeypatch.setattr(bnexport.SyncBatchNorm, "forward", lambda self, x: x + 1)
    with pytest.raises(LibraryError, match="expected 0"):
        doctor._torch_operator()


def test_a_library_that_cannot_be_loaded(tmp_path):
    (tmp_path / "libbroken.so").write_bytes(b"not a library")
    for name in ("libbroken.so", "missing.so"):
        done = warm.run("-m", "bnexport", "doctor", env={**os.environ, "BNEXPORT_LIBRARY": str(tmp_path / name)})
        assert done.returncode == 4 and name in done.stderr and "Traceback" not in done.stderr
