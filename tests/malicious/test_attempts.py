"""Every attempt through the command line: refused in one line with exit code 3, or handled; nothing leaks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bnexport.cli import main
from bnexport.errors import UnsafeModelError
from bnexport.model_io import Limits, load
from bnexport.runtime.sessions import InferenceSession
from tests.malicious.attempts import ATTEMPTS, HANDLED, SECRET, Attempt

# Those of reading; the ones of writing and of races are in test_output.py and test_races.py.
PUBLISHED = {
    *("CVE-2022-25882", "CVE-2024-27318", "CVE-2024-27319", "CVE-2024-5187", "CVE-2025-4565"),
    *("CVE-2026-0994", "CVE-2026-27489", "CVE-2026-34445", "CVE-2026-34446", "CVE-2026-34447"),
}


def test_numbers_are_used_once_and_published_weaknesses_have_attempts() -> None:
    numbers = [attempt.number for attempt in ATTEMPTS]
    assert len(set(numbers)) == len(numbers)
    assert {name for name in PUBLISHED if not any(name in attempt.source for attempt in ATTEMPTS)} == set()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "victim").mkdir()
    return tmp_path / "victim"


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.id)
def test_attempt(attempt: Attempt, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = attempt.build(folder)
    target = folder / "out.onnx"
    before = sorted(os.listdir(folder))
    for command in (["inspect", str(path)], ["fold", str(path), str(target), "--no-verify"], ["run", str(path)]):
        capfd.readouterr()
        code = main(command)
        out, err = capfd.readouterr()
        assert SECRET[:20].decode() not in out + err
        assert all(line.isprintable() for line in err.splitlines())
        if attempt.verdict is HANDLED:
            # ONNX Runtime may refuse to run what is harmless to read.
            assert code in (0, 2, 3)
            assert command[0] == "run" or code == 0, err
        else:
            assert code == attempt.verdict.exit_code, err
            assert len(err.strip().splitlines()) == 1
            assert err.strip().isprintable()
    if attempt.verdict is not HANDLED:
        with pytest.raises(attempt.verdict) as caught:
            load(path)
        assert type(caught.value) is attempt.verdict
        with pytest.raises(attempt.verdict):
            InferenceSession(path)
        assert sorted(os.listdir(folder)) == before
    assert (folder.parent / "secret").read_bytes() == SECRET
    for name in os.listdir(folder):
        if name.startswith("out.onnx"):
            assert SECRET[:100] not in (folder / name).read_bytes()


@pytest.mark.parametrize("number", [120, 122, 123])
def test_not_even_linked_out_by_request(number: int, folder: Path) -> None:
    """allow_links opens links inside the folder's tree only."""
    path = next(attempt for attempt in ATTEMPTS if attempt.number == number).build(folder)
    with pytest.raises(UnsafeModelError):
        load(path, limits=Limits(allow_links=True))
    assert main(["inspect", str(path), "--limit", "allow_links=yes"]) == 3
