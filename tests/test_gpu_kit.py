"""The kit for a GPU (benchmarks/gpu): what it imports, and a rehearsal of it on an emulated device."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KIT = ["benchmarks/gpu/*.py", "benchmarks/*records.py", "tests/campaign/[!t]*.py", "tests/campaign/table.py"]
WITHOUT_TORCH = {"bare", "expected", "onnx_bytes", "tools", "kit"}
PACKAGES = ("torch==2.13.0", "onnxruntime==1.30.0", "numpy==2.4.*")


@pytest.mark.parametrize("file", [file for part in KIT for file in sorted(ROOT.glob(part))], ids=lambda file: file.stem)
def test_the_kit_needs_torch_numpy_and_onnxruntime_alone(file: Path) -> None:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    tops = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert tops <= {"torch", "numpy", "onnxruntime", "bnexport", "benchmarks", "tests"}
    assert "torch" not in tops or file.stem not in WITHOUT_TORCH


def rehearse(python: str | Path, folder: Path, *arguments: str) -> tuple[int, dict[str, dict[str, object]]]:
    """The exit code and the rows."""
    # Not onnx, which the kit does without.
    program = (
        "import runpy, sys\n"
        "sys.modules |= dict.fromkeys(['onnx', 'onnx_ir', 'onnxscript', 'ml_dtypes', 'typer', 'rich', 'safetensors'])\n"
        "sys.argv[0] = 'campaign'\nrunpy.run_module('tests.campaign', run_name='__main__')\n"
    )
    rows = folder / "rows.json"
    command = [str(python), "-c", program, "gpu", "--results", str(rows), *arguments]
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("BNEXPORT", "PYTHON"))}
    variables |= {"BNEXPORT_KIT_REHEARSAL": "1", "PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert rows.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(rows.read_text())


TOOLS = {
    "compute-sanitizer": 'while [ "$1" != "--error-exitcode" ]; do shift; done; shift 2; '
    '"$@" && echo "========= ERROR SUMMARY: 0 errors"',
    "ncu": 'while [ "$1" != "--metrics" ]; do shift; done; shift 2; "$@" >/dev/null || exit 1\n'
    'echo \'"ID","Kernel Name","Grid Size","Metric Name","Metric Unit","Metric Value"\'\n'
    'echo \'"0","moments","(1, 1, 1)","gpu__time_duration.sum","nsecond","1,000"\'',
}


@pytest.mark.slow
def test_a_rehearsal_in_a_bare_environment(tmp_path: Path) -> None:
    python = tmp_path / "environment/bin/python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "environment")], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "-q", *PACKAGES], check=True)
    # Here the library is installed; the environment without it takes what is built.
    assert rehearse(sys.executable, tmp_path, "--only", "^build")[0] == 0
    for name, text in TOOLS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    code, rows = rehearse(python, tmp_path)
    assert code == 0 and len(rows) > 70
    assert {row["status"] for row in rows.values()} == {"right", "measured", "not run"}
    assert {name.partition(":")[0] for name, row in rows.items() if row["status"] == "not run"} == {
        "verify", "bench", "torch", "ort",
    }  # fmt: skip
