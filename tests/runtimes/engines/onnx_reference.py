"""onnx.reference, ONNX's own evaluator in NumPy."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.reference


def version() -> str:
    return onnx.__version__


def run(path: str, inputs: dict[str, np.ndarray], outputs: list[str], libraries: list[str]) -> dict[str, np.ndarray]:
    evaluator = onnx.reference.ReferenceEvaluator(path)
    needed = set(evaluator.input_names)
    values = evaluator.run(outputs, {name: value for name, value in inputs.items() if name in needed})
    return dict(zip(outputs, values))
