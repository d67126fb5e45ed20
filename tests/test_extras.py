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


def test_every_python_is_named_and_no_other() -> None:
    assert PROJECT["requires-python"] == ">=3.10,<3.15"
    minors = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each]
    assert minors == ["3.10", "3.11", "3.12", "3.13", "3.14"]


def test_the_base_needs_no_torch_and_no_engine() -> None:
    assert not {"torch", "onnxscript", "onnxruntime", "onnxruntime-gpu"} & set(names(PROJECT["dependencies"]))


@pytest.mark.parametrize(
    "package", [*interface.REQUIRED, *(name for each in interface.EXTRAS.values() for name in each)]
)
def test_advice_names_the_package(package: str) -> None:
    assert f"pip install {package}" in str(interface.missing(package))


def test_an_unknown_package_has_no_advice() -> None:
    assert interface.advice("nonsense") is None


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


def test_an_error_of_another_module_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bnexport._HOMES, "nonsense", "not_there")
    with pytest.raises(ModuleNotFoundError, match=r"bnexport\.not_there"):
        _ = bnexport.nonsense


class Installed:
    """Versions of the packages that are said to be installed; all others are missing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
        self.versions = dict.fromkeys(interface.REQUIRED, "1.0") | versions
        monkeypatch.setattr(importlib.metadata, "version", self.version)

    def version(self, name: str) -> str:
        if name not in self.versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return self.versions[name]

    def checks(self) -> dict[str, doctor.Check]:
        return {check.name: check for check in doctor.examine()}


def test_the_base_installation_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    checks = Installed(monkeypatch).checks()
    assert [name for name, check in checks.items() if check.ok is False] == []
    for name in ("torch", "onnxscript", "safetensors", "onnxruntime"):
        assert checks[name].ok is None and "pip install" in checks[name].value
    assert checks["onnx_ir"].value == "1.0"


def test_a_missing_required_package_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Installed(monkeypatch)
    del installed.versions["onnx-ir"]
    check = installed.checks()["onnx_ir"]
    assert (check.ok, check.value) == (False, "missing: pip install onnx-ir, or install bnexport again")


def test_torch_asks_for_the_rest_of_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Installed(monkeypatch, torch="2.13.0", safetensors="0.8").checks()
    assert [name for name, check in checks.items() if check.ok is False] == ["onnxscript"]
    assert checks["onnxscript"].value == "missing: pip install onnxscript (extra [torch])"


def test_two_packages_of_onnxruntime_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.0"}
    check = Installed(monkeypatch, **versions).checks()["onnxruntime"]
    assert check.ok is False
    assert check.value == (
        "onnxruntime 1.31.1 and onnxruntime-gpu 1.31.0 are installed and overwrite each other's files; "
        "pip uninstall onnxruntime onnxruntime-gpu, then install one of them"
    )


def test_onnxruntime_gpu_alone_is_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    check = Installed(monkeypatch, **{"onnxruntime-gpu": "1.31.0"}).checks()["onnxruntime"]
    assert (check.ok, check.value) == (True, "1.31.0")


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
