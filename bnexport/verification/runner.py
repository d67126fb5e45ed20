"""Runs a model as it is written: ONNX Runtime on the CPU without graph optimisations, or onnx.reference.

The reference implementation is slow and takes over only where ONNX Runtime has no kernel (a Conv in
float64) and the model is small; `oracle` says whether it is believed. Both run in the verifying process (`worker`), on
serialised models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from bnexport.errors import BnexportError, UnsupportedModelError, first_line
from bnexport.model_io.validate import printable

_SEEDS = itertools.count(1)
# Parameters of a model that the reference implementation may be asked to run.
_REFERENCE_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True)
class Serialised:
    """data: the model. weights: what it declares as given. library: the custom-op library, where it needs one.

    no_library: why there is none, where it needs one. training: whether it has nodes of a training step. providers: those
    of its session; the CPU where there are none.
    """

    data: bytes
    weights: dict[str, np.ndarray]
    library: str | None = None
    no_library: str | None = None
    training: bool = False
    providers: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return len(self.data) + sum(array.nbytes for array in self.weights.values())

    @property
    def needs_library(self) -> bool:
        return self.library is not None or self.no_library is not None


class Runner(Protocol):
    """One loaded model."""

    name: str

    def __init__(self, model: Serialised) -> None:
        """Raises UnsupportedModelError where the engine cannot load it, MissingDependencyError without an engine."""

    @staticmethod
    def label() -> str:
        """Return the engine's name and version."""

    def run(self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str]) -> list[Any]:
        """Values of `outputs`. Raises UnsupportedModelError where the engine cannot run it."""


class ReferenceRunner:
    """ONNX's own implementation in NumPy."""

    name = "onnx.reference"

    @staticmethod
    def label() -> str:
        return f"onnx.reference {importlib.import_module('onnx').__version__}"

    def __init__(self, model: Serialised) -> None:
        if model.nbytes > _REFERENCE_BYTES:
            raise UnsupportedModelError("onnx.reference would take too long")
        from bnexport.graph.reference import MendedEvaluator

        try:
            self._evaluator = MendedEvaluator(whole(model))
        except Exception as error:  # it raises whatever an operator raises
            raise UnsupportedModelError(
                f"onnx.reference cannot load it: {printable(first_line(error))[:300]}"
            ) from error

    def run(self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str]) -> list[Any]:
        try:
            return list(self._evaluator.run(list(outputs), dict(inputs)))
        except Exception as error:
            raise UnsupportedModelError(
                f"onnx.reference cannot run it: {printable(first_line(error))[:300]}"
            ) from error


class RuntimeRunner:
    """One session of ONNX Runtime."""

    name = "onnxruntime"

    @staticmethod
    def label() -> str:
        return f"onnxruntime {importlib.import_module('onnxruntime').__version__}"

    def __init__(self, model: Serialised) -> None:
        from bnexport.runtime import injection

        try:
            self._session = injection.session(model.data, model.weights, _options(model), model.providers or None)
        except BnexportError:
            raise
        except Exception as error:  # ONNX Runtime raises one class for each status code
            hint = f"; {model.no_library}" if model.no_library else ""
            reason = injection.too_new(error) or f"ONNX Runtime cannot load it: {printable(first_line(error))[:300]}"
            raise UnsupportedModelError(f"{reason}{hint}") from error

    def run(self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str]) -> list[Any]:
        known = {value.name for value in self._session.get_inputs()}
        try:
            return list(self._session.run(list(outputs), {name: inputs[name] for name in inputs if name in known}))
        except Exception as error:
            raise UnsupportedModelError(f"ONNX Runtime cannot run it: {printable(first_line(error))[:300]}") from error


ENGINES: tuple[type[Runner], ...] = (RuntimeRunner, ReferenceRunner)


def reseed() -> None:
    """Make ONNX Runtime's next sessions draw other random numbers; a node that brings a seed draws its own."""
    with contextlib.suppress(ImportError, AttributeError):
        importlib.import_module("onnxruntime").set_seed(next(_SEEDS))


def load_engine() -> None:
    """Imports the first engine, where it is there."""
    with contextlib.suppress(ImportError):
        importlib.import_module("onnxruntime")


def whole(model: Serialised) -> Any:
    """Return the ModelProto with its weights inside."""
    import onnx
    import onnx.numpy_helper

    proto = onnx.ModelProto.FromString(model.data)
    for tensor in proto.graph.initializer:
        if tensor.name in model.weights:
            tensor.CopyFrom(onnx.numpy_helper.from_array(model.weights[tensor.name], tensor.name))
    return proto


def _options(model: Serialised) -> Any:
    """Options without graph optimisations; None where ONNX Runtime is missing, which `injection` reports."""
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    if model.library is not None:
        from bnexport.native import library

        os.environ[library.ENVIRONMENT_VARIABLE] = model.library
        library.register(options, training=model.training)
    return options
