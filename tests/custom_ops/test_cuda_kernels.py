"""The CUDA kernels on an emulated device (tests/cpp/cuda), under sanitizers; `make test-cpp` runs them without."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests/cpp/cuda"
PLAN = ROOT / "custom_ops/kernels/cuda/launch_plan.cpp"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def build(folder: Path, sources: list[Path], *options: str) -> Path:
    program = folder / sources[0].stem
    includes = [f"-I{TESTS}", f"-I{ROOT / 'custom_ops/include'}"]
    flags = ["-std=gnu++17", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", *options]
    subprocess.run([str(COMPILER), *flags, *includes, *map(str, sources), "-o", str(program)], check=True)
    return program


@pytest.mark.slow
def test_kernels_on_an_emulated_device_sanitized(tmp_path):
    sanitize = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    program = build(tmp_path, [TESTS / "test_cuda_kernels.cpp", TESTS / "emulator.cpp", PLAN], *sanitize)
    result = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert "cuda kernels on the host: ok" in result.stdout, result.stderr
