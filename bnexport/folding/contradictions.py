"""Detection of contradicting sizes or ranks, with which a model cannot run on any input.

Only what is certain counts: shapes of weights and constants, sizes that the inputs of the main graph declare, and
what follows from them through operators that keep or set the channels. Shapes that a model declares for values in
between may be out of date; inputs of bodies and functions, and what a body captures, depend on the call, and a branch
for another rank may never be taken. Checked are the operators that folding changes:

    Conv            weight (M, C / groups, kernel), input (N, C, ...) of the weight's rank, bias (M)
    ConvTranspose   weight (C, M / groups, kernel), input and bias likewise
    Gemm, MatMul    inner sizes; Gemm's constant ends in N or 1
    BatchNormalization, MMCVSyncBatchNorm    four vectors (C), input (N, C, ...)
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import onnx_ir as ir

from bnexport import schema
from bnexport.errors import MalformedModelError
from bnexport.folding.reading import OP_TYPES
from bnexport.graph.nodes import Refused, get_int, input_at, is_portable_body, is_standard, is_sync_batch_norm, label
from bnexport.model_io import walk
from bnexport.model_io.validate import printable

# Sizes that are certain, None for others; None altogether where not even the rank is certain.
Sizes = tuple[int | None, ...]

_ACTIVATIONS = ("Relu", "LeakyRelu", "PRelu", "Elu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Softplus", "Clip")
_SAME = (*_ACTIVATIONS, "Identity", "Dropout", "Cast", "DequantizeLinear")
_POOLING = ("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")
_BATCH_NORM = ("scale", "bias", "mean", "variance")
_SYNC_BATCH_NORM = tuple(value.name for value in schema.SYNC_BATCH_NORM.inputs[1:])


def refuse_contradictions(model: ir.Model) -> None:
    """Raise MalformedModelError for the first node whose sizes contradict each other, with what it got and expected."""
    _Graph(model, model.graph, is_main=True).check()
    for function in model.functions.values():
        if not is_portable_body(function):
            _Graph(model, function.graph, is_main=False).check()


class _Graph:
    """One graph, and the known facts about its values."""

    def __init__(self, model: ir.Model, graph: ir.Graph, *, is_main: bool) -> None:
        self._model = model
        self._graph = graph
        self._is_main = is_main
        self._sizes: dict[ir.Value, Sizes] = {}

    def check(self) -> None:
        for node in self._graph:
            for body in walk.node_bodies(node):
                _Graph(self._model, body, is_main=False).check()
            rule = _RULES.get(node.op_type) if node.domain == "" else None
            if is_sync_batch_norm(node):
                rule = _sync_batch_norm
            if rule is None or not node.outputs:
                continue
            try:
                sizes = rule(node, self)
            except Refused:  # an attribute that is given by a function's caller, or of another type
                continue
            if sizes is not None:
                self._sizes[node.outputs[0]] = sizes

    def sizes(self, node: ir.Node, index: int) -> Sizes | None:
        """Return the sizes of an input; None if it is absent or its rank is unknown."""
        value = input_at(node, index)
        if value is None:
            return None
        if value in self._sizes:
            return self._sizes[value]
        if value.is_graph_input() and value.graph is not self._model.graph:
            return None
        # From IR version 4 on, a caller may override an initializer that is an input, within the declared shape.
        if value.is_initializer() and (not value.is_graph_input() or self._model.ir_version < 4):
            return None if value.const_value is None else _dims(value.const_value)
        if value.is_graph_input():
            return _declared(value) if self._is_main else None
        producer = value.producer()
        if producer is not None and is_standard(producer, "Constant"):
            attribute = producer.attributes.get("value")
            if attribute is not None and not attribute.is_ref() and attribute.type is ir.AttributeType.TENSOR:
                return _dims(attribute.as_tensor())
        return None


def _declared(value: ir.Value) -> Sizes | None:
    if value.shape is None:
        return None
    # Some exporters write -1 or 0 for a free size.
    return tuple(size if isinstance(size, int) and size > 0 else None for size in value.shape)


def _dims(tensor: ir.TensorProtocol) -> Sizes:
    # Avoids the Shape object that a tensor of the file creates on each access.
    return tuple(tensor.raw.dims if isinstance(tensor, ir.serde.TensorProtoTensor) else tensor.shape.numpy())


def _conv(node: ir.Node, graph: _Graph) -> Sizes | None:
    data, weight = graph.sizes(node, 0), graph.sizes(node, 1)
    groups = get_int(node, "group", 1)
    if weight is None or len(weight) < 2 or groups < 1:
        return None
    outputs = weight[0]
    if outputs is not None and outputs % groups:
        raise _error(node, 1, f"has {outputs} elements along axis 0, expected a multiple of its group, {groups}")
    _check_input(node, data, weight, None if weight[1] is None else weight[1] * groups)
    _check_vector(node, 2, "bias", graph.sizes(node, 2), outputs, 1)
    return (None, outputs, *[None] * (len(weight) - 2))


def _conv_transpose(node: ir.Node, graph: _Graph) -> Sizes | None:
    data, weight = graph.sizes(node, 0), graph.sizes(node, 1)
    groups = get_int(node, "group", 1)
    if weight is None or len(weight) < 2 or groups < 1:
        return None
    outputs = None if weight[1] is None else weight[1] * groups
    _check_input(node, data, weight, weight[0])
    _check_vector(node, 2, "bias", graph.sizes(node, 2), outputs, 1)
    return (None, outputs, *[None] * (len(weight) - 2))


def _check_input(node: ir.Node, data: Sizes | None, weight: Sizes, channels: int | None) -> None:
    if data is None:
        return
    if len(data) != len(weight):
        raise _error(node, 0, f"has rank {len(data)}, expected {len(weight)}, the rank of {_named(node, 1, weight)}")
    if _differ(data[1], channels):
        groups = get_int(node, "group", 1)
        raise _error(
            node, 0, f"has {data[1]} channels, expected {channels} for {_named(node, 1, weight)} and group {groups}"
        )


def _gemm(node: ir.Node, graph: _Graph) -> Sizes | None:
    first, second, constant = (graph.sizes(node, index) for index in range(3))
    if second is None or len(second) != 2:
        return None
    inner, outer = second if get_int(node, "transB", 0) == 0 else second[::-1]
    if first is not None and len(first) == 2:
        axis = 1 if get_int(node, "transA", 0) == 0 else 0
        _check_product(node, first, axis, second, inner)
    if constant and len(constant) <= 2 and constant[-1] != 1 and _differ(constant[-1], outer):
        raise _error(
            node, 2, f"ends in {constant[-1]} elements, expected 1 or {outer}, the columns of {_named(node, 1, second)}"
        )
    return (None, outer)


def _matmul(node: ir.Node, graph: _Graph) -> Sizes | None:
    first, second = graph.sizes(node, 0), graph.sizes(node, 1)
    if not first or not second:
        return None
    _check_product(node, first, len(first) - 1, second, second[max(len(second) - 2, 0)])
    return (*first[:-1], second[-1]) if len(first) >= 2 and len(second) == 2 else None


def _check_product(node: ir.Node, first: Sizes, axis: int, second: Sizes, inner: int | None) -> None:
    if _differ(first[axis], inner):
        text = f"has {first[axis]} elements along axis {axis}, expected {inner} for {_named(node, 1, second)}"
        raise _error(node, 0, text)


def _batch_norm(node: ir.Node, graph: _Graph) -> Sizes | None:
    if get_int(node, "spatial", 1) != 1:
        return None
    return _normalise(node, graph, _BATCH_NORM)


def _sync_batch_norm(node: ir.Node, graph: _Graph) -> Sizes | None:
    return _normalise(node, graph, _SYNC_BATCH_NORM)


def _normalise(node: ir.Node, graph: _Graph, names: tuple[str, ...]) -> Sizes | None:
    data = graph.sizes(node, 0)
    channels = data[1] if data is not None and len(data) >= 2 else None
    source = 0
    for index, name in enumerate(names, 1):
        sizes = graph.sizes(node, index)
        _check_vector(node, index, name, sizes, channels, source)
        if channels is None and sizes is not None:
            channels, source = sizes[0], index
    return None if data is None or len(data) < 2 else (data[0], channels, *data[2:])


def _check_vector(node: ir.Node, index: int, what: str, sizes: Sizes | None, channels: int | None, source: int) -> None:
    """Check that input `index` has one value for each channel of input `source`."""
    if sizes is None:
        return
    if len(sizes) != 1:
        raise _error(node, index, f"has shape {_text(sizes)}, expected a value for each channel", what)
    if _differ(sizes[0], channels):
        text = f"has {sizes[0]} elements, expected {channels}, the channels of input {_quoted(node, source)}"
        raise _error(node, index, text, what)


def _same(node: ir.Node, graph: _Graph) -> Sizes | None:
    return graph.sizes(node, 0)


def _pooling(node: ir.Node, graph: _Graph) -> Sizes | None:
    data = graph.sizes(node, 0)
    return None if data is None else (*data[:2], *[None] * (len(data) - 2))


def _broadcast(node: ir.Node, graph: _Graph) -> Sizes | None:
    operands = [sizes for index in range(len(node.inputs)) if (sizes := graph.sizes(node, index)) is not None]
    # Attributes of opsets before 7 choose the axis.
    if not operands or len(operands) < len(node.inputs) or node.attributes:
        return None
    rank = max(map(len, operands))
    padded = ((1,) * (rank - len(sizes)) + sizes for sizes in operands)
    return tuple(functools.reduce(_broadcast_size, sizes) for sizes in zip(*padded, strict=True))


def _broadcast_size(one: int | None, two: int | None) -> int | None:
    return two if one == 1 else one if two == 1 else one or two


_RULES: dict[str, Callable[[ir.Node, _Graph], Sizes | None]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "BatchNormalization": _batch_norm,
    **dict.fromkeys(OP_TYPES, _broadcast),
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(_POOLING, _pooling),
}


def _differ(one: int | None, two: int | None) -> bool:
    return one is not None and two is not None and one != two


def _quoted(node: ir.Node, index: int) -> str:
    value = node.inputs[index]
    return repr(printable("" if value is None else str(value.name)))


def _named(node: ir.Node, index: int, sizes: Sizes) -> str:
    return f"{_quoted(node, index)} of shape {_text(sizes)}"


def _text(sizes: Sizes) -> str:
    return "(" + ", ".join("?" if size is None else str(size) for size in sizes) + ")"


def _error(node: ir.Node, index: int, text: str, what: str = "input") -> MalformedModelError:
    return MalformedModelError(f"{node.op_type} node {label(node)!r}: {what} {_quoted(node, index)} {text}")
