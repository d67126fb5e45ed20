"""Files that change between the check and the use: what is read is what was checked, or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bnexport import verify
from bnexport.errors import UnsafeModelError, UsageError
from bnexport.exporting import against_file
from bnexport.folding import fold
from bnexport.model_io import as_model, load, save, stage, write
from bnexport.runtime import engine
from tests.malicious.attempts import SECRET, WEIGHT, example

Change = Callable[[Path, Path], None]


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
