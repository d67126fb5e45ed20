"""make setup and the build say in one line what is missing, and what they do while they do it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CMAKE = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")

needs_cmake = pytest.mark.skipif(CMAKE is None, reason="needs CMake")

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


@needs_cmake
def test_a_build_without_a_compiler_says_what_to_install(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(CMAKE), "-S", str(ROOT), "-B", str(tmp_path / "build")],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert "no C++ compiler: install one (apt install g++, dnf install gcc-c++)" in " ".join(done.stderr.split())


# What the build does with the nvcc that it finds: an old or broken one never fails an installation.
DEFAULT = "75;80;86;89;90;100;120"


def targets(version: str, wanted: str) -> tuple[str, str]:
    """What nvcc `version` compiles for of `wanted`, and what it does not know."""
    script = (
        f'include("{ROOT}/cmake/cuda_targets.cmake")\n'
        f'bnexport_cuda_targets({version} "{wanted}" known dropped)\n'
        'message(STATUS "[${known}|${dropped}]")\n'
    )
    done = subprocess.run(
        [str(CMAKE), "-P", "/dev/stdin"], input=script, capture_output=True, text=True, check=True, timeout=60
    )
    known, dropped = done.stdout.partition("[")[2].partition("]")[0].split("|")
    return known, dropped


TARGETS = [
    ("11.8", DEFAULT, "75;80;86;89;90", "100;120"),
    ("12.6", DEFAULT, "75;80;86;89;90", "100;120"),
    ("12.8", DEFAULT, DEFAULT, ""),
    ("13.0", DEFAULT, DEFAULT, ""),
    ("12.9", "70;103;110;121", "70;103;121", "110"),
    ("13.0", "70;103;110;121", "103;110;121", "70"),
    ("13.0", "52;999;native", "", "52;999;native"),
]


@needs_cmake
@pytest.mark.parametrize(("version", "wanted", "known", "dropped"), TARGETS)
def test_targets_that_an_nvcc_does_not_know_are_dropped(version: str, wanted: str, known: str, dropped: str) -> None:
    assert targets(version, wanted) == (known, dropped)


def configure(folder: Path, nvcc: str, cuda: str = "AUTO") -> subprocess.CompletedProcess[str]:
    """Configures the project with an nvcc that prints `nvcc` as its version and compiles nothing."""
    program = folder / "nvcc"
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{nvcc}" && exit 0\nexit 1\n')
    program.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA", "CMAKE"))}
    environment |= {"PATH": f"{folder}:/usr/bin:/bin", "CUDACXX": str(program)}
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    command = [str(CMAKE), "-S", str(ROOT), "-B", str(folder / "build"), f"-DBNEXPORT_CUDA={cuda}"]
    if ninja is not None:
        command += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


@needs_cmake
@pytest.mark.parametrize(
    ("nvcc", "reason"),
    [
        ("Cuda compilation tools, release 11.2, V11.2.152", "nvcc is 11.2: it needs 11.8 or newer"),
        ("Cuda compilation tools, release 12.6, V12.6.85", "nvcc 12.6 cannot compile"),
        ("something else", "no nvcc was found"),
    ],
    ids=["old", "broken", "no-version"],
)
def test_an_installation_goes_on_without_the_cuda_library(tmp_path: Path, nvcc: str, reason: str) -> None:
    done = configure(tmp_path, nvcc)
    assert done.returncode == 0, done.stderr
    assert f"CUDA library: left out, {reason}" in done.stdout
    if "12.6" in nvcc:
        assert "nvcc 12.6 does not know 100;120 of BNEXPORT_CUDA_ARCHITECTURES" in done.stdout


@needs_cmake
def test_who_insists_gets_the_reason(tmp_path: Path) -> None:
    done = configure(tmp_path, "Cuda compilation tools, release 11.2, V11.2.152", "ON")
    assert done.returncode != 0
    assert "BNEXPORT_CUDA=ON: nvcc is 11.2" in " ".join(done.stderr.split())


@pytest.mark.cpp
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_compiler_keeps_the_waits(tmp_path: Path) -> None:
    """What the emulated device cannot show, in the PTX of every kernel: nothing is read or written before the wait for the
    kernel before.
    """
    source, ptx = ROOT / "custom_ops/kernels/cuda/kernels.cu", tmp_path / "kernels.ptx"
    includes = [f"-I{ROOT / 'custom_ops/include'}", f"-I{source.parent / 'nvcc'}"]
    subprocess.run(
        ["nvcc", "-std=c++17", "-O3", "-ptx", "-arch=compute_90", *includes, str(source), "-o", str(ptx)], check=True
    )
    bodies = ptx.read_text().split(".visible .entry ")[1:]
    assert len(bodies) == 4 * (10 + 7) + 2  # four kernels, places in rows and in columns; two for channels
    for body in bodies:
        name = body.partition("(")[0]
        assert "ld.global.nc" not in body, name  # a kernel may write to what it reads (y == x)
        assert not re.search(r"\b(membar|atom|red)\.", body), name
        is_first, is_last = (
            any(kind in name for kind in kinds) for kinds in (("7moments", "4sums"), ("9normalise", "8gradient"))
        )
        assert body.count("griddepcontrol.launch_dependents") == (not is_last), name
        assert body.count("griddepcontrol.wait") == (not is_first), name
        if not is_first:
            assert not re.search(r"\b(ld|st)\.global", body.partition("griddepcontrol.wait")[0]), name
