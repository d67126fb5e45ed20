"""bnexport train-export and bnexport train on files: results, kill -9 and resume, two processes, errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import bnexport
from bnexport import model_io, tolerances
from bnexport.cli import main
from bnexport.training.running.data import load_rows
from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
NETWORK = """
import bnexport, torch
from torch import nn

def network():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Tanh(), nn.Conv2d(6, 6, 3, bias=False),
        bnexport.SyncBatchNorm(6), nn.Tanh(), nn.Dropout(0.0), nn.Flatten(), nn.Linear(24, 3),
    )

def halved(output, target):
    return 0.5 * nn.functional.cross_entropy(output, target)
"""
ROWS = 90


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A step that the command line exported, and rows whose classes can be learned."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "tiny_network.py").write_text(NETWORK)
    generator = np.random.default_rng(0)
    for name in ("train", "valid"):
        labels = generator.integers(0, 3, ROWS)
        images = generator.standard_normal((ROWS, 1, 6, 6)).astype(np.float32)
        images[np.arange(ROWS), 0, :, labels] += 2
        np.savez(folder / f"{name}.npz", image=images, target=labels)
        np.save(folder / f"{name}_x.npy", images)
        np.save(folder / f"{name}_y.npy", labels)
    done = warm.run(
        *("-m", "bnexport", "train-export", "tiny_network:network", "step.onnx"),
        *("--input", "image:8,1,6,6", "--loss", "cross_entropy", "--optimizer", "adamw"),
        *("--option", "lr=2e-3", "--option", "betas=0.9,0.99", "--option", "eps=1e-3", "--json", "export.json"),
        cwd=folder,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert "verification passed" in done.stderr
    return folder


def environment() -> dict[str, str]:
    """PYTHON_EXEC is what torchrun starts."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON_EXEC": warm.executable()}


def cli(*arguments: object, capsys) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_export_says_what_it_made(folder):
    report = json.loads((folder / "export.json").read_text())
    assert report["inputs"] == ["image", "target"] and report["verification"]["passed"]
    saved = {each["name"]: each for each in report["saved_activations"]}
    assert saved["image"] == {
        "name": "image",
        "operator": "",
        "dtype": "float32",
        "shape": ["batch", 1, 6, 6],
        "bytes": 8 * 36 * 4,
    }
    assert all(each["bytes"] for each in saved.values())
    assert report["saved_activation_bytes"] == sum(each["bytes"] for each in saved.values())
    description = bnexport.TrainingSession(folder / "step.onnx")._description
    assert description.optimizer_options["betas"] == [0.9, 0.99] and description.learning_rate == 2e-3


def test_training_learns_and_writes_a_model(folder, tmp_path, capsys):
    code, out, err = cli(
        *("train", folder / "step.onnx", "--data", folder / "train.npz", "--validation", folder / "valid.npz"),
        *("--epochs", 12, "--batch-size", 16, "--learning-rate", 0.02, "--schedule", "cosine", "--warm-up-steps", 5),
        *("--inference", tmp_path / "model.onnx", "--save", tmp_path / "c.safetensors", "--json", "-"),
        capsys=capsys,
    )
    assert code == 0, err
    result = json.loads(out)
    assert (result["steps"], result["processes"], len(result["epochs"])) == (12 * 6, 1, 12)
    last = result["epochs"][-1]
    assert last["accuracy"] > 0.8 and last["loss"] < 0.5 * result["epochs"][0]["loss"]
    assert 0 < last["learning_rate"] < 1e-4
    assert "epoch 12 of 12: loss" in err and "\x1b" not in err, "a bar is for terminals"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.safetensors", "model.onnx"]
    with np.load(folder / "valid.npz") as valid:
        scores = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"image": valid["image"]})[0]
        assert (scores.argmax(1) == valid["target"]).mean() == last["accuracy"]


def test_the_steps_are_those_of_a_session(folder, tmp_path, capsys):
    """The order of rows, the last batch, the rate and the seed, written out."""
    code, _, err = cli(
        *("train", folder / "step.onnx", "--data", f"{folder / 'train_x.npy'},{folder / 'train_y.npy'}"),
        *("--epochs", 2, "--batch-size", 40, "--seed", 5, "--warm-up-steps", 4, "--save", tmp_path / "c.safetensors"),
        capsys=capsys,
    )
    assert code == 0, err
    options = onnxruntime.SessionOptions()
    session = bnexport.TrainingSession(folder / "step.onnx", session_options=options)
    session.seed = 5
    images, labels = np.load(folder / "train_x.npy"), np.load(folder / "train_y.npy")
    step = 0
    for epoch in range(2):
        order = np.random.default_rng([5, epoch]).permutation(ROWS)
        for batch in (order[:40], order[40:80], order[80:]):
            step += 1
            session.learning_rate = 2e-3 * min(1.0, step / 4)
            session.step((images[batch], labels[batch]))
    got, _ = model_io.load_tensors(tmp_path / "c.safetensors")
    for name, value in got.items():
        assert np.array_equal(value, session._state.get(name)), name


def start(folder: Path, checkpoint: Path, *more: str | Path) -> warm.Process:
    return warm.start(
        *("-m", "bnexport", "train", "step.onnx", "--data", "train.npz", "--epochs", "30"),
        *("--batch-size", "8", "--schedule", "cosine", "--save-every", "3", "--threads", "1"),
        *("--validation", "valid.npz", "--resume", "--save", str(checkpoint), *more),
        cwd=folder,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )


def test_killed_at_any_moment_it_resumes_to_the_same_bytes(folder, tmp_path):
    whole, broken = tmp_path / "whole.safetensors", tmp_path / "broken.safetensors"
    process = start(folder, whole, "--json", tmp_path / "whole.json")
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors

    generator = np.random.default_rng()
    kills = 0
    for _ in range(2):
        before = broken.read_bytes() if broken.exists() else b""
        process = start(folder, broken)
        limit = time.monotonic() + 600
        while process.poll() is None and time.monotonic() < limit:
            if broken.exists() and broken.read_bytes() != before:
                break
            time.sleep(0.005)
        time.sleep(generator.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        kills += process.wait(timeout=600) == -signal.SIGKILL
        process.stderr.close()
    assert kills == 2, "the training was too short to be killed"
    assert broken.read_bytes() != whole.read_bytes()
    process = start(folder, broken, "--json", tmp_path / "broken.json")
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert "going on after step" in errors
    assert broken.read_bytes() == whole.read_bytes()
    results = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "broken")]
    assert results[0]["epochs"] == results[1]["epochs"]
    assert results[0]["resumed_after_step"] is None and results[1]["resumed_after_step"] > 0


def test_torchrun_trains_as_one_process(folder, tmp_path, capsys):
    """Batches of 32 and a last one of 1, which leaves a rank without rows; validation is shared."""
    rows = [np.load(folder / f"train_{part}.npy")[:65] for part in "xy"]
    np.savez(tmp_path / "rows.npz", image=rows[0], target=rows[1])
    arguments = [
        *("train", str(folder / "step.onnx"), "--data", str(tmp_path / "rows.npz"), "--epochs", "2"),
        *("--validation", str(folder / "valid.npz"), "--batch-size", "32"),
    ]
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    code, out, err = cli(*arguments, "--save", one, "--json", "-", capsys=capsys)
    assert code == 0, err
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = warm.run(
        *(*launcher, "-m", "bnexport", *arguments, "--save", two, "--timeout", "300"),
        *("--json", "-", "--inference", tmp_path / "model.onnx"),
        cwd=folder,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    alone, together = json.loads(out), json.loads(done.stdout)
    assert (alone["processes"], together["processes"]) == (1, 2)
    for a, b in zip(alone["epochs"], together["epochs"], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert b["validation_loss"] == pytest.approx(a["validation_loss"], rel=1e-4)
    expected, got = (model_io.load_tensors(path)[0] for path in (one, two))
    for name, value in expected.items():
        bound = 2 * tolerances.model("float32", value).atol
        np.testing.assert_allclose(got[name], value, rtol=0, atol=bound, err_msg=name)
    assert (tmp_path / "model.onnx").exists()


def test_npy_files_are_mapped(folder):
    rows = load_rows(f"{folder / 'train_x.npy'},{folder / 'train_y.npy'}", ("image", "target"))
    assert all(isinstance(array, np.memmap) for array in rows.arrays.values()) and len(rows) == ROWS
    image, target = rows.read(np.array([3, 1]))
    assert np.array_equal(image, np.load(folder / "train_x.npy")[[3, 1]]) and target.shape == (2,)


@pytest.fixture(scope="module")
def bad(folder) -> Path:
    """Files that are refused, beside a checkpoint of another training."""
    x, y = np.load(folder / "train_x.npy"), np.load(folder / "train_y.npy")
    np.save(folder / "short.npy", y[:7])
    np.save(folder / "float.npy", y.astype(np.float32))
    np.save(folder / "objects.npy", np.array([{}, {}], object))
    np.savez(folder / "names.npz", x=x, y=y)
    np.savez(folder / "wide.npz", image=x[:, :, :5], target=y)
    (folder / "text.npy").write_text("no array")
    assert main(["train", str(folder / "step.onnx"), "--data", str(folder / "train.npz"), "--batch-size", "45",
                 "--save", str(folder / "seed0.safetensors"), "-q"]) == 0  # fmt: skip
    model_io.save_tensors({"x": np.zeros(2)}, {}, folder / "foreign.safetensors")
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "train_x.npy,short.npy"], "different numbers of rows: image has 90, target has 7"),
        (["--data", "train_x.npy"], "got 1 files in 'train_x.npy', expected one .npz file, or a .npy file or folder"),
        (["--data", "train_x.npy,objects.npy"], "--data: cannot read 'objects.npy' as a NumPy file"),
        (["--data", "train_x.npy,absent.npy"], "'absent.npy' as a NumPy file: No such file"),
        (["--data", "text.npy,train_y.npy"], "--data: cannot read 'text.npy' as a NumPy file"),
        (["--data", "names.npz"], "names.npz: holds x, y, expected image, target"),
        (["--data", "train_x.npy,float.npy"], "target: got an array of float32, expected int64"),
        (["--data", "wide.npz"], "image: got shape (32, 1, 5, 6), expected (batch, 1, 6, 6)"),
        (["--data", "train.npz", "--validation", "wide.npz"], "image: got shape"),
        (["--data", "train.npz", "--batch-size", "100", "--drop-last"], "fewer than one batch of 100"),
        (["--data", "train.npz", "--schedule", "steps"], "schedule: got 'steps', expected one of constant, cosine"),
        (["--data", "train.npz", "--resume"], "--resume: got no --save"),
        (["--data", "train.npz", "--save", "seed0.safetensors"], "exists; go on from it with --resume"),
        (
            ["--data", "train.npz", "--save", "seed0.safetensors", "--resume", "--seed", "1"],
            "the checkpoint of another training: batch_size: it has 45, this one 32; seed: it has 0, this one 1",
        ),
        (["--data", "train.npz", "--save", "foreign.safetensors", "--resume"], "is no checkpoint of"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(bad, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(bad)
    code, out, err = cli("train", "step.onnx", *arguments, capsys=capsys)
    assert code in {2, 3} and message in err, err
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loss", "crossentropy"], "loss: got 'crossentropy', expected one of cross_entropy"),
        (["--loss", "tiny_network:halved"], "--target: missing"),
        (["--loss", "tiny_network:absent"], "--loss tiny_network:absent: cannot be imported"),
        (["--option", "lr"], "--option: got 'lr', expected NAME=VALUE"),
        (["--option", "momentum=high"], "--option: got 'momentum=high'"),
        (["--option", "beta=0.1"], "optimizer_options: got 'beta', which sgd does not have"),
        (["--optimizer", "lion"], "optimizer: got 'lion'"),
    ],
)
def test_bad_export_arguments_are_refused(folder, arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    code, _, err = cli(
        "train-export", "tiny_network:network", "x.onnx", "-i", "image:4,1,6,6", *arguments, capsys=capsys
    )
    assert code == 2 and message in err, err
    assert not (folder / "x.onnx").exists()


def test_a_loss_of_ones_own(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    np.save(tmp_path / "y.npy", np.arange(4) % 3)
    code, _, err = cli(
        *("train-export", "tiny_network:network", tmp_path / "s.onnx", "-i", "image:4,1,6,6", "--no-verify"),
        *("--loss", "tiny_network:halved", "--target", tmp_path / "y.npy"),
        capsys=capsys,
    )
    assert code == 0, err
    with np.load(folder / "train.npz") as rows:
        batch = (rows["image"][:9], rows["target"][:9])
    losses = [bnexport.TrainingSession(path).step(batch) for path in (folder / "step.onnx", tmp_path / "s.onnx")]
    assert losses[1] == pytest.approx(0.5 * losses[0], rel=1e-5)
