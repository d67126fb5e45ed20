"""What ONNX Runtime is given is what was checked: sessions get bytes and arrays, and open no file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from bnexport import model_io
from bnexport.errors import MalformedModelError, MissingFileError, UnsafeModelError
from bnexport.runtime import sessions as runtime_sessions
from bnexport.runtime.sessions import InferenceSession
from bnexport.training.api import export_training_step
from bnexport.training.session import TrainingSession
from tests.malicious.attempts import WEIGHT, example

X = np.ones((2, 64), np.float32)


def after_the_check(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Changes files between the check of a model and the making of its session."""
    real = runtime_sessions.prepare

    def change_first(*arguments: object) -> object:
        change()
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(runtime_sessions, "prepare", change_first)


@pytest.mark.parametrize("large", [False, True])
def test_options_serve_several_sessions(victim: Path, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in other files, with options of our own and twice with the caller's."""
    if large:
        monkeypatch.setattr(runtime_sessions, "_LARGEST_MESSAGE", 0)
    options = onnxruntime.SessionOptions()
    sessions = [InferenceSession(victim), InferenceSession(victim, sess_options=options)]
    if not large:
        other = victim.with_name("other.onnx")
        proto = example()
        proto.graph.initializer[0].name = proto.graph.node[0].input[1] = "v"
        other.write_bytes(proto.SerializeToString())
        sessions += [InferenceSession(other, sess_options=options), InferenceSession(victim, sess_options=options)]
    for session in sessions:
        np.testing.assert_allclose(session.run(None, {"x": X})[0], X @ WEIGHT, rtol=1e-4, atol=1e-4)


def test_files_are_not_opened_again(victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace() -> None:
        victim.write_bytes(b"another model")
        (victim.parent / "data").unlink()
        (victim.parent / "data").symlink_to(victim.parent.parent / "secret")

    after_the_check(monkeypatch, replace)
    got = InferenceSession(victim).run(None, {"x": X})[0]
    np.testing.assert_allclose(got, X @ WEIGHT, rtol=1e-4, atol=1e-4)


def test_bytes_are_checked(victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that name a file would have it read from the current folder."""
    monkeypatch.chdir(victim.parent)
    with pytest.raises(UnsafeModelError, match="no folder"):
        InferenceSession(victim.read_bytes())
    with pytest.raises(MalformedModelError):
        InferenceSession(b"this is not a model")
    twice = example()
    twice.graph.output.append(twice.graph.output[0])
    with pytest.raises(MalformedModelError, match="appears twice"):
        InferenceSession(twice.SerializeToString())
    session = InferenceSession(example().SerializeToString())
    np.testing.assert_allclose(session.run(None, {"x": X})[0], X @ WEIGHT, rtol=1e-4, atol=1e-4)


def test_a_structure_in_bytes_is_bounded() -> None:
    with pytest.raises(UnsafeModelError, match="structure_bytes"):
        model_io.check(example().SerializeToString(), limits=model_io.Limits(structure_bytes=50))
    model_io.check(example().SerializeToString(), limits=model_io.Limits(structure_bytes=500))


def test_training_opens_no_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3)).train()
    batch = (torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
    export_training_step(net, torch.nn.functional.cross_entropy, batch, tmp_path / "step.onnx")
    arrays = tuple(tensor.numpy() for tensor in batch)
    expected = TrainingSession(tmp_path / "step.onnx").evaluate(arrays).loss
    graphs = [tmp_path / "step.onnx", tmp_path / "step.eval.onnx"]
    whole = [path.read_bytes() for path in graphs]

    def replace() -> None:
        for path in graphs:
            path.write_bytes(b"another model")

    with monkeypatch.context() as patch:
        after_the_check(patch, replace)
        session = TrainingSession(tmp_path / "step.onnx")
        graphs[1].write_bytes(whole[1])
        assert session.evaluate(arrays).loss == expected

    proto = onnx.load_from_string(whole[0])
    tensor = proto.graph.initializer.add(name="stranger", data_type=1, dims=[4], data_location=1)
    tensor.external_data.add(key="location", value="../secret")
    graphs[0].write_bytes(proto.SerializeToString())
    with pytest.raises(UnsafeModelError, match="leaves the folder"):
        TrainingSession(graphs[0])
    os.unlink(graphs[0])
    with pytest.raises(MissingFileError, match="no such file"):
        TrainingSession(graphs[0])
