"""ONNX Runtime sessions from a serialised graph and weights given apart, with no file name in between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bnexport.errors import MissingDependencyError


def session(data: bytes, weights: Mapping[str, np.ndarray], options: Any = None) -> Any:
    """An `onnxruntime.InferenceSession` on the CPU that uses the arrays where they are.

    weights: initializers that `data` declares as external, by name; they are kept alive by the session.
    Raises MissingDependencyError without onnxruntime, and whatever ONNX Runtime raises.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError("onnxruntime is not installed; install bnexport[cpu] or bnexport[gpu]") from error
    options = onnxruntime.SessionOptions() if options is None else options
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
    if values:
        options.add_external_initializers(list(weights), values)
    made = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    made.bnexport_weights = values  # ONNX Runtime holds addresses, not arrays.
    return made
