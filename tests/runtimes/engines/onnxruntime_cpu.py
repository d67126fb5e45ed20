"""ONNX Runtime on the CPU, with the custom-op libraries that a file needs."""

from __future__ import annotations

import numpy as np
import onnxruntime


def version() -> str:
    return onnxruntime.__version__


def run(path: str, inputs: dict[str, np.ndarray], outputs: list[str], libraries: list[str]) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for library in libraries:
        options.register_custom_ops_library(library)
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    needed = {value.name for value in session.get_inputs()}
    values = session.run(outputs, {name: value for name, value in inputs.items() if name in needed})
    return dict(zip(outputs, values))
