"""Weights computed from parameters alone, such as those of weight-standardised convolutions.

Such a subgraph gives the same values in every run. It is evaluated once (`graph/evaluate.py`) where it does
more than lay out, scale or cast a parameter; the result takes the place of the subgraph, and a
batch norm behind the layer folds into it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnexport.graph.constants import EXPRESSIONS, WEIGHT_OPERATORS
from bnexport.graph.evaluate import ANSWERED, NotEvaluated, constant_tensor, expression, read_tensor
from bnexport.graph.evaluate import evaluate as evaluate_node
from bnexport.graph.names import Names
from bnexport.graph.nodes import is_standard
from bnexport.graph.refusal import Refused

# What costs little in every run stays, for the folder to evaluate where a batch norm folds into it.
_LEFT = frozenset((*EXPRESSIONS, "Constant")) - WEIGHT_OPERATORS


def evaluate(model: ir.Model) -> None:
    """Replace, in place, values that depend only on initializers by constants, if that makes the file smaller (`_LEFT`).

    A value that is larger than the largest initializer it is made of stays computed, and so does one that the
    evaluator does not answer for.
    """
    graph = model.graph
    listed = set(graph.inputs)
    # The largest initializer that each fixed value is made of; None for what Constant nodes alone decide.
    sources: dict[ir.Value, ir.Value | None] = {}
    sources.update((value, value) for value in graph.initializers.values() if value not in listed)
    wanted: set[ir.Value] = set()
    for node in graph:
        operands = [value for value in node.inputs if value is not None]
        if not is_standard(node, "Constant", *ANSWERED) or any(value not in sources for value in operands):
            continue
        source = max((sources[value] for value in operands), key=_size, default=None)
        sources.update(dict.fromkeys(node.outputs, source))
        if source is not None and (node.op_type not in _LEFT or wanted.intersection(operands)):
            wanted.update(node.outputs)
    version, arrays = model.opset_imports[""], dict[ir.Value, np.ndarray]()
    names = Names(model)
    for value in wanted:
        if value.is_graph_output() or all(wanted.issuperset(node.outputs) for node, _ in value.uses()):
            continue
        source = sources[value]
        assert source is not None
        try:
            array = expression(value, arrays, _stored, lambda node, inputs: evaluate_node(node, inputs, version))
        except (NotEvaluated, Refused):
            continue
        if array.size <= _size(source):
            constant = _initializer(graph, names.fresh(f"{source.name}.computed"), array)
            ir.convenience.replace_all_uses_with(value, constant)


def _stored(value: ir.Value) -> np.ndarray | None:
    node = value.producer()
    if node is not None and node.op_type == "Constant":
        return read_tensor(constant_tensor(node))
    return None if node is not None or value.const_value is None else read_tensor(value.const_value)


def _size(value: ir.Value | None) -> int:
    return 0 if value is None or value.const_value is None else int(value.const_value.size)


def _initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    tensor = ir.Tensor(np.ascontiguousarray(array), name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value
