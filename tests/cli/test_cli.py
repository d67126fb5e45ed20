"""The command line on real files: output, exit codes, one-line errors, no leftovers."""

import json
import os

import numpy as np
import onnx
import pytest
import torch

import bnexport
from bnexport.cli import main
from models.resnet import ResNet
from tests.support import warm


def tiny():
    torch.manual_seed(0)
    return ResNet(in_channels=1, widths=(4, 8), blocks=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    torch.save(tiny().state_dict(), folder / "tiny.pt")
    bnexport.export(tiny().eval(), torch.randn(4, 1, 8, 8), folder / "eval.onnx", mode="custom_op")
    return folder


def _cli(*arguments, capsys=None):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_fold_then_verify_run_and_inspect(folder, tmp_path, capsys):
    target = tmp_path / "folded.onnx"
    code, out, err = _cli("fold", folder / "eval.onnx", target, capsys=capsys)
    assert code == 0, err
    assert "6 of 6 batch norms folded into convolutions" in err
    assert "verification passed" in err
    assert _cli("verify", folder / "eval.onnx", target, capsys=capsys)[0] == 0
    code, out, err = _cli("verify", folder / "eval.onnx", target, "--method", "local", "-v", capsys=capsys)
    assert code == 0
    assert "verification passed: 6 folds proved, 0 compared only" in err
    assert "verified without inputs: no model was run" in err
    assert "6 of 6 folds" in out
    assert _cli("verify", folder / "eval.onnx", target, "--method", "some", capsys=capsys)[0] == 2
    code, out, _ = _cli(
        "run", target, "--input", "x:3,1,8,8", "--output", tmp_path / "out.npz", "--json", "-", capsys=capsys
    )
    assert code == 0
    assert json.loads(out)["outputs"][0]["shape"] == [3, 10]
    assert np.load(tmp_path / "out.npz")["output"].shape == (3, 10)
    code, out, _ = _cli("inspect", target, "--json", "-", capsys=capsys)
    assert code == 0
    assert json.loads(out)["batch_norms"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folded.onnx", "out.npz"]


def test_fold_of_a_training_graph_says_so(tmp_path, capsys):
    bnexport.export(tiny().train(), torch.randn(4, 1, 8, 8), tmp_path / "train.onnx", mode="custom_op")
    code, _, err = _cli("fold", tmp_path / "train.onnx", tmp_path / "f.onnx", capsys=capsys)
    assert code == 0
    assert "the graph trained; it is an inference graph now" in err
    session = bnexport.InferenceSession(tmp_path / "f.onnx")
    names = [output.name for output in session.get_outputs()]
    got = dict(zip(names, session.run(None, {"x": np.ones((2, 1, 8, 8), np.float32)})))
    old = {i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(tmp_path / "train.onnx").graph.initializer}
    state = [name for name in names if name.endswith(".new")]
    assert len(state) == 3 * 6
    for name in state:
        np.testing.assert_array_equal(got[name], old[name.removesuffix(".new")], err_msg=name)


def test_folding_can_be_limited_and_explained(folder, tmp_path, capsys):
    name = "stem.1/MMCVSyncBatchNorm"
    code, _, err = _cli(
        "fold", folder / "eval.onnx", tmp_path / "f.onnx", "--skip", name, "--explain", name, capsys=capsys
    )
    assert code == 0
    assert "5 of 6 batch norms folded" in err
    assert "stem.1: kept, as BatchNormalization: it was left alone on request" in err


def test_nothing_to_fold_is_an_unchanged_copy(folder, tmp_path, capsys):
    once, twice = tmp_path / "1.onnx", tmp_path / "2.onnx"
    assert _cli("fold", folder / "eval.onnx", once, capsys=capsys)[0] == 0
    code, _, err = _cli("fold", once, twice, capsys=capsys)
    assert code == 0
    assert "nothing to fold" in err
    assert onnx.load(once).graph == onnx.load(twice).graph


def test_export(folder, tmp_path, capsys):
    target = tmp_path / "e.onnx"
    arguments = ["tests.cli.test_cli:tiny", target, "--checkpoint", folder / "tiny.pt", "--input", "x:2,1,8,8"]
    code, _, err = _cli("export", *arguments, capsys=capsys)
    assert code == 0, err
    assert "verification passed" in err
    assert _cli("verify", folder / "eval.onnx", target, capsys=capsys)[0] == 0
    code, out, _ = _cli(
        "export",
        *arguments,
        "--mode",
        "custom_op",
        "--train",
        "--exporter",
        "torchscript",
        "--json",
        "-",
        "--overwrite",
        capsys=capsys,
    )
    assert code == 0
    assert "stem.1.running_var" in json.loads(out)["state"]


def test_the_certificate_of_a_fold(folder, tmp_path, capsys):
    """`verify` says whether it was used; a file may go without it."""
    for name, options in (("with.onnx", ()), ("without.onnx", ("--no-certificate",))):
        code, out, err = _cli(
            "fold", folder / "eval.onnx", tmp_path / name, "--no-verify", "--json", "-", *options, capsys=capsys
        )
        assert (code, json.loads(out)["certificate"]) == (0, not options), err
    model = onnx.load(tmp_path / "with.onnx")
    model.metadata_props[0].value = "{}"
    onnx.save(model, tmp_path / "forged.onnx")
    forged = "not used: its version is not 1, the only one that is known here"
    for name, used in (("with.onnx", "used"), ("without.onnx", ""), ("forged.onnx", forged)):
        code, out, err = _cli(
            *("verify", folder / "eval.onnx", tmp_path / name, "--method", "local", "--json", "-"), capsys=capsys
        )
        assert (code, json.loads(out)["certificate"]) == (0, used), err
        assert "6 folds proved, 0 compared only" in err
        assert (f"note: the certificate in {tmp_path / name} was {used}" in err) == (used == forged)


def test_npy_inputs(folder, tmp_path, capsys):
    x = np.random.default_rng(0).standard_normal((2, 1, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    code, out, _ = _cli("run", folder / "eval.onnx", "--input", f"x:{tmp_path / 'x.npy'}", "--json", "-", capsys=capsys)
    assert code == 0
    expected = tiny().eval()(torch.from_numpy(x))
    assert json.loads(out)["outputs"][0]["max"] == pytest.approx(float(expected.max()), rel=1e-4)


def test_doctor(capsys):
    code, out, _ = _cli("doctor", "--json", "-", capsys=capsys)
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == 0
    assert checks["registration in ONNX Runtime"]["ok"]
    assert "operators in torch" not in checks


def test_doctor_refuses_two_distributions_of_the_runtime(capsys, monkeypatch):
    from bnexport.cli import doctor

    installed = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.30.0"}
    monkeypatch.setattr(doctor, "_version", installed.get)
    assert _cli("doctor", capsys=capsys)[0] != 0
    check = doctor._runtime(False)
    assert check.value.startswith("onnxruntime 1.31.1 and onnxruntime-gpu 1.30.0 are installed") and check.ok is False


def test_doctor_looks_deeper_on_request(capsys):
    code, out, err = _cli("doctor", "--deep", "--json", "-", capsys=capsys)
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == 0 and err.startswith("all good: ") and err.count("\n") == 1
    assert checks["operators in torch"]["ok"] and checks["torch"]["value"] == torch.__version__


def test_a_library_that_cannot_be_loaded(folder, tmp_path):
    broken = tmp_path / "libbroken.so"
    broken.write_bytes(b"not a library")
    for path in (broken, tmp_path / "missing.so"):
        done = warm.run("-m", "bnexport", "doctor", env={**os.environ, "BNEXPORT_LIBRARY": str(path)})
        assert done.returncode == 4
        assert "Traceback" not in done.stderr
        assert path.name in done.stderr


def test_export_reads_checkpoints_of_frameworks(tmp_path, capsys):
    weights = {f"module.{name}": value for name, value in tiny().state_dict().items()}
    torch.save(
        {"meta": {}, "ema": weights, "state_dict": {**weights, "module.head.weight": torch.ones(1)}}, tmp_path / "c.pth"
    )
    arguments = (
        "export",
        "tests.cli.test_cli:tiny",
        tmp_path / "m.onnx",
        "--checkpoint",
        tmp_path / "c.pth",
        "-i",
        "x:2,1,8,8",
    )
    code, _, err = _cli(*arguments, capsys=capsys)
    assert code == 2
    assert "1 unexpected" in err and "module.head.weight" not in err.split("unexpected")[0]
    assert not (tmp_path / "m.onnx").exists()
    code, _, err = _cli(*arguments, "--allow-unexpected", capsys=capsys)
    assert code == 0, err
    assert "unexpected: head.weight" in err
    assert _cli(*arguments, "--key", "ema", "--overwrite", capsys=capsys)[0] == 0
