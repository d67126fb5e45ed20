"""Files that change between the check and the use: what is read is what was checked, or nothing."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from bnexport import verify
from bnexport.errors import UnsafeModelError, UsageError
from bnexport.folding import fold
from bnexport.model_io import as_model, load, save, stage
from bnexport.runtime import engine
from tests.malicious.attempts import SECRET, WEIGHT, example


def replace_by_another_file(victim: Path) -> None:
    (victim.parent / "data").rename(victim.parent / "old")
    (victim.parent / "data").write_bytes(bytes(WEIGHT.nbytes))


def replace_by_a_link(victim: Path) -> None:
    (victim.parent / "data").unlink()
    (victim.parent / "data").symlink_to(victim.parent.parent / "secret")


def replace_by_a_hard_link(victim: Path) -> None:
    (victim.parent / "data").unlink()
    os.link(victim.parent.parent / "secret", victim.parent / "data")


def cut_off(victim: Path) -> None:
    os.truncate(victim.parent / "data", 100)


def overwrite(victim: Path) -> None:
    (victim.parent / "data").write_bytes(SECRET[: WEIGHT.nbytes])
    os.utime(victim.parent / "data", ns=(1, 1))


CHANGES = [replace_by_another_file, replace_by_a_link, replace_by_a_hard_link, cut_off, overwrite]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_between_loading_and_reading(change: object, victim: Path) -> None:
    loaded = load(victim)
    change(victim)  # type: ignore[operator]
    with pytest.raises(UnsafeModelError):
        loaded.graph.initializers["w"].const_value.numpy()  # type: ignore[union-attr]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_between_loading_and_writing(change: object, victim: Path) -> None:
    loaded = load(victim)
    change(victim)  # type: ignore[operator]
    with pytest.raises(UnsafeModelError):
        save(loaded, victim.parent / "out.onnx")
    assert not (victim.parent / "out.onnx").exists()


@pytest.mark.parametrize("change", [replace_by_a_link, replace_by_a_hard_link], ids=lambda change: change.__name__)
def test_between_the_check_and_onnxruntime(change: object, victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime is given bytes, never a path that it would open again."""
    real = engine.model_io.load

    def load_and_change(path: Path) -> object:
        model = real(path)
        change(victim)  # type: ignore[operator]
        return model

    monkeypatch.setattr(engine.model_io, "load", load_and_change)
    with pytest.raises(UnsafeModelError):
        engine.run(victim, {"x": np.ones((1, 64), np.float32)})


def test_between_the_check_and_verification(victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bnexport.exporting import against_file as comparing

    real = comparing.open_source

    def open_and_change(source: object, **options: object) -> object:
        opened = real(source, **options)  # type: ignore[arg-type]
        replace_by_a_link(victim)
        return opened

    monkeypatch.setattr(comparing, "open_source", open_and_change)
    with pytest.raises(UnsafeModelError):
        verify(victim, victim)


def test_a_link_put_in_place_of_the_output(victim: Path) -> None:
    """GHSA-q56x-g2fj-4rj6: a name is replaced between the check and the writing. A rename writes through no link."""
    staged = stage(as_model(example()), victim.parent / "out.onnx", external_data=True)
    (victim.parent / "out.onnx").symlink_to(victim.parent.parent / "secret")
    (victim.parent / "out.onnx.data").symlink_to(victim.parent.parent / "secret")
    with pytest.raises(UsageError, match="another run"):
        staged.commit()
    staged.discard()
    assert (victim.parent.parent / "secret").read_bytes() == SECRET
    (victim.parent / "out.onnx.data").unlink()
    staged = stage(as_model(example()), victim.parent / "other.onnx", external_data=True)
    (victim.parent / "other.onnx").symlink_to(victim.parent.parent / "secret")
    staged.commit()
    assert (victim.parent.parent / "secret").read_bytes() == SECRET
    assert not (victim.parent / "other.onnx").is_symlink()


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
    from bnexport.model_io import write

    real = write._fitting

    def change_and_fit(*arguments: object) -> object:
        cut_off(victim)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(write, "_fitting", change_and_fit)
    with pytest.raises(UnsafeModelError, match="changed since"):
        fold(victim, victim.parent / "out.onnx")
    assert sorted(os.listdir(victim.parent)) == ["data", "model.onnx"]
