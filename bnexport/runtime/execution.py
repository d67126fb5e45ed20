"""One run of a model file: checked before loading, with the custom-op library if it needs it."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport import model_io, schema
from bnexport.errors import (
    BnexportError,
    LibraryError,
    UnsupportedModelError,
    UsageError,
    first_line,
)
from bnexport.model_io.validate import printable
from bnexport.native import library
from bnexport.runtime import injection


@dataclasses.dataclass(frozen=True)
class Execution:
    """outputs by name, the seconds of the run, whether the custom-op library was registered, and the engine."""

    outputs: dict[str, np.ndarray]
    seconds: float
    library: bool
    engine: str


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A checked model in ONNX Runtime: session, required inputs, and whether the custom-op library is registered."""

    name: str
    session: Any
    needed: tuple[str, ...]
    library: bool
    engine: str

    def run(self, inputs: Mapping[str, np.ndarray]) -> list[Any]:
        """Run the model and return all outputs in order. Raises UsageError for a missing input,
        UnsupportedModelError if the run fails.
        """
        missing = [name for name in self.needed if name not in inputs]
        if missing:
            raise UsageError(f"input: missing {', '.join(missing)}; the model takes {', '.join(self.needed)}")
        try:
            return self.session.run(None, dict(inputs))
        except Exception as error:  # ONNX Runtime raises one class for each status code
            raise _cannot_run(self.name, error) from error


def run(source: Loaded | str | os.PathLike[str], inputs: Mapping[str, np.ndarray]) -> Execution:
    """Run a model once and time it. Raise the errors of `load` and `Loaded.run`."""
    model = source if isinstance(source, Loaded) else load(source)
    start = time.perf_counter()
    values = model.run(inputs)
    seconds = time.perf_counter() - start
    names = [output.name for output in model.session.get_outputs()]
    return Execution(
        {name: np.asarray(value) for name, value in zip(names, values)}, seconds, model.library, model.engine
    )


def load(path: str | os.PathLike[str], session_options: Any = None, providers: Sequence[str] = ()) -> Loaded:
    """Load the model at `path` into ONNX Runtime, on the CPU or with the given providers.

    Raises:
        ModelError: the file is refused, or ONNX Runtime cannot load or run it.
        UsageError: a provider is none of this ONNX Runtime's.
        LibraryError: the model has nodes of ours without a portable body, and no library is there.
        MissingDependencyError: onnxruntime is not installed.
    """
    onnxruntime = injection.import_onnxruntime()
    names = injection.check_providers(providers)
    model = model_io.load(path)
    options = onnxruntime.SessionOptions() if session_options is None else session_options
    options.log_severity_level = 4
    registered = _register(model, options)
    try:
        # The model and its weights as they were checked: ONNX Runtime opens no file itself.
        session = injection.open_model(model, options, names or None)
    except BnexportError:
        raise
    except Exception as error:  # ONNX Runtime raises one class for each status code
        raise _cannot_run(os.fspath(path), error) from error
    needed = tuple(str(value.name) for value in model.graph.inputs if not value.is_initializer())
    engine = f"onnxruntime {onnxruntime.__version__}{f' ({names[0]})' if names else ''}"
    return Loaded(os.fspath(path), session, needed, registered, engine)


def _cannot_run(name: str, error: Exception) -> UnsupportedModelError:
    # Its message repeats names of the file.
    text = injection.too_new(error) or f"ONNX Runtime cannot run it: {printable(first_line(error))}"
    return UnsupportedModelError(f"{name}: {text}")


def _register(model: ir.Model, options: Any) -> bool:
    training = schema.TRAINING_DOMAIN in model.opset_imports
    nodes = [
        node for node in model.graph.all_nodes() if any(node.op_type == operator.name for operator in schema.OPERATORS)
    ]
    if not nodes and not training:
        return False
    try:
        library.register(options, training=training)
    except LibraryError:
        if training or any(node.op_identifier() not in model.functions for node in nodes):
            raise
        return False
    return True
