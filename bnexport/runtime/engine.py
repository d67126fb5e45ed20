"""The one door to the engines that run models: ONNX Runtime, and onnx.reference where it has no kernel.

`open` loads a checked model, `Engine.run` runs it, and whatever an engine raises is an EngineFailure. PyTorch modules are
engines of the same form (`bnexport.verification`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import onnx
import onnx_ir as ir

from bnexport import model_io, schema
from bnexport.errors import BnexportError, LibraryError, UnsupportedModelError, UsageError, first_line
from bnexport.model_io.validate import printable
from bnexport.native import library
from bnexport.runtime import sessions
from bnexport.runtime.sessions import Providers

if TYPE_CHECKING:
    import onnx_ir as ir


# onnx.reference is slow: it takes over where ONNX Runtime has no kernel (a Conv in float64).
ENGINES = ("onnxruntime", "onnx.reference")
# What ONNX Runtime says of an operator of a domain that it does not know.
_UNKNOWN = re.compile(r"is not a registered function/op|No opset import for domain")
_SEEDS = itertools.count(1)
# Parameters of a model that the reference implementation may be asked to run.
_REFERENCE_BYTES = 1 << 26


class EngineFailure(UnsupportedModelError):
    """An engine cannot load or run a model.

    detail: the engine's own text. newer: one line about a file that is newer than ONNX Runtime, or empty. hint: the way out.
    """

    def __init__(self, engine: str, action: str, error: BaseException, hint: str = "") -> None:
        self.detail = str(error).strip()
        self.newer = sessions.too_new(error)
        if not hint and _UNKNOWN.search(self.detail):
            hint = "; --library PATH, or the variable BNEXPORT_OTHER_LIBRARIES, names a library of custom operators"
        self.hint = hint
        super().__init__((self.newer or f"{engine} cannot {action} it: {printable(first_line(error))[:300]}") + hint)


@contextlib.contextmanager
def failures(engine: str, action: str, hint: str = "") -> Iterator[None]:
    """Turn what an engine raises into EngineFailure: ONNX Runtime has a class for each status code, others raise any.

    A TimeoutError is that of an alarm.
    """
    try:
        yield
    except (BnexportError, TimeoutError):
        raise
    except Exception as error:
        raise EngineFailure(engine, action, error, hint) from error


class Engine(Protocol):
    """A model that is open. name: of the engine."""

    name: str

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str]) -> list[Any]:
        """Return the values of `outputs`. Raises EngineFailure."""


@dataclasses.dataclass(frozen=True)
class Serialised:
    """data: the model. weights: what it declares as given. library: the custom-op library, where it needs one.

    no_library: why there is none, where it needs one. training: whether it has nodes of a training step.
    """

    data: bytes
    weights: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    library: str | None = None
    no_library: str | None = None
    training: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.data) + sum(array.nbytes for array in self.weights.values())

    @property
    def needs_library(self) -> bool:
        return self.library is not None or self.no_library is not None

    def whole(self) -> Any:
        """Return the ModelProto with its weights inside."""
        proto = onnx.ModelProto.FromString(self.data)
        for tensor in proto.graph.initializer:
            if tensor.name in self.weights:
                tensor.CopyFrom(onnx.numpy_helper.from_array(self.weights[tensor.name], tensor.name))
        return proto


class OnnxRuntime:
    """One session of ONNX Runtime. Inputs that the model lacks are left out of a run."""

    name = ENGINES[0]

    def __init__(self, session: Any) -> None:
        self.session = session
        self.inputs = [value.name for value in session.get_inputs()]
        self.outputs = [value.name for value in session.get_outputs()]

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None) -> list[Any]:
        known = {name: feeds[name] for name in self.inputs if name in feeds}
        with failures("ONNX Runtime", "run"):
            return list(self.session.run(self.outputs if outputs is None else list(outputs), known))


class OnnxReference:
    """ONNX's own implementation in NumPy, mended."""

    name = ENGINES[1]

    def __init__(self, model: onnx.ModelProto) -> None:
        from bnexport.graph.onnx_reference import MendedEvaluator

        with failures(self.name, "load"):
            self._evaluator = MendedEvaluator(model)

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str]) -> list[Any]:
        with failures(self.name, "run"):
            return list(self._evaluator.run(list(outputs), dict(feeds)))

    def values(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of all names of the main graph."""
        with failures(self.name, "run"):
            every: Any = self._evaluator.run(None, dict(feeds), intermediate=True)
            return every


def open(
    model: ir.Model | Serialised,
    providers: Providers = None,
    *,
    options: Any = None,
    keep_options: bool = False,
    mapped: bool = False,
) -> OnnxRuntime:
    """Open a model, checked by `model_io` or serialised by it, in ONNX Runtime; its weights are used where they lie.

    providers: None for the devices that `options` hold (add_provider_for_devices), or CPU. options: of onnxruntime, which
    serve this session only, as its weights are named in them; with keep_options others, too. mapped: weights in files are
    mapped, not read; the files must stay as they are.

    Raises EngineFailure, MissingPackageError without onnxruntime, and what reading a model raises.
    """
    onnxruntime = sessions.import_onnxruntime()
    options = onnxruntime.SessionOptions() if options is None else options
    no_library = model.no_library if isinstance(model, Serialised) else None
    with failures("ONNX Runtime", "load", f"; {no_library}" if no_library else ""):
        if isinstance(model, Serialised):
            prepared = sessions.prepare(model.data, model.weights, options, providers)
        else:
            prepared = sessions.prepare_model(model, options, providers, keep_options=keep_options, mapped=mapped)
        session = onnxruntime.InferenceSession(prepared.data, options, **prepared.arguments)
    session.bnexport_weights = prepared.values  # ONNX Runtime holds addresses, not arrays.
    return OnnxRuntime(session)


def open_as_written(model: Serialised, providers: Providers = None, engine: str = ENGINES[0]) -> Engine:
    """Open a model in one of ENGINES, without graph optimisations, with the library that it names. Raises as `open`."""
    if engine != ENGINES[0]:
        if model.nbytes > _REFERENCE_BYTES:
            raise UnsupportedModelError("onnx.reference would take too long")
        return OnnxReference(model.whole())
    training = None if model.library is None else model.training
    return open(model, providers, options=default_options(training, optimised=False))


def default_options(
    training: bool | None = None, *, quiet: bool = True, threads: int = 0, optimised: bool = True
) -> Any:
    """Create options of a session, with the libraries that BNEXPORT_OTHER_LIBRARIES names.

    training: registers the custom-op library, and that of training steps; None for neither. quiet: nothing is logged. threads: 0
    lets ONNX Runtime choose. optimised: False for a model that runs once or twice, as it is written.
    """
    onnxruntime = sessions.import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    if quiet:
        options.log_severity_level = 4
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        # A few runs of small models: threads that wait for work by spinning take as long as all of the rest.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if training is not None:
        library.register(options, training=training)
    library.register_others(options)
    return options


def label(engine: str) -> str:
    """Return an engine's name and version."""
    return f"{engine} {importlib.import_module(engine.partition('.')[0]).__version__}"


def reseed() -> None:
    """Make ONNX Runtime's next sessions draw other random numbers; a node that brings a seed draws its own."""
    with contextlib.suppress(ImportError, AttributeError):
        importlib.import_module("onnxruntime").set_seed(next(_SEEDS))


# One run of a model file: checked before loading, with the custom-op library if it needs it.


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
    options = default_options() if session_options is None else session_options
    names = sessions.check_providers(providers)
    model = model_io.load(path)
    options.log_severity_level = 4
    registered = _register(model, options)
    with _named(os.fspath(path)):
        # The model and its weights as they were checked: ONNX Runtime opens no file itself.
        runtime = open(model, names or None, options=options)
    needed = tuple(str(value.name) for value in model.graph.inputs if not value.is_initializer())
    name = f"{label(runtime.name)}{f' ({names[0]})' if names else ''}"
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
