"""A device that torch sees and our CUDA library cannot use is not passed over in silence."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from bnexport.errors import LibraryError
from bnexport.native import cuda
from bnexport.runtime import doctor
from bnexport.sync_bn import kernels

ON_DEVICE = torch.device("cuda", 0)


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver for CUDA 12.4 under a library that needs 13.0."""

    def refuse(index: int) -> None:
        raise LibraryError("CUDA driver version is insufficient for CUDA runtime version")

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
    def missing() -> int:
        raise LibraryError("not built")

    monkeypatch.setattr(cuda, "device_count", missing)
    monkeypatch.setattr(kernels, "_is_loaded", lambda: True)
    kernels._sees_devices.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not kernels.usable(ON_DEVICE)
    finally:
        kernels._sees_devices.cache_clear()


def test_the_version_of_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        @staticmethod
        def cuDriverGetVersion(number: Any) -> int:
            number._obj.value = 12040
            return 0

    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name: Driver)
    assert cuda.driver_version() == "12.4"
