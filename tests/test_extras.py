"""Dependencies: the lists in the code are those of pyproject.toml, and a missing package has one line of advice."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bnexport
from bnexport import interface
from bnexport.cli import doctor
from bnexport.errors import MissingDependencyError
from bnexport.runtime import sessions
from tests.support import warm

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads pyproject.toml")
PROJECT: dict[str, Any] = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> tuple[str, ...]:
    return tuple(re.split(r"[^\w-]", each)[0] for each in requirements)


def test_the_lists_are_those_of_pyproject() -> None:
    assert names(PROJECT["dependencies"]) == interface.REQUIRED
    declared = {name: names(each) for name, each in PROJECT["optional-dependencies"].items()}
    assert {name: declared[name] for name in interface.EXTRAS} == interface.EXTRAS


def test_every_python_is_named_and_the_base_needs_no_torch_and_no_engine() -> None:
    assert PROJECT["requires-python"] == ">=3.10,<3.15"
    minors = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each]
    assert minors == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    assert not {"torch", "onnxscript", "onnxruntime", "onnxruntime-gpu"} & set(names(PROJECT["dependencies"]))


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
    checks = {check.name: check for check in doctor.examine()}
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
