"""The process that runs an exported file without bnexport."""

from __future__ import annotations

import types
import warnings
from pathlib import Path

import pytest
import torch

from bnexport.errors import MissingDependencyError, VerificationError
from bnexport.exporting import torch_target
from bnexport.exporting.torch_target import FreshProcess
from bnexport.runtime.engine import EngineFailure
from tests.support import warm


class Speaks(torch.nn.Module):
    """Prints, takes three columns alone, and returns two tensors."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        print("what a model prints is no answer")
        return x @ torch.ones(3, 2), x


@pytest.fixture(autouse=True)
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_target, "sys", types.SimpleNamespace(executable=warm.executable()))


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
