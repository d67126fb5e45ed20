"""Registers, stack and spills of every CUDA kernel, from `nvcc -Xptxas -v`; needs nvcc, no GPU.

python benchmarks/cuda_registers.py [--architecture 90]
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORT = re.compile(
    r"Compiling entry function '(\S+)'.*?\n.*?\n\s+(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads\n.*?Used (\d+) registers"
)


def short_name(mangled: str) -> str:
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout
    return re.sub(r"bnexport::cuda::|\(anonymous namespace\)::|^void |\([^(]*\n", "", name).replace("> >", ">>")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", default="90")
    target = parser.parse_args().architecture
    if shutil.which("nvcc") is None:
        print("nvcc is not on PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 4
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "nvcc", "-std=c++17", "-O3", f"-gencode=arch=compute_{target},code=sm_{target}", "-Xptxas", "-v",
            f"-I{ROOT / 'custom_ops/include'}", f"-I{ROOT / 'custom_ops/kernels/cuda/nvcc'}",
            "-c", str(ROOT / "custom_ops/kernels/cuda/kernels.cu"), "-o", f"{folder}/kernels.o",
        ]  # fmt: skip
        log = subprocess.run(command, capture_output=True, text=True, check=False)
    if log.returncode != 0:
        print(log.stderr, file=sys.stderr)
        return 1
    rows = sorted((short_name(m[1]), *map(int, m.groups()[1:])) for m in REPORT.finditer(log.stderr))
    print(f"sm_{target}\n\n| kernel | registers | stack bytes | spilled bytes |\n|---|---:|---:|---:|")
    for name, stack, stored, loaded, registers in rows:
        print(f"| `{name}` | {registers} | {stack} | {stored + loaded} |")
    spilled = [name for name, _, stored, loaded, _ in rows if stored + loaded > 0]
    print(f"\n{len(rows)} kernels, {len(spilled)} with spills")
    return 1 if spilled or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
