"""tests/cpp/inner_loops.py, which the C++ tests run over the kernels' object files, on kernels of a few lines."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "cpp" / "inner_loops.py"

# A vector of twice the register's size lives in memory, and so do more sums than there are registers.
KERNEL = """
namespace bnexport { namespace cpu { namespace {
typedef float Vector __attribute__((vector_size(BYTES)));
template <long rows> __attribute__((noinline)) void tile(const float* from, long count, float* to) {
  Vector sums[SUMS] = {};
  for (long i = 0; i < count; ++i) {
    #pragma GCC unroll 20
    for (int k = 0; k < SUMS; ++k) {
      Vector value;
      __builtin_memcpy(&value, from + (i * SUMS + k) * (BYTES / 4), BYTES);
      sums[k] += value * value;
    }
  }
  __builtin_memcpy(to, sums, sizeof(sums));
}
} } }
void call(const float* from, long count, float* to) { bnexport::cpu::tile<3>(from, count, to); }
"""


@pytest.fixture
def check(tmp_path):
    compiler, objdump = shutil.which("g++"), shutil.which("objdump")
    if platform.machine() != "x86_64" or compiler is None or objdump is None:
        pytest.skip("needs g++ and objdump for x86-64")

    def run(size: int, sums: int) -> tuple[bool, str]:
        (tmp_path / "kernel.cpp").write_text(KERNEL)
        flags = ["-O3", "-mavx2", "-mfma", "-Wno-psabi", f"-DBYTES={size}", f"-DSUMS={sums}"]
        subprocess.run([compiler, *flags, "-c", "kernel.cpp", "-o", "kernel.o"], cwd=tmp_path, check=True)
        done = subprocess.run(
            [sys.executable, SCRIPT, objdump, "avx2", "kernel.o"],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        # The other kernels are missing, and this one is not.
        assert done.returncode == 1 and "pivot_sums<Float32>: no vector loop" in done.stderr
        assert "tile: no vector loop" not in done.stderr
        return "on the stack" in done.stderr, done.stdout + done.stderr

    return run


@pytest.mark.parametrize(("size", "sums", "spills"), [(32, 4, False), (32, 12, False), (32, 20, True), (64, 4, True)])
def test_vectors_on_the_stack_are_found(check, size, sums, spills):
    found, output = check(size, sums)
    assert found is spills, output
