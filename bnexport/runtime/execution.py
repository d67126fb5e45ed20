"""Runs a model file once: checked on the way in, with our operators where it needs them."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport import model_io, schema
from bnexport.errors import LibraryError, MissingDependencyError, UnsupportedModelError, UsageError
from bnexport.runtime import injection, library


@dataclasses.dataclass(frozen=True)
class Execution:
    """outputs by name, the seconds of the run, and whether the custom-op library was registered."""

    outputs: dict[str, np.ndarray]
    seconds: float
    library: bool


def run(path: str | os.PathLike[str], inputs: Mapping[str, np.ndarray]) -> Execution:
    """Runs the model at `path` on the CPU in ONNX Runtime.

    Raises:
        ModelError: the file is refused, or ONNX Runtime cannot load or run it.
        UsageError: an input is missing.
        LibraryError: the model has nodes of ours without a portable body, and no library is there.
        MissingDependencyError: onnxruntime is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError("onnxruntime is not installed; install bnexport[cpu] or bnexport[gpu]") from error
    model = model_io.load(path)
    needed = [str(value.name) for value in model.graph.inputs if not value.is_initializer()]
    missing = [name for name in needed if name not in inputs]
    if missing:
        raise UsageError(f"input: missing {', '.join(missing)}; the model takes {', '.join(needed)}")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    registered = _register(model, options)
    # The model and its weights as they were checked: ONNX Runtime opens no file itself.
    parts = model_io.to_parts(model)
    weights = {name: tensor.numpy() for name, tensor in parts.weights.items()}
    try:
        session = injection.session(parts.data, weights, options)
        start = time.perf_counter()
        values = session.run(None, dict(inputs))
        seconds = time.perf_counter() - start
    except Exception as error:  # ONNX Runtime raises one class for each status code
        raise UnsupportedModelError(
            f"{os.fspath(path)}: ONNX Runtime cannot run it: {str(error).strip().splitlines()[0]}"
        ) from error
    return Execution(
        {output.name: np.asarray(value) for output, value in zip(session.get_outputs(), values)}, seconds, registered
    )


def _register(model: ir.Model, options: Any) -> bool:
    nodes = [
        node for node in model.graph.all_nodes() if any(node.op_type == operator.name for operator in schema.OPERATORS)
    ]
    if not nodes:
        return False
    try:
        library.register(options)
    except LibraryError:
        if any(node.op_identifier() not in model.functions for node in nodes):
            raise
        return False
    return True
