"""The CUDA library on an emulated device (tests/cpp/cuda): host memory is device memory."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu import libraries
from bnexport.native import cuda
from bnexport.native.library import CUDA_ENVIRONMENT_VARIABLE


@pytest.fixture(scope="session")
def library_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libraries, "BUILD", tmp_path_factory.mktemp("cuda"))
        assert libraries.build_emulated() == ""
        return libraries.BUILD / libraries.NAMES[CUDA_ENVIRONMENT_VARIABLE]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    cuda.library.cache_clear()
    yield monkeypatch
    cuda.library.cache_clear()


@pytest.fixture
def emulated(fresh: pytest.MonkeyPatch, library_file: Path) -> None:
    fresh.setenv(CUDA_ENVIRONMENT_VARIABLE, str(library_file))
