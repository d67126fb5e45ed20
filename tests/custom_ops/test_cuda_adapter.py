"""The CUDA operators without a GPU: compiled for the CPU provider, over a stand-in for the CUDA library.

Everything between ONNX Runtime and the kernels is the real thing: registration, validation, scratch
memory from ONNX Runtime's allocator, the stream, types of the statistics, groups. The tests of the CPU
operators run over it as they are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bnexport import __version__

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# The operators' library, its loops for one instruction set.
OTHER_LIBRARIES = ("kernels/cuda/", "capi/cuda_capi", "adapters/training/", "cpu/training/")
SOURCES = tuple(
    str(path.relative_to(ROOT / "custom_ops").with_suffix(""))
    for path in sorted((ROOT / "custom_ops").rglob("*.cpp"))
    if not any(part in path.as_posix() for part in OTHER_LIBRARIES)
)


pytestmark = pytest.mark.cpp


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux")
    folder = tmp_path_factory.mktemp("cuda_on_cpu")
    flags = ["-std=gnu++17", "-O1", "-fPIC", "-Wno-psabi", f"-I{ROOT / 'custom_ops/include'}"]
    flags += ["-DBNEXPORT_TEST_CUDA_ON_CPU", "-DBNEXPORT_ISA=baseline", f'-DBNEXPORT_VERSION="{__version__}"']

    def compile_one(source: str) -> str:
        target = str(folder / (source.replace("/", "_") + ".o"))
        subprocess.run([compiler, *flags, "-c", str(ROOT / f"custom_ops/{source}.cpp"), "-o", target], check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, SOURCES))
    link = [compiler, "-shared", "-pthread", "-Wl,-z,nodelete"]
    subprocess.run([*link, *objects, "-ldl", "-o", str(folder / "libbnexport_ops.so")], check=True)
    fakes = ROOT / "tests/cpp"
    stand_in = [
        str(fakes / "fake_cuda_library.cpp"),
        *(o for o in objects if "adapters_" not in o),
    ]
    subprocess.run([*link, *flags, *stand_in, "-ldl", "-o", str(folder / "libbnexport_ops_cuda.so")], check=True)
    return folder / "libbnexport_ops.so"


def run_tests(library: Path, *files: str) -> None:
    environment = {**os.environ, "BNEXPORT_LIBRARY": str(library)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_the_tests_of_the_cpu_operators_pass(library: Path) -> None:
    files = [str(HERE / f"test_{name}.py") for name in ("numbers", "fuzz", "bad_input")]
    run_tests(library, *files, "-k", "node or fuzz or bad_input or threads or training_graph")


def test_groups_go_through_the_host(library: Path) -> None:
    run_tests(library, f"{ROOT / 'tests/runtime/test_communicator.py'}", "-k", "channels")


def test_without_the_cuda_library_nothing_is_registered_for_cuda(library: Path) -> None:
    # The stand-in build registers nothing for the CPU provider, so without it the node is unknown.
    environment = {**os.environ, "BNEXPORT_LIBRARY": str(library), "BNEXPORT_CUDA_LIBRARY": "", "PYTHONPATH": str(ROOT)}
    script = "from tests.support.node_models import forward_model, session; session(forward_model())"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode != 0
    assert "MMCVSyncBatchNorm" in done.stderr
