"""make setup and the build say in one line what is missing, and what they do while they do it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CMAKE = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")

# A Python of any version, with a pip of any version, which installs nothing in PIP_SECONDS.
PYTHON = """#!/bin/sh
case "$*" in
  --version) echo Python {python} ;;
  *"import pip"*) exit {pip_is_old} ;;
  *version_info*) exit {python_is_wrong} ;;
  *"-m pip"*) sleep {seconds}; echo "$*" >> "{log}" ;;
  *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
esac
"""


def set_up(folder: Path, *, compiler: bool = True, **facts: object) -> subprocess.CompletedProcess[str]:
    """Run a copy of tools/setup.sh with a made-up Python."""
    (folder / "tools").mkdir()
    (folder / "bin").mkdir()
    shutil.copy(ROOT / "tools/setup.sh", folder / "tools")
    known = {"python": "3.12.1", "pip_is_old": 0, "python_is_wrong": 0, "seconds": 0, "log": folder / "log"}
    python = folder / "bin/python"
    python.write_text(PYTHON.format(**(known | facts)))
    python.chmod(0o755)
    for tool in ("bash", "sh", "dirname", "head", "sleep", "cp", "mkdir", *(["c++"] if compiler else [])):
        (folder / "bin" / tool).symlink_to(str(shutil.which(tool) or shutil.which("true")))
    return subprocess.run(
        [folder / "tools/setup.sh", python, "build/library"],
        env={"PATH": str(folder / "bin"), "BNEXPORT_BEAT": "0.2"},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_each_step_is_named_and_tells_that_it_goes_on(tmp_path: Path) -> None:
    done = set_up(tmp_path, seconds=0.5)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["setup: checking Python, compiler and pip", "setup: creating .venv"] and lines[-1].startswith(
        "setup: done after"
    )
    for text in ("installing PyTorch, CMake and Ninja", "installing the other packages and compiling the library"):
        assert [line for line in lines if line.startswith(f"setup: {text} (")], done.stdout
    assert "-e .[demo,dev]" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"python": "3.9.18", "python_is_wrong": 1}, "is Python 3.9.18, expected Python 3.10 to 3.14: remove .venv"),
        ({"compiler": False}, "no C++ compiler: install one (apt install g++, dnf install gcc-c++) or set CXX"),
        ({"pip_is_old": 1}, "pip is too old: .venv/bin/python -m pip install --upgrade pip"),
    ],
    ids=["python", "compiler", "pip"],
)
def test_what_is_missing_is_one_line(tmp_path: Path, facts: dict, line: str) -> None:
    done = set_up(tmp_path, **facts)
    assert done.returncode == 1
    assert done.stderr.startswith("make setup: ") and done.stderr.count("\n") == 1
    assert line in done.stderr
    assert not (tmp_path / "log").exists()


def test_a_step_that_fails_ends_the_set_up(tmp_path: Path) -> None:
    done = set_up(tmp_path, seconds="0; exit 3")
    assert done.returncode == 1
    assert done.stderr == "make setup: this failed: installing PyTorch, CMake and Ninja\n"


def test_the_script_takes_the_versions_of_the_metadata() -> None:
    metadata = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert metadata
    least, most = int(metadata[1]), int(metadata[2]) - 1
    script = (ROOT / "tools/setup.sh").read_text()
    check = re.search(r"sys\.exit\((not .* sys\.version_info .*)\)'", script)
    assert check and f"expected Python 3.{least} to 3.{most}:" in script
    for minor in range(least - 1, most + 2):
        refused = eval(check[1], {"sys": types.SimpleNamespace(version_info=(3, minor, 1))})
        assert refused == (not least <= minor <= most), minor


def test_every_pin_holds_for_one_version_of_python_at_a_time() -> None:
    requirements = pytest.importorskip("packaging.requirements")
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = [requirements.Requirement(line) for line in lines]
    for python in ("3.10", "3.11", "3.14"):
        names = [pin.name for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": python})]
        assert sorted(names) == sorted({pin.name for pin in pins}), python


@pytest.mark.skipif(CMAKE is None, reason="needs CMake")
def test_a_build_without_a_compiler_says_what_to_install(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(CMAKE), "-S", str(ROOT), "-B", str(tmp_path / "build")],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert "no C++ compiler: install one (apt install g++, dnf install gcc-c++)" in " ".join(done.stderr.split())
