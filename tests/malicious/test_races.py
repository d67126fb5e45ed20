"""What is read or run is what was checked, or nothing: files that change between check and use, and sessions that open none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from bnexport import model_io, verify
from bnexport.errors import MalformedModelError, MissingFileError, UnsafeModelError, UsageError
from bnexport.exporting import against_file
from bnexport.folding import fold
from bnexport.model_io import as_model, load, save, stage, write
from bnexport.runtime import engine
from bnexport.runtime import sessions as runtime_sessions
from bnexport.runtime.sessions import InferenceSession
from bnexport.training.api import export_training_step
from bnexport.training.session import TrainingSession
from tests.malicious.attempts import SECRET, WEIGHT, data, example, external

Change = Callable[[Path, Path], None]


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A model in a folder of its own, with external data, beside a file that it must not reach."""
    (tmp_path / "secret").write_bytes(SECRET)
    folder = tmp_path / "victim"
    folder.mkdir()
    data(folder)
    return external(folder)


def replace_by_another_file(data: Path, secret: Path) -> None:
    data.rename(data.with_name("old"))
    data.write_bytes(bytes(WEIGHT.nbytes))


def replace_by_a_link(data: Path, secret: Path) -> None:
    data.unlink()
    data.symlink_to(secret)


def replace_by_a_hard_link(data: Path, secret: Path) -> None:
    data.unlink()
    os.link(secret, data)


def cut_off(data: Path, secret: Path) -> None:
    os.truncate(data, 100)


def overwrite(data: Path, secret: Path) -> None:
    data.write_bytes(SECRET[: WEIGHT.nbytes])
    os.utime(data, ns=(1, 1))


def after(change: Change, victim: Path, real: Callable[..., Any]) -> Callable[..., Any]:
    """A function that changes the data beside a model once it has done what it does."""

    def changing(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options)
        change(victim.with_name("data"), victim.parent.parent / "secret")
        return result

    return changing


CHANGES = [replace_by_another_file, replace_by_a_link, replace_by_a_hard_link, cut_off, overwrite]


@pytest.mark.parametrize("change", CHANGES)
def test_between_loading_and_reading_or_writing(change: Change, victim: Path) -> None:
    loaded = after(change, victim, load)(victim)
    with pytest.raises(UnsafeModelError):
        loaded.graph.initializers["w"].const_value.numpy()
    with pytest.raises(UnsafeModelError):
        save(loaded, victim.parent / "out.onnx")
    assert not (victim.parent / "out.onnx").exists()


@pytest.mark.parametrize("change", [replace_by_a_link, replace_by_a_hard_link])
def test_between_the_check_and_onnxruntime(change: Change, victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime is given bytes, never a path that it would open again."""
    monkeypatch.setattr(engine.model_io, "load", after(change, victim, engine.model_io.load))
    with pytest.raises(UnsafeModelError):
        engine.run(victim, {"x": np.ones((1, 64), np.float32)})


def test_between_the_check_and_verification(victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against_file, "open_source", after(replace_by_a_link, victim, against_file.open_source))
    with pytest.raises(UnsafeModelError):
        verify(victim, victim)


def test_a_link_put_in_place_of_the_output(victim: Path) -> None:
    """GHSA-q56x-g2fj-4rj6: a name is replaced between the check and the writing. A rename writes through no link."""
    secret, folder = victim.parent.parent / "secret", victim.parent
    for name, links in (("out.onnx", ["out.onnx", "out.onnx.data"]), ("other.onnx", ["other.onnx"])):
        staged = stage(as_model(example()), folder / name, external_data=True)
        for link in links:
            (folder / link).symlink_to(secret)
        if len(links) == 2:
            with pytest.raises(UsageError, match="another run"):
                staged.commit()
            staged.discard()
        else:
            staged.commit()
            assert not (folder / name).is_symlink()
        assert secret.read_bytes() == SECRET


def test_an_output_name_from_the_file_is_never_used(victim: Path) -> None:
    """CVE-2025-51480: data goes to a name derived from the target, not to the location that the model states."""
    victim.rename(victim.parent / "m.onnx")
    loaded = load(victim.parent / "m.onnx")
    loaded.graph.initializers["w"].const_value._location = "../secret"  # type: ignore[union-attr]
    target = victim.parent / "out"
    target.mkdir()
    save(loaded, target / "out.onnx")
    assert sorted(os.listdir(target)) == ["out.onnx", "out.onnx.data"]
    assert (victim.parent.parent / "secret").read_bytes() == SECRET


def test_fold_reports_a_change_in_the_middle(victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = write._fitting
    monkeypatch.setattr(write, "_fitting", lambda *given: (cut_off(victim.with_name("data"), victim), real(*given))[1])
    with pytest.raises(UnsafeModelError, match="changed since"):
        fold(victim, victim.parent / "out.onnx")
    assert sorted(os.listdir(victim.parent)) == ["data", "model.onnx"]


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
    real, sizes = runtime_sessions.prepare, list[int]()
    monkeypatch.setattr(runtime_sessions, "prepare", lambda data, *rest: sizes.append(len(data)) or real(data, *rest))
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
    assert [size > WEIGHT.nbytes for size in sizes] == ([False] * 2 if large else [False, True, True, True])


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
