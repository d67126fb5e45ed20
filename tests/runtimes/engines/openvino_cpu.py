"""OpenVINO on the CPU, in float32."""

from __future__ import annotations

import numpy as np
import openvino


def version() -> str:
    return openvino.__version__.split("-")[0]


def run(path: str, inputs: dict[str, np.ndarray], outputs: list[str], libraries: list[str]) -> dict[str, np.ndarray]:
    compiled = openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    needed = {name for value in compiled.inputs for name in value.names}
    results = compiled({name: value for name, value in inputs.items() if name in needed})
    return {name: results[name] for name in outputs}
