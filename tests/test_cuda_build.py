"""What the build does with the nvcc that it finds: an old or broken one never fails an installation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CMAKE = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
DEFAULT = "75;80;86;89;90;100;120"

pytestmark = pytest.mark.skipif(CMAKE is None, reason="needs CMake")


def targets(version: str, wanted: str) -> tuple[str, str]:
    """What nvcc `version` compiles for of `wanted`, and what it does not know."""
    script = (
        f'include("{ROOT}/cmake/cuda_targets.cmake")\n'
        f'bnexport_cuda_targets({version} "{wanted}" known dropped)\n'
        'message(STATUS "[${known}|${dropped}]")\n'
    )
    done = subprocess.run(
        [str(CMAKE), "-P", "/dev/stdin"], input=script, capture_output=True, text=True, check=True, timeout=60
    )
    known, dropped = done.stdout.partition("[")[2].partition("]")[0].split("|")
    return known, dropped


TARGETS = [
    ("11.8", DEFAULT, "75;80;86;89;90", "100;120"),
    ("12.6", DEFAULT, "75;80;86;89;90", "100;120"),
    ("12.8", DEFAULT, DEFAULT, ""),
    ("13.0", DEFAULT, DEFAULT, ""),
    ("12.9", "70;103;110;121", "70;103;121", "110"),
    ("13.0", "70;103;110;121", "103;110;121", "70"),
    ("13.0", "52;999;native", "", "52;999;native"),
]


@pytest.mark.parametrize(("version", "wanted", "known", "dropped"), TARGETS)
def test_targets_that_an_nvcc_does_not_know_are_dropped(version: str, wanted: str, known: str, dropped: str) -> None:
    assert targets(version, wanted) == (known, dropped)


def configure(folder: Path, nvcc: str, cuda: str = "AUTO") -> subprocess.CompletedProcess[str]:
    """Configures the project with an nvcc that prints `nvcc` as its version and compiles nothing."""
    program = folder / "nvcc"
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{nvcc}" && exit 0\nexit 1\n')
    program.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA", "CMAKE"))}
    environment |= {"PATH": f"{folder}:/usr/bin:/bin", "CUDACXX": str(program)}
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    command = [str(CMAKE), "-S", str(ROOT), "-B", str(folder / "build"), f"-DBNEXPORT_CUDA={cuda}"]
    if ninja is not None:
        command += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("nvcc", "reason"),
    [
        ("Cuda compilation tools, release 11.2, V11.2.152", "nvcc is 11.2: it needs 11.8 or newer"),
        ("Cuda compilation tools, release 12.6, V12.6.85", "nvcc 12.6 cannot compile"),
        ("something else", "no nvcc was found"),
    ],
    ids=["old", "broken", "no-version"],
)
def test_an_installation_goes_on_without_the_cuda_library(tmp_path: Path, nvcc: str, reason: str) -> None:
    done = configure(tmp_path, nvcc)
    assert done.returncode == 0, done.stderr
    assert f"CUDA library: left out, {reason}" in done.stdout
    if "12.6" in nvcc:
        assert "nvcc 12.6 does not know 100;120 of BNEXPORT_CUDA_ARCHITECTURES" in done.stdout


def test_who_insists_gets_the_reason(tmp_path: Path) -> None:
    done = configure(tmp_path, "Cuda compilation tools, release 11.2, V11.2.152", "ON")
    assert done.returncode != 0
    assert "BNEXPORT_CUDA=ON: nvcc is 11.2" in " ".join(done.stderr.split())


@pytest.mark.cpp
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_compiler_keeps_the_waits(tmp_path: Path) -> None:
    """What the emulated device cannot show, in the PTX of every kernel: nothing is read or written before the wait for the
    kernel before.
    """
    source, ptx = ROOT / "custom_ops/kernels/cuda/kernels.cu", tmp_path / "kernels.ptx"
    includes = [f"-I{ROOT / 'custom_ops/include'}", f"-I{source.parent / 'nvcc'}"]
    subprocess.run(
        ["nvcc", "-std=c++17", "-O3", "-ptx", "-arch=compute_90", *includes, str(source), "-o", str(ptx)], check=True
    )
    bodies = ptx.read_text().split(".visible .entry ")[1:]
    assert len(bodies) == 4 * (10 + 7) + 2  # four kernels, places in rows and in columns; two for channels
    for body in bodies:
        name = body.partition("(")[0]
        assert "ld.global.nc" not in body, name  # a kernel may write to what it reads (y == x)
        assert not re.search(r"\b(membar|atom|red)\.", body), name
        is_first, is_last = (
            any(kind in name for kind in kinds) for kinds in (("7moments", "4sums"), ("9normalise", "8gradient"))
        )
        assert body.count("griddepcontrol.launch_dependents") == (not is_last), name
        assert body.count("griddepcontrol.wait") == (not is_first), name
        if not is_first:
            assert not re.search(r"\b(ld|st)\.global", body.partition("griddepcontrol.wait")[0]), name
