"""Evidence for onnx.reference: it is believed where it evaluates each node of the reference model as ONNX Runtime does.

Its evaluations are wrong for some operators in some opsets, and two models that are wrong alike agree. So before it
judges anything, each form of an operator in the reference - opset, attributes, shapes, integer operands - runs alone in
both: in ONNX Runtime in float32, in onnx.reference in float64. They get the values that enter there; where these are
ill-conditioned (a batch norm of |mean| / std in the thousands), random ones. The bound is that of `bnexport.tolerances.model`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from bnexport.errors import BnexportError
from bnexport.model_io.validate import bodies, printable
from bnexport.verification.comparison import compare_output
from bnexport.verification.runner import RuntimeRunner, Serialised, whole
from bnexport.verification.smaller_inputs import is_float

Form = tuple[Any, ...]
Arrays = dict[str, np.ndarray]
# Elements of an integer operand, such as a shape, that are part of a form.
_OPERAND = 64


def find_doubt(proto: Any, values: Mapping[str, Any], agreed: set[Form]) -> str:
    """Return why the values of onnx.reference are not believed; empty where they are.

    proto: the reference model. values: of all names of its main graph. agreed: forms that need no further run; those
    found here are added.
    """
    initializers = {tensor.name for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type == "Constant" and not node.domain:
            continue
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
    from bnexport.verification.onnx_reference import Evaluator

    proto = inlined(whole(model))
    values: Any = Evaluator(proto).run(None, dict(sample), intermediate=True)
    return find_doubt(proto, values, set())


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
        """Return how the two engines differ, on random values, too; empty where they agree on either."""
        reason = self._difference(self._arrays)
        return reason and self._difference(_random(self._arrays)) and reason

    def _difference(self, arrays: Arrays) -> str:
        from onnx import TensorProto

        from bnexport.verification.onnx_reference import Evaluator

        names = [name for name in self._node.output if name]
        feeds = {name: array for name, array in arrays.items() if name not in self._initializers}
        try:
            exact = Evaluator(self._model(arrays, TensorProto.DOUBLE)).run(
                names, {name: _in_double(array) for name, array in feeds.items()}
            )
            engine = RuntimeRunner(Serialised(self._model(arrays, TensorProto.FLOAT).SerializeToString(), {}))
            got = engine.run(feeds, names)
        except BnexportError as error:
            return str(error)
        outputs = (
            compare_output(name, [_in_single(one)], [other], "float32")
            for name, one, other in zip(names, exact, got, strict=True)
        )
        return next((f"it differs from ONNX Runtime: {each.reason}" for each in outputs if not each.passed), "")

    def _model(self, arrays: Arrays, target: int) -> Any:
        """Return the node as a model whose float type is `target`."""
        import onnx

        inputs = [
            onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in arrays.items()
            if name not in self._initializers
        ]
        fixed = [
            onnx.numpy_helper.from_array(array, name) for name, array in arrays.items() if name in self._initializers
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in self._node.output if name]
        graph = onnx.helper.make_graph([self._node], "node", inputs, outputs, fixed)
        model = onnx.helper.make_model(
            graph,
            opset_imports=self._proto.opset_import,
            functions=self._proto.functions,
            ir_version=self._proto.ir_version,
        )
        retype(model, target)
        return model


def retype(proto: Any, target: int) -> None:
    """Give every float value of a model the type `target`, in place."""
    import onnx

    floats = tuple(getattr(onnx.TensorProto, name) for name in ("FLOAT16", "BFLOAT16", "FLOAT", "DOUBLE"))
    for graph in _graphs([proto.graph]):
        for tensor in graph.initializer:
            _retype_tensor(tensor, floats, target)
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type in floats:
                value.type.tensor_type.elem_type = target
        _retype_attributes(graph.node, floats, target)
    for function in proto.functions:
        _retype_attributes(function.node, floats, target)


def _retype_tensor(tensor: Any, floats: tuple[int, ...], target: int) -> None:
    import onnx

    if tensor.data_type in floats and tensor.data_type != target:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(target)
        array = onnx.numpy_helper.to_array(tensor).astype(dtype)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def _retype_attributes(nodes: Iterable[Any], floats: tuple[int, ...], target: int) -> None:
    import onnx

    dtype = onnx.helper.tensor_dtype_to_np_dtype(target)
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _retype_tensor(attribute.t, floats, target)
            if node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                value = attribute.f if attribute.name == "value_float" else list(attribute.floats)
                tensor = onnx.numpy_helper.from_array(np.asarray(value, dtype))
                attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))
            if attribute.name == "to" and node.op_type == "Cast" and attribute.i in floats:
                attribute.i = target


def _graphs(graphs: list[Any]) -> list[Any]:
    """Graphs and the bodies inside them."""
    for graph in graphs:
        graphs += [body for node in graph.node for attribute in node.attribute for body in bodies(attribute)]
    return graphs


def _captured(nodes: Iterable[Any]) -> Iterator[str]:
    """Names that the bodies of nodes read, their own among them."""
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


def _in_single(value: Any) -> Any:
    return value.astype(np.float32) if is_float(value) else value


def _label(node: Any) -> str:
    return printable(f"{node.domain}:{node.op_type}" if node.domain else node.op_type)
