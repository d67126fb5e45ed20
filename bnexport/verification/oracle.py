"""The model in float64, in onnx.reference: what it would compute without rounding, for all that float32 shows.

Every float type of the graph becomes DOUBLE: inputs, initializers, constants, declared types, and the targets of Cast. A
Cast to float16 or bfloat16 rounds first, as the model says.
onnx.reference is believed where it evaluates each node of the reference model as ONNX Runtime does.

Its evaluations are wrong for some operators in some opsets, and two models that are wrong alike agree. So before it
judges anything, each form of an operator in the reference - opset, attributes, shapes, integer operands - runs alone in
both: in ONNX Runtime in float32, in onnx.reference in float64. They get the values that enter there; where these are
ill-conditioned (a batch norm of |mean| / std in the thousands), random ones. The bound is that of `bnexport.tolerances.model`.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from bnexport import schema
from bnexport.errors import BnexportError, UnsupportedModelError
from bnexport.model_io.validate import bodies, printable
from bnexport.runtime.engine import OnnxReference, Serialised, open_as_written
from bnexport.verification.comparison import compare_output, is_float

Form = tuple[Any, ...]
Arrays = dict[str, np.ndarray]
# Largest number of parameters to evaluate, since NumPy is slow.
LARGEST_BYTES = 1 << 28
_FLOATS = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE)
_HALVES = _FLOATS[:2]
# Elements of an integer operand, such as a shape, that are part of a form.
_OPERAND = 64


class PreciseModel:
    """A model to run in float64; in a main thread only.

    seconds: for all of its runs.
    """

    def __init__(self, model: Serialised, seconds: float) -> None:
        self._model, self._seconds = model, seconds
        self._proto: Any = None
        self._evaluator: Any = None
        self._agreed: set[Form] = set()

    def run(self, samples: Sequence[Mapping[str, np.ndarray]], outputs: Sequence[str]) -> list[list[Any]]:
        """Compute the values of `outputs` for each sample.

        Raises UnsupportedModelError where they cannot be computed or believed, or not in the time that is left.
        """
        if self._model.nbytes > LARGEST_BYTES:
            raise UnsupportedModelError("the model is too large to be run in float64")
        start = time.monotonic()
        try:
            with _alarm(self._seconds):
                self._load()
                return [self._values(sample, outputs, first=not index) for index, sample in enumerate(samples)]
        except Exception as error:  # onnx.reference raises whatever an operator raises
            raise UnsupportedModelError(f"the model cannot be run in float64: {error}") from error
        finally:
            self._seconds = max(0.1, self._seconds - (time.monotonic() - start))

    def _load(self) -> None:
        if self._evaluator is None:
            self._proto = inlined(self._model.whole())
            retype(self._proto, TensorProto.DOUBLE)
            self._evaluator = OnnxReference(self._proto)

    def _values(self, sample: Mapping[str, np.ndarray], outputs: Sequence[str], *, first: bool) -> list[Any]:
        values = self._evaluator.values({name: _in_double(array) for name, array in sample.items()})
        if first:
            doubt = find_doubt(self._proto, values, self._agreed)
            if doubt:
                raise UnsupportedModelError(doubt)
        return [values[name] for name in outputs]


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """TimeoutError after so many seconds, on systems with alarms."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def ring(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def find_doubt(proto: Any, values: Mapping[str, Any], agreed: set[Form]) -> str:
    """Return why the values of onnx.reference are not believed; empty where they are.

    proto: the reference model. values: of all names of its main graph. agreed: forms that need no further run; those
    found here are added.
    """
    initializers = {tensor.name for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        if (node.op_type == "Constant" and not node.domain) or node.domain in schema.MMCV_DOMAINS:
            continue  # MMCV's operators are their definitions
        names = [name for name in dict.fromkeys((*node.input, *_captured([node]))) if name in values and name]
        if not all(isinstance(values[name], np.ndarray | np.generic) for name in names):
            return f"onnx.reference is not believed for {_label(node)}, which takes a sequence or a map"
        arrays = {name: np.asarray(values[name]) for name in names}
        form = _form(node, arrays.values())
        if form in agreed:
            continue
        case = _Case(proto, node, arrays, initializers)
        reason = case.difference()
        if reason:
            version = next((each.version for each in proto.opset_import if each.domain == node.domain), 0)
            return f"onnx.reference is not believed for {_label(node)} of opset {version}: {reason}"
        agreed.add(form)
    return ""


def find_doubt_alone(model: Serialised, sample: Mapping[str, np.ndarray]) -> str:
    """Return why onnx.reference is not believed where no other engine runs the model; empty where it is."""
    proto = inlined(model.whole())
    return find_doubt(proto, OnnxReference(proto).values(sample), set())


def inlined(proto: Any) -> Any:
    """Return the model without functions: what they call is checked node by node, too."""
    import onnx.inliner

    return onnx.inliner.inline_local_functions(proto) if proto.functions else proto


class _Case:
    """One node as a model of its own.

    values: what enters it; those of `initializers` are initializers here, too.
    """

    def __init__(self, proto: Any, node: Any, values: Mapping[str, np.ndarray], initializers: set[str]) -> None:
        self._proto, self._node, self._initializers = proto, node, initializers
        self._arrays = {name: array.astype(np.float32) if is_float(array) else array for name, array in values.items()}

    def difference(self) -> str:
        """Return how the two engines differ on random values, too; empty where they agree on either."""
        return self._difference(self._arrays) and self._difference(_random(self._arrays))

    def _difference(self, arrays: Arrays) -> str:
        names = [name for name in self._node.output if name]
        feeds = {name: array for name, array in arrays.items() if name not in self._initializers}
        try:
            wide = {name: _in_double(array) for name, array in feeds.items()}
            exact = OnnxReference(self._model(arrays, TensorProto.DOUBLE)).run(wide, names)
            single = Serialised(self._model(arrays, TensorProto.FLOAT).SerializeToString())
            got = open_as_written(single).run(feeds, names)
        except BnexportError as error:
            return str(error)
        outputs = (
            compare_output(name, [one.astype(np.float32) if is_float(one) else one], [other], "float32")
            for name, one, other in zip(names, exact, got, strict=True)
        )
        return next((f"it differs from ONNX Runtime: {each.reason}" for each in outputs if not each.passed), "")

    def _model(self, arrays: Arrays, target: int) -> Any:
        """Return the node as a model whose float type is `target`."""
        fixed = [onnx.numpy_helper.from_array(arrays[name], name) for name in arrays if name in self._initializers]
        feeds = {name: array for name, array in arrays.items() if name not in self._initializers}
        model = cut(self._proto, [self._node], feeds, [name for name in self._node.output if name], fixed)
        retype(model, target)
        return model


def cut(
    proto: Any, nodes: Sequence[Any], feeds: Mapping[str, np.ndarray], outputs: Sequence[str], fixed: Sequence[Any]
) -> Any:
    """Return nodes of a model as a model of their own, with inputs for these feeds and initializers `fixed`."""
    inputs = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    graph = onnx.helper.make_graph(nodes, "cut", inputs, [onnx.ValueInfoProto(name=name) for name in outputs], fixed)
    options = {"opset_imports": proto.opset_import, "ir_version": proto.ir_version}
    return onnx.helper.make_model(graph, functions=proto.functions, **options)


def retype(proto: Any, target: int) -> None:
    """Give every float value of a model without functions the type `target`, in place."""
    _as_casts(proto)
    for graph in _graphs([proto.graph]):
        for tensor in graph.initializer:
            _retype_tensor(tensor, target)
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type in _FLOATS:
                value.type.tensor_type.elem_type = target
        _retype_attributes(graph.node, target)
        _keep_rounding(graph.node, target)


def _as_casts(proto: Any) -> None:
    """Write each CastLike as the Cast that it is, while the types are the model's."""
    graphs = _graphs([proto.graph])
    likes = [node for graph in graphs for node in graph.node if node.op_type == "CastLike" and not node.domain]
    if not likes:
        return
    typed = onnx.shape_inference.infer_shapes(proto)
    types = {tensor.name: tensor.data_type for graph in _graphs([typed.graph]) for tensor in graph.initializer}
    for graph in _graphs([typed.graph]):
        for value in (*graph.input, *graph.output, *graph.value_info):
            types.setdefault(value.name, value.type.tensor_type.elem_type)
    for node in likes:
        kind = types.get(node.input[1])
        if kind:
            del node.input[1:]
            node.op_type = "Cast"
            node.attribute.append(onnx.helper.make_attribute("to", kind))


def _keep_rounding(nodes: Any, target: int) -> None:
    """Widen again what a Cast to a half type has rounded, by a Cast behind it."""
    changed = []
    for node in nodes:
        changed.append(node)
        halves = any(each.name == "to" and each.i in _HALVES for each in node.attribute)
        if node.op_type == "Cast" and not node.domain and halves:
            rounded = f"{node.output[0]}/rounded"
            changed.append(onnx.helper.make_node("Cast", [rounded], [node.output[0]], to=target))
            node.output[0] = rounded
    del nodes[:]
    nodes.extend(changed)


def _retype_tensor(tensor: Any, target: int) -> None:
    if tensor.data_type in _FLOATS and tensor.data_type != target:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(target)
        array = onnx.numpy_helper.to_array(tensor).astype(dtype)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def _retype_attributes(nodes: Iterable[Any], target: int) -> None:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(target)
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _retype_tensor(attribute.t, target)
            if node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                value = attribute.f if attribute.name == "value_float" else list(attribute.floats)
                tensor = onnx.numpy_helper.from_array(np.asarray(value, dtype))
                attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))
            if attribute.name == "to" and node.op_type == "Cast" and attribute.i in _FLOATS[2:]:
                attribute.i = target


def _graphs(graphs: list[Any]) -> list[Any]:
    """Graphs and the bodies inside them."""
    for graph in graphs:
        graphs += [body for node in graph.node for attribute in node.attribute for body in bodies(attribute)]
    return graphs


def _captured(nodes: Iterable[Any]) -> Iterator[str]:
    """Yield the names that the bodies of nodes read, their own among them."""
    for node in nodes:
        for attribute in node.attribute:
            for body in bodies(attribute):
                yield from (name for inner in body.node for name in inner.input)
                yield from (output.name for output in body.output)
                yield from _captured(body.node)


def _form(node: Any, arrays: Iterable[np.ndarray]) -> Form:
    attributes = tuple(sorted(attribute.SerializeToString() for attribute in node.attribute))
    present = tuple(map(bool, node.input)), tuple(map(bool, node.output))
    operands = tuple(
        (array.dtype.name, array.shape, b"" if is_float(array) or array.size > _OPERAND else array.tobytes())
        for array in arrays
    )
    return node.domain, node.op_type, attributes, present, operands


def _random(arrays: Arrays) -> Arrays:
    """Return random floats in place of all: data of both signs first, then parameters, which may be variances."""
    generator = np.random.default_rng(0)
    floats = [name for name, array in arrays.items() if is_float(array)]
    drawn = {name: generator.uniform(0.5, 1.5, arrays[name].shape) for name in floats}
    if floats:
        drawn[floats[0]] = generator.standard_normal(arrays[floats[0]].shape)
    return arrays | {name: array.astype(np.float32) for name, array in drawn.items()}


def _in_double(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if is_float(array) else array


def _label(node: Any) -> str:
    return printable(f"{node.domain}:{node.op_type}" if node.domain else node.op_type)
