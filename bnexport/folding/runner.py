"""Runs a model as it is written: ONNX Runtime on the CPU without graph optimisations, or onnx.reference.

The reference implementation is slow and takes over only where ONNX Runtime has no kernel (a Conv in
float64) and the model is small.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from bnexport.errors import BnexportError, MissingDependencyError, UnsupportedModelError
from bnexport.folding.sync_bn import is_sync_batch_norm
from bnexport.model_io import walk, write

# Parameters of a model that the reference implementation may be asked to run.
_REFERENCE_BYTES = 1 << 26


class Runner(Protocol):
    def run(self, inputs: Mapping[str, np.ndarray], outputs: list[str]) -> list[Any]:
        """Values of `outputs`. Raises UnsupportedModelError where the engine cannot run the model."""

    def close(self) -> None: ...


class ReferenceRunner:
    """ONNX's own implementation in NumPy."""

    name = "onnx.reference"

    can_probe = True

    def __init__(self, model: ir.Model, path: str | None = None, probes: Sequence[ir.Value] = ()) -> None:
        if write.tensor_total(model) > _REFERENCE_BYTES:
            raise UnsupportedModelError("onnx.reference would take too long")
        import onnx.reference

        try:
            with _also_outputs(model, probes):
                self._evaluator = onnx.reference.ReferenceEvaluator(write.to_proto(model))
        except Exception as error:  # it raises whatever an operator raises
            raise UnsupportedModelError(f"onnx.reference cannot load it: {_first_line(error)}") from error

    def run(self, inputs: Mapping[str, np.ndarray], outputs: list[str]) -> list[Any]:
        try:
            return list(self._evaluator.run(outputs, dict(inputs)))
        except Exception as error:
            raise UnsupportedModelError(f"onnx.reference cannot run it: {_first_line(error)}") from error

    def close(self) -> None:
        """Nothing is held."""


class RuntimeRunner:
    """One session of ONNX Runtime; `close` it, since a model too large for one message lives in a temporary folder."""

    name = "onnxruntime"

    def __init__(self, model: ir.Model, path: str | None = None, probes: Sequence[ir.Value] = ()) -> None:
        """path: a file that holds exactly `model`, used where the model is large. probes: more outputs."""
        try:
            import onnxruntime
        except ImportError as error:
            raise MissingDependencyError("verification needs ONNX Runtime: pip install onnxruntime") from error
        self._folder: str | None = None
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        registered = _register_library(options) if needs_library(model) else None
        try:
            self._session = onnxruntime.InferenceSession(
                self._loadable(model, path, probes), options, providers=["CPUExecutionProvider"]
            )
        except BnexportError:
            raise
        except Exception as error:  # ORT raises one class for each status code
            self.close()
            hint = f"; {registered}" if registered else ""
            raise UnsupportedModelError(f"ONNX Runtime cannot load it: {_first_line(error)}{hint}") from error

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def run(self, inputs: Mapping[str, np.ndarray], outputs: list[str]) -> list[Any]:
        known = {value.name for value in self._session.get_inputs()}
        try:
            return list(self._session.run(outputs, {name: value for name, value in inputs.items() if name in known}))
        except Exception as error:
            raise UnsupportedModelError(f"ONNX Runtime cannot run it: {_first_line(error)}") from error

    @property
    def can_probe(self) -> bool:
        """Whether inner values can be asked for: not where a large model was loaded from its file."""
        return self._probed

    def _loadable(self, model: ir.Model, path: str | None, probes: Sequence[ir.Value]) -> bytes | str:
        self._probed = True
        if write.tensor_total(model) <= write.EXTERNAL_THRESHOLD:
            with _also_outputs(model, probes):
                return write.to_bytes(model)
        if path is not None:
            self._probed = False
            return path
        self._folder = tempfile.mkdtemp(prefix="bnexport-")
        path = os.path.join(self._folder, "model.onnx")
        with _also_outputs(model, probes):
            write.save(model, path)
        return path


@contextlib.contextmanager
def _also_outputs(model: ir.Model, values: Sequence[ir.Value]) -> Iterator[None]:
    """More graph outputs, for the time of one serialisation."""
    added = [value for value in dict.fromkeys(values) if not value.is_graph_output()]
    model.graph.outputs.extend(added)
    try:
        yield
    finally:
        for value in added:
            model.graph.outputs.remove(value)


def needs_library(model: ir.Model) -> bool:
    """Whether a node of ours has no portable body."""
    return any(is_sync_batch_norm(node) and node.op_identifier() not in model.functions for node in walk.nodes(model))


def _register_library(options: Any) -> str | None:
    """Registers the custom-op library; why not, where that fails."""
    try:
        library = importlib.import_module("bnexport.runtime.library")
        library.register(options)
    except ImportError:
        return "the custom-op library is not part of this installation"
    except BnexportError as error:
        return str(error)
    return None


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
