"""Processes of a command: closed pipes and streams, interrupts, and what a start imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.cli.conftest import NET
from tests.support import warm
from tests.support.onnx_text import model


def with_a_closed_pipe(*arguments, stderr=None):
    """A command whose stdout is a pipe that nobody reads any more; its stderr goes there too where None."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        process = warm.start("-m", "bnexport", *map(str, arguments), stdout=writer, stderr=stderr or writer)
        text = process.stderr.read().decode() if stderr is not None else ""
        return process.wait(120), text
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "arguments",
    [["inspect", "{0}/kept.onnx"], ["inspect", "{0}/kept.onnx", "--json", "-"], ["--help"], ["run", "--help"]],
    ids=" ".join,
)
def test_a_reader_that_left_is_141_and_no_message(arguments, small_files):
    arguments = [argument.format(small_files) for argument in arguments]
    assert with_a_closed_pipe(*arguments, stderr=warm.subprocess.PIPE) == (141, "")


def test_messages_come_before_the_table_that_nobody_reads(small_files, tmp_path):
    code, text = with_a_closed_pipe("fold", small_files / "kept.onnx", tmp_path / "f.onnx", stderr=warm.subprocess.PIPE)
    assert code == 141
    assert "3 of 3 batch norms folded" in text and "verification passed" in text
    assert [path.name for path in tmp_path.iterdir()] == ["f.onnx"]


def test_an_error_that_nobody_reads(small_files):
    assert with_a_closed_pipe("inspect", small_files / "gone.onnx") == (141, "")


CLOSED = """
import os, sys
for descriptor in ({},):
    os.close(descriptor)
os.execv(sys.executable, [sys.executable, "-m", "bnexport", *sys.argv[1:]])
"""


@pytest.mark.parametrize("closed", ["0", "1", "0, 1, 2"])
def test_closed_standard_streams(closed, small_files, tmp_path):
    done = warm.run("-c", CLOSED.format(closed), "inspect", small_files / "kept.onnx", "--json", tmp_path / "r.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "r.json").stat().st_size


@pytest.mark.parametrize("before", [None, b"old"])
def test_an_interrupted_fold_leaves_the_file(before, small_files, tmp_path, monkeypatch, call):
    target = tmp_path / "f.onnx"
    if before is not None:
        target.write_bytes(before)
    monkeypatch.setattr("bnexport.folding.fold", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    _, _, err = call("fold", small_files / "kept.onnx", target, "--overwrite", code=130)
    assert err == "error: interrupted; files are as they were, or complete\n"
    assert (target.read_bytes() if target.exists() else None) == before


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
