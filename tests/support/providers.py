"""The execution provider that the operator tests run on: the CPU's, or CUDA's where a variable says so.

BNEXPORT_TEST_PROVIDER is "installed" for the CUDA provider of an installed onnxruntime-gpu, or the path of
a CUDA provider's library to register beside a CPU build of the same ONNX Runtime version. Nodes that are
not placed on it are then an error.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import onnxruntime as ort

PROVIDER = os.environ.get("BNEXPORT_TEST_PROVIDER", "")
_NAME = "CUDAExecutionProvider"


@functools.cache
def _devices() -> list[Any]:
    import torch

    assert torch.cuda.is_available()  # and CUDA's libraries are loaded, which the provider needs
    ort.register_execution_provider_library(_NAME, PROVIDER)
    return [device for device in ort.get_ep_devices() if device.ep_name == _NAME][:1]


def open_session(
    model: bytes | str, options: ort.SessionOptions, cuda: dict[str, str] | None = None
) -> ort.InferenceSession:
    """A session on the provider under test. cuda: options of the CUDA provider."""
    if not PROVIDER:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if PROVIDER == "installed":
        return ort.InferenceSession(model, options, providers=[(_NAME, cuda or {})])
    options.add_provider_for_devices(_devices(), cuda or {})
    return ort.InferenceSession(model, options)
