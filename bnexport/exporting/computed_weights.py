"""Weights computed from parameters alone, such as those of weight-standardised convolutions.

Such a subgraph gives the same values in every run. It is evaluated once (`graph/evaluate.py`) where it does
more than lay out, scale or cast a parameter; the result takes the place of the subgraph, and a
batch norm behind the layer folds into it. In the dynamo exporter's program a batch norm in training mode that
normalises a weight becomes arithmetic, since torch.onnx translates it with inference semantics.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from bnexport.graph.constants import EXPRESSIONS, WEIGHT_OPERATORS
from bnexport.graph.evaluate import ANSWERED, NotEvaluated, constant_tensor, expression, read_tensor
from bnexport.graph.evaluate import evaluate as evaluate_node
from bnexport.graph.names import Names
from bnexport.graph.nodes import is_standard
from bnexport.graph.refusal import Refused

# What costs little in every run stays, for the folder to evaluate where a batch norm folds into it.
_LEFT = frozenset((*EXPRESSIONS, "Constant")) - WEIGHT_OPERATORS
_aten = torch.ops.aten


def independent_of_inputs(program: torch.export.ExportedProgram) -> set[torch.fx.Node]:
    """Return the nodes whose values depend only on parameters and constants."""
    inputs = set(program.graph_signature.user_inputs)
    dependent: set[torch.fx.Node] = set()
    for node in program.graph.nodes:
        if (node.op == "placeholder" and node.name in inputs) or dependent & set(node.all_input_nodes):
            dependent.add(node)
    return set(program.graph.nodes) - dependent


def normalises_a_weight(node: torch.fx.Node, fixed: set[torch.fx.Node]) -> bool:
    """Whether the node is an aten::batch_norm without running statistics, of a value that depends on no input."""
    return node in fixed and node.target is _aten.batch_norm.default and node.args[3:5] == (None, None)


def write_out_batch_norm(program: torch.export.ExportedProgram, node: torch.fx.Node) -> None:
    """Replace an aten::batch_norm in training mode without running statistics by arithmetic."""
    graph, (input, weight, bias) = program.graph, node.args[:3]
    eps = node.args[7]
    rank = input.meta["val"].dim()  # type: ignore[union-attr]
    axes = [axis for axis in range(rank) if axis != 1]

    def call(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        made = graph.call_function(target, args, kwargs)
        made.meta = dict(node.meta)
        made.meta["val"] = target(
            *(arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in args), **kwargs
        )
        return made

    with graph.inserting_before(node):
        centred = call(_aten.sub.Tensor, input, call(_aten.mean.dim, input, axes, True))
        variance = call(_aten.mean.dim, call(_aten.mul.Tensor, centred, centred), axes, True)
        result = call(_aten.mul.Tensor, centred, call(_aten.rsqrt.default, call(_aten.add.Scalar, variance, eps)))
        shape = [-1 if axis == 1 else 1 for axis in range(rank)]
        for operator, operand in ((_aten.mul.Tensor, weight), (_aten.add.Tensor, bias)):
            if operand is not None:
                result = call(operator, result, call(_aten.view.default, operand, shape))
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def evaluate(model: ir.Model) -> None:
    """Replace, in place, values that depend only on initializers by constants, if they are worth it (`_LEFT`).

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
