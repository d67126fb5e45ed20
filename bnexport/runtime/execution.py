"""One run of a model file: checked before loading, with the custom-op library if it needs it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport import model_io, schema
from bnexport.errors import LibraryError, UnsupportedModelError, UsageError, first_line
from bnexport.model_io.validate import printable
from bnexport.native import library
from bnexport.runtime import engine, injection
from bnexport.runtime.engine import EngineFailure, OnnxRuntime


@dataclasses.dataclass(frozen=True)
class Execution:
    """outputs by name, the seconds of the run, whether the custom-op library was registered, and the engine."""

    outputs: dict[str, np.ndarray]
    seconds: float
    library: bool
    engine: str


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A checked model in ONNX Runtime, its required inputs, and whether the custom-op library is registered."""

    name: str
    runtime: OnnxRuntime
    needed: tuple[str, ...]
    library: bool
    engine: str

    def run(self, inputs: Mapping[str, np.ndarray]) -> list[Any]:
        """Run the model and return all outputs in order. Raises UsageError for a missing or an unknown input,
        UnsupportedModelError if the run fails.
        """
        missing = [name for name in self.needed if name not in inputs]
        unknown = [name for name in inputs if name not in self.runtime.inputs]
        for names, what in ((missing, "missing"), (unknown, "unknown")):
            if names:
                raise UsageError(f"input: {what} {', '.join(names)}; the model takes {', '.join(self.needed)}")
        with _named(self.name):
            return self.runtime.run(inputs)


def run(source: Loaded | str | os.PathLike[str], inputs: Mapping[str, np.ndarray]) -> Execution:
    """Run a model once and time it. Raise the errors of `load` and `Loaded.run`."""
    model = source if isinstance(source, Loaded) else load(source)
    start = time.perf_counter()
    values = model.run(inputs)
    seconds = time.perf_counter() - start
    outputs = {name: np.asarray(value) for name, value in zip(model.runtime.outputs, values)}
    return Execution(outputs, seconds, model.library, model.engine)


def load(path: str | os.PathLike[str], session_options: Any = None, providers: Sequence[str] = ()) -> Loaded:
    """Load the model at `path` into ONNX Runtime, on the CPU or with the given providers.

    Raises:
        ModelError: the file is refused, or ONNX Runtime cannot load or run it.
        UsageError: a provider is none of this ONNX Runtime's.
        LibraryError: the model has nodes of ours without a portable body, and no library is there.
        MissingDependencyError: onnxruntime is not installed.
    """
    options = engine.session_options() if session_options is None else session_options
    names = injection.check_providers(providers)
    model = model_io.load(path)
    options.log_severity_level = 4
    registered = _register(model, options)
    with _named(os.fspath(path)):
        # The model and its weights as they were checked: ONNX Runtime opens no file itself.
        runtime = engine.open(model, names or None, options=options)
    needed = tuple(str(value.name) for value in model.graph.inputs if not value.is_initializer())
    name = f"{engine.label(runtime.name)}{f' ({names[0]})' if names else ''}"
    return Loaded(os.fspath(path), runtime, needed, registered, name)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Say which file an engine cannot run."""
    try:
        yield
    except EngineFailure as failure:
        text = failure.newer or f"ONNX Runtime cannot run it: {printable(first_line(failure.__cause__ or failure))}"
        raise UnsupportedModelError(f"{name}: {text}{failure.hint}") from failure


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
