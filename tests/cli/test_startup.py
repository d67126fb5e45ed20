"""What `bnexport.startup` does to the process of a command, and to no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.cli.conftest import NET
from tests.support.onnx_text import model


def run(code: str, *arguments: str | Path) -> list[str]:
    """The lines that a process of its own prints."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    onnx.save(model(NET), tmp_path / "source.onnx")
    return tmp_path / "source.onnx"


def test_a_fold_loads_nothing_that_it_does_not_need(source: Path, tmp_path: Path) -> None:
    code = """
import atexit, sys
unwanted = ("sympy.", "onnxscript", "onnx.reference", "bnexport.verification.api", "bnexport.verification.process")
atexit.register(lambda: print([name for name in sys.modules if name.startswith(unwanted)]))
from bnexport.cli import main
sys.argv[1:] = ["fold", *sys.argv[1:], "--no-verify"]
main()
"""
    assert run(code, source, tmp_path / "target.onnx")[-1] == "[]"
    assert (tmp_path / "target.onnx").exists()


def test_a_fold_needs_no_extra(source: Path, tmp_path: Path) -> None:
    code = """
import sys
sys.modules.update(dict.fromkeys(("torch", "onnxscript", "safetensors", "onnxruntime")))
from bnexport.cli import main
print(main(["fold", *sys.argv[1:]]))
"""
    assert run(code, source, tmp_path / "target.onnx")[-1] == "0"


def test_symbolic_sizes_still_work() -> None:
    code = """
from bnexport import startup
startup.prepare()
import onnx_ir, sys
before = any(name.startswith("sympy.") for name in sys.modules)
size = onnx_ir.SymbolicDim("N")
print(before, size + 1, onnx_ir.SymbolicDim("2*N") - size)
from sympy import Symbol
print(Symbol("x") + 1)
"""
    assert run(code) == ["False N + 1 N", "x + 1"]


def test_the_library_changes_nothing() -> None:
    code = """
import gc, sys
before = [*sys.meta_path, gc.get_threshold()]
import bnexport.cli, bnexport.folding.api
bnexport.cli.main(["--version"])
bnexport.startup.settle()
print([*sys.meta_path, gc.get_threshold()] == before, gc.get_freeze_count(), "sympy.core" in sys.modules)
"""
    assert run(code)[-1] == "True 0 True"


# What takes a tenth of a second and more to import, and what an answer may have of it.
SLOW = ("numpy", "onnx", "onnx_ir", "onnxruntime", "torch")
QUICK = {"--help": "", "export --help": "", "fold": "", "export m:f m.onnx -i x=1,3": "", "doctor": "numpy onnxruntime"}


@pytest.mark.parametrize("line", QUICK)
def test_quick_answers_import_nothing_slow(line: str) -> None:
    code = f"""
import sys
from bnexport.cli import main
main(sys.argv[1:])
print('imported', *(name for name in {SLOW!r} if name in sys.modules))
"""
    assert run(code, *line.split())[-1].split()[1:] == QUICK[line].split()
