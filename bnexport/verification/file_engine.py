"""Values of a model file for given inputs, computed in the verifying process: a crash of the engine is an error here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport import schema
from bnexport.errors import BnexportError, ModelError, UnsupportedModelError
from bnexport.graph.nodes import is_sync_batch_norm
from bnexport.model_io import Parts, to_parts, walk
from bnexport.native import library
from bnexport.runtime.engine import ENGINES
from bnexport.verification.process import PROCESS, ProcessFailure, Shipment


class FileEngine:
    """A model in the verifying process, as an engine. providers: of ONNX Runtime. timeout: seconds for one run."""

    name = ENGINES[0]

    def __init__(self, model: ir.Model, providers: Sequence[str] = (), timeout: float | None = None) -> None:
        self._model, self._providers, self._timeout = model, list(providers), timeout

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str]) -> list[np.ndarray]:
        """Return outputs of the model's graph. Raises UnsupportedModelError where it does not run."""
        try:
            with Shipment() as shipment:
                request = {
                    "model": shipped(self._model, (), shipment),
                    "inputs": [shipment.array(name, value) for name, value in feeds.items()],
                    "values": list(outputs),
                    "providers": self._providers,
                }
                answer = PROCESS.ask(request, shipment.ready(), self._timeout)
        except (ProcessFailure, ModelError) as error:
            raise UnsupportedModelError(str(error)) from error
        if "reason" in answer:
            raise UnsupportedModelError(answer["reason"])
        self.name = answer["engine"]
        arrays: list[np.ndarray] = answer["arrays"]
        return arrays


def shipped(model: ir.Model, probes: Sequence[ir.Value], shipment: Shipment) -> dict[str, Any]:
    """Put a model in a request, with these values as outputs, too."""
    path = no_library = None
    if _needs_library(model):
        try:
            path = library.get_library_path()
        except BnexportError as error:
            no_library = str(error)
    with _also_outputs(model, probes):
        parts: Parts = to_parts(model)
    return shipment.model(parts, path, no_library, schema.TRAINING_DOMAIN in model.opset_imports)


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


def _needs_library(model: ir.Model) -> bool:
    """Whether a node of ours has no portable body."""
    if schema.TRAINING_DOMAIN in model.opset_imports:
        return True
    return any(is_sync_batch_norm(node) and node.op_identifier() not in model.functions for node in walk.nodes(model))
