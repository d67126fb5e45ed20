"""A device that torch sees and our CUDA library cannot use is not passed over in silence."""

import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bnexport import SyncBatchNorm
from bnexport.cli import doctor
from bnexport.errors import LibraryError
from bnexport.native import capi, cuda, library
from bnexport.sync_bn import kernels

ON_DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing is known of libraries and devices, before and after."""
    caches: list[Any] = [capi.library, cuda.library, kernels._is_loaded, kernels._sees_devices, kernels._prepare]
    for cached in caches:
        cached.cache_clear()
    with monkeypatch.context() as context:
        yield context
    for cached in caches:
        cached.cache_clear()


def test_a_driver_older_than_the_library(patch: pytest.MonkeyPatch) -> None:
    """A warning for the first tensor, and a line of doctor: a driver for CUDA 12.4 under a library that needs 13.0."""
    insufficient = "CUDA driver version is insufficient for CUDA runtime version"

    def refuse(index: int) -> None:
        raise LibraryError(insufficient)

    patch.setattr(library, "find", lambda kind: "libbnexport_ops_cuda.so")
    patch.setattr(kernels, "_is_loaded", lambda: True)
    patch.setattr(cuda, "device_count", lambda: 0)
    patch.setattr(cuda, "check_device", refuse)
    patch.setattr(cuda, "driver_version", lambda: "12.4")
    patch.setattr(cuda, "runtime_version", lambda: "13.0")
    said = r"insufficient .*driver is for CUDA 12.4, this library for 13.0\); update the driver"
    with pytest.warns(RuntimeWarning, match=said) as warned:
        assert not kernels.usable(ON_DEVICE) and not kernels.usable(ON_DEVICE)
    assert len(warned) == 1
    (check,) = doctor._cuda_devices()
    assert check.value == f"none: {insufficient} (the NVIDIA driver is for CUDA 12.4, this library for 13.0)"


def test_without_the_library_there_is_nothing_to_say(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(library, "find", lambda kind: None)
    patch.setattr(kernels, "_is_loaded", lambda: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not kernels.usable(ON_DEVICE)


def test_a_library_of_another_version_is_an_error(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(library, "__version__", "9.9")
    for _ in range(2):
        with pytest.raises(LibraryError, match=r"libbnexport_ops\.so: got version .*, expected 9\.9"):
            SyncBatchNorm(2)(torch.randn(3, 2))
    # Any library with a version stands for the CUDA library.
    patch.setattr(kernels, "_is_loaded", lambda: True)
    patch.setattr(library, "find", lambda kind, find=library.find: find("ops"))
    patch.setitem(library._VERSIONS, "cuda", "bnexport_version")
    for _ in range(2):
        with pytest.raises(LibraryError, match=r"\.so: got version .*, expected 9\.9"):
            kernels.usable(ON_DEVICE)


def test_the_version_of_a_driver(patch: pytest.MonkeyPatch) -> None:
    def ask(number: Any) -> int:
        number._obj.value = 12040
        return 0

    patch.setattr(cuda.ctypes, "CDLL", lambda name: types.SimpleNamespace(cuDriverGetVersion=ask))
    assert cuda.driver_version() == "12.4"
