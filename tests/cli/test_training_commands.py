"""What training promises about its checkpoint: its mode, more epochs on resume, and a name for graphs that are no step."""

import os

import pytest

from bnexport.cli import main


@pytest.fixture
def files(small_files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return small_files


def train(files, epochs, *more):
    arguments = ["train", f"{files}/step.onnx", "--data", f"{files}/rows.npz", "--batch-size", "4", "--save", "run"]
    return main([*arguments, "--epochs", str(epochs), *more])


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_checkpoint_has_the_mode_of_other_files(umask, files, tmp_path):
    before = os.umask(umask)
    try:
        assert train(files, 1) == 0
    finally:
        os.umask(before)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_epochs_may_grow_on_resume(schedule, files, capfd):
    assert train(files, 2, "--schedule", schedule) == 0
    capfd.readouterr()
    assert train(files, 3, "--schedule", schedule, "--resume") == 0
    err = capfd.readouterr().err
    assert "epoch 3 of 3: loss" in err
    assert ("was for 2 epochs, it is for 3 now" in err) is (schedule == "cosine")
    if schedule == "cosine":
        assert train(files, 2, "--schedule", schedule, "--resume") == 2
        assert "epochs: it has 3, this one 2" in capfd.readouterr().err


def test_a_graph_that_is_no_step(files, capfd):
    assert main(["train", f"{files}/kept.onnx", "--data", f"{files}/rows.npz"]) == 3
    assert "bnexport train-export" in capfd.readouterr().err
