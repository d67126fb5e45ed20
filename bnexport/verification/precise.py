"""A model in float64: what it would compute without rounding, for all that float32 shows.

Every float type of the graph becomes DOUBLE: inputs, initializers, constants, declared types, and the
targets of Cast. onnx.reference then computes in float64, since NumPy does.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bnexport.errors import UnsupportedModelError
from bnexport.model_io.validate import bodies
from bnexport.verification.runner import Serialised, whole

# Parameters of a model that is worth the time, which is that of NumPy.
_BYTES = 1 << 28


def run(
    model: Serialised, samples: Sequence[Mapping[str, np.ndarray]], outputs: Sequence[str], seconds: float
) -> list[list[Any]]:
    """Compute the values of `outputs` for each sample; in a main thread only.

    Raises UnsupportedModelError where they cannot be computed, or not in so many seconds.
    """
    if model.nbytes > _BYTES:
        raise UnsupportedModelError("the model is too large to be run in float64")
    import onnx
    import onnx.reference

    proto = whole(model)
    floats = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT)
    try:
        with _alarm(seconds):
            _widen_model(proto, floats)
            evaluator = onnx.reference.ReferenceEvaluator(proto)
            return [
                list(evaluator.run(list(outputs), {name: _wide(array) for name, array in sample.items()}))
                for sample in samples
            ]
    except Exception as error:  # onnx.reference raises whatever an operator raises
        raise UnsupportedModelError(f"the model cannot be run in float64: {error}") from error


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """TimeoutError after so many seconds."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _widen_model(proto: Any, floats: Sequence[int]) -> None:
    import onnx

    for graph in _graphs([proto.graph]):
        for tensor in graph.initializer:
            _widen(tensor, floats)
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type in floats:
                value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
        _widen_attributes(graph.node, floats)
    for function in proto.functions:
        _widen_attributes(function.node, floats)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype in (np.float16, np.float32) else array


def _widen(tensor: Any, floats: Sequence[int]) -> None:
    import onnx.numpy_helper

    if tensor.data_type in floats:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def _widen_attributes(nodes: Iterable[Any], floats: Sequence[int]) -> None:
    import onnx
    import onnx.numpy_helper

    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _widen(attribute.t, floats)
            if node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                value = attribute.f if attribute.name == "value_float" else list(attribute.floats)
                tensor = onnx.numpy_helper.from_array(np.asarray(value, np.float64))
                attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))
            if attribute.name == "to" and node.op_type == "Cast" and attribute.i in floats:
                attribute.i = onnx.TensorProto.DOUBLE


def _graphs(graphs: list[Any]) -> list[Any]:
    """Graphs and the bodies inside them."""
    for graph in graphs:
        graphs += [body for node in graph.node for attribute in node.attribute for body in bodies(attribute)]
    return graphs
