"""The CUDA operators without a GPU: compiled for the CPU provider, over the CUDA library on an emulated device.

Everything between ONNX Runtime and the kernels is the real thing: registration, validation, scratch
memory from ONNX Runtime's allocator, the stream, types of the statistics, groups. The tests of the CPU
operators run over it as they are.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bnexport import __version__
from bnexport.native.library import CUDA_ENVIRONMENT_VARIABLE

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
    return folder / "libbnexport_ops.so"


@pytest.fixture
def run_tests(library: Path, library_file: Path) -> Callable[..., None]:
    def run(*arguments: str) -> None:
        environment = {**os.environ, "BNEXPORT_LIBRARY": str(library), CUDA_ENVIRONMENT_VARIABLE: str(library_file)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

    return run


def test_the_tests_of_the_cpu_operators_pass(run_tests: Callable[..., None]) -> None:
    # Where a vector of CUDA's columns has a bad value, all of its channels are summed in another way.
    files = [str(HERE / f"test_{name}.py") for name in ("numbers", "fuzz", "bad_input")]
    run_tests(*files, "-k", "(MMCV or node or random_nodes or threads or training_graph) and not infinity")


def test_groups_go_through_the_host(run_tests: Callable[..., None]) -> None:
    # In processes: threads would share the one emulated device.
    run_tests(f"{ROOT / 'tests/runtime/test_communicator.py'}", "-k", "joint_batch and exact")


def test_without_the_cuda_library_nothing_is_registered_for_cuda(library: Path) -> None:
    # This build registers nothing for the CPU provider, so without it the node is unknown.
    environment = {
        **os.environ,
        "BNEXPORT_LIBRARY": str(library),
        CUDA_ENVIRONMENT_VARIABLE: "",
        "PYTHONPATH": str(ROOT),
    }
    command = [
        sys.executable,
        "-c",
        "from tests.support.node_models import forward_model, session; session(forward_model())",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    assert "MMCVSyncBatchNorm" in done.stderr
