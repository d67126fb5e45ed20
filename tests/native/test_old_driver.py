"""A device that torch sees and our CUDA library cannot use is not passed over in silence."""

from __future__ import annotations

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


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver for CUDA 12.4 under a library that needs 13.0."""

    def refuse(index: int) -> None:
        raise LibraryError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(library, "find", lambda kind: "libbnexport_ops_cuda.so")
    monkeypatch.setattr(cuda, "device_count", lambda: 0)
    monkeypatch.setattr(cuda, "check_device", refuse)
    monkeypatch.setattr(cuda, "driver_version", lambda: "12.4")
    monkeypatch.setattr(cuda, "runtime_version", lambda: "13.0")
    monkeypatch.setattr(kernels, "_is_loaded", lambda: True)
    kernels._sees_devices.cache_clear()


@pytest.mark.usefixtures("old_driver")
def test_a_tensor_on_the_device_warns_once() -> None:
    try:
        with pytest.warns(
            RuntimeWarning, match=r"insufficient .*driver is for CUDA 12.4, this library for 13.0\); update the driver"
        ):
            assert not kernels.usable(ON_DEVICE)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not kernels.usable(ON_DEVICE)
    finally:
        kernels._sees_devices.cache_clear()


@pytest.mark.usefixtures("old_driver")
def test_doctor_says_so() -> None:
    (check,) = doctor._cuda_devices()
    assert (
        check.value == "none: CUDA driver version is insufficient for CUDA runtime version "
        "(the NVIDIA driver is for CUDA 12.4, this library for 13.0)"
    )


def test_without_the_library_there_is_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find", lambda kind: None)
    monkeypatch.setattr(kernels, "_is_loaded", lambda: True)
    kernels._sees_devices.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not kernels.usable(ON_DEVICE)
    finally:
        kernels._sees_devices.cache_clear()


@pytest.fixture
def another_version(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    caches: list[Any] = [capi.library, cuda.library, kernels._is_loaded, kernels._sees_devices, kernels._prepare]
    for cached in caches:
        cached.cache_clear()
    monkeypatch.setattr(library, "__version__", "9.9")
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("another_version")
def test_a_library_of_another_version_is_an_error() -> None:
    for _ in range(2):
        with pytest.raises(LibraryError, match=r"libbnexport_ops\.so: got version .*, expected 9\.9"):
            SyncBatchNorm(2)(torch.randn(3, 2))


@pytest.mark.usefixtures("another_version")
def test_a_cuda_library_of_another_version_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any library with a version stands for it."""
    monkeypatch.setattr(kernels, "_is_loaded", lambda: True)
    monkeypatch.setattr(library, "find", lambda kind, find=library.find: find("ops"))
    monkeypatch.setitem(library._VERSIONS, "cuda", "bnexport_version")
    for _ in range(2):
        with pytest.raises(LibraryError, match=r"\.so: got version .*, expected 9\.9"):
            kernels.usable(ON_DEVICE)


def test_the_version_of_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        @staticmethod
        def cuDriverGetVersion(number: Any) -> int:
            number._obj.value = 12040
            return 0

    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: Driver)
    assert cuda.driver_version() == "12.4"
