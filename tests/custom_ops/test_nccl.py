"""The NCCL communicator without a GPU: tests/cpp/test_nccl.cpp, compiled and run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CPP = Path(__file__).parents[1] / "cpp"


@pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="needs g++ on Linux")
def test_groups_over_nccl(tmp_path: Path) -> None:
    compiler = ["g++", "-std=gnu++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{CPP / 'fake_cuda'}"]
    library, program = str(tmp_path / "libfake_nccl.so"), str(tmp_path / "test_nccl")
    subprocess.run([*compiler, "-shared", "-fPIC", str(CPP / "fake_nccl.cpp"), "-o", library], check=True)
    sources = [str(CPP / "test_nccl.cpp"), str(CPP.parents[1] / "custom_ops/comm/nccl.cpp")]
    subprocess.run([*compiler, *sources, "-pthread", "-ldl", "-o", program], check=True)
    done = subprocess.run([program, library], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "nccl: ok\n"
