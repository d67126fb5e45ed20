"""Completion of a traced training graph: simplification, names and groups."""

from __future__ import annotations

import math
from collections.abc import Iterable

import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript import optimizer

from bnexport import schema
from bnexport.graph.converting.identities import remove_identities
from bnexport.graph.versions import set_lowest_ir_version
from bnexport.schema import NEW_SUFFIX
from bnexport.training.building import contract

_OURS = {operator.name: operator for operator in schema.OPERATORS}
_OF_TRAINING = {operator.name: operator for operator in contract.OPERATORS}


def finish(model: ir.Model, groups: dict[str, str]) -> None:
    """Simplify `model` in place.

    State that no computation reads is no input any more, and an output `name.new` that is the input
    `name` is dropped: parameters without gradients, statistics of a batch norm that is fixed. groups:
    what each process group of this process is called in the model.
    """
    graph = model.graph
    graph.name = "bnexport"
    remove_identities(model)
    _drop_unchanged(graph)
    optimizer.fold_constants(model)
    passes.RemoveUnusedNodesPass()(model)
    passes.CommonSubexpressionEliminationPass()(model)
    _drop_inputs(graph, [value for value in graph.inputs if not value.uses() and not value.is_graph_output()])
    _mask_by_outputs(graph)
    for node in model.graph.all_nodes():
        if node.domain == schema.DOMAIN and node.op_type in _OURS:
            model.opset_imports[schema.DOMAIN] = schema.VERSION
            group = node.attributes["group"].as_string()
            node.attributes["group"] = ir.AttrString("group", groups.get(group, group))
            _leave_unused_outputs_empty(node, _OURS[node.op_type])
        elif node.domain == contract.DOMAIN:
            model.opset_imports[contract.DOMAIN] = contract.VERSION
            _leave_unused_outputs_empty(node, _OF_TRAINING[node.op_type])
    passes.RemoveUnusedFunctionsPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    set_lowest_ir_version(model)
    passes.TopologicalSortPass()(model)
    # The exporter's metadata holds stack traces with the user's paths.
    passes.ClearMetadataAndDocStringPass()(model)


def _mask_by_outputs(graph: ir.Graph) -> None:
    """Let ReluGrad read the output of a Relu or Clip instead of its input: the same mask, and one saved activation
    less.

    What follows a ReLU saves its output anyway.
    """
    for node in graph:
        if node.domain != contract.DOMAIN or node.op_type != contract.RELU_GRAD.name:
            continue
        value = node.inputs[1]
        assert value is not None
        forward = next((user for user in value.consumers() if _bounds(user) == _gradient_bounds(node)), None)
        if forward is not None:
            node.replace_input_with(1, forward.outputs[0])


def _gradient_bounds(node: ir.Node) -> tuple[float, float]:
    low, high = node.attributes.get("low"), node.attributes.get("high")
    return (0.0 if low is None else low.as_float()), (math.inf if high is None else high.as_float())


def _bounds(node: ir.Node) -> tuple[float, float] | None:
    """Return the bounds of a Relu or of a Clip to constants, or None."""
    if node.domain != "" or node.op_type not in ("Relu", "Clip"):
        return None
    if node.op_type == "Relu":
        return 0.0, math.inf
    limits = [
        None if value is None else ir.convenience.get_const_tensor(value) for value in (*node.inputs, None, None)[1:3]
    ]
    if any(limit is None and value is not None for limit, value in zip(limits, node.inputs[1:3])):
        return None
    low, high = (None if limit is None else float(limit.numpy()) for limit in limits)
    return (-math.inf if low is None else low), (math.inf if high is None else high)


def _leave_unused_outputs_empty(node: ir.Node, operator: schema.Operator) -> None:
    """Clear the names of unused optional outputs: the kernels compute every named one."""
    for output, declared in zip(node.outputs, operator.outputs):
        if declared.optional and not output.uses() and not output.is_graph_output():
            output.name, output.type, output.shape = "", None, None


def uses_library(model: ir.Model) -> bool:
    """Whether a session needs the custom-op library for `model`."""
    return schema.DOMAIN in model.opset_imports or contract.DOMAIN in model.opset_imports


def keep_outputs(model: ir.Model, names: Iterable[str]) -> None:
    """Reduce the graph to the outputs `names` and the inputs that they need."""
    kept = set(names)
    model.graph.outputs[:] = [output for output in model.graph.outputs if output.name in kept]
    passes.RemoveUnusedNodesPass()(model)
    inputs = model.graph.inputs
    _drop_inputs(model.graph, [value for value in inputs if not value.uses() and not value.is_graph_output()])


def _drop_unchanged(graph: ir.Graph) -> None:
    """Remove outputs `name.new` that are only a copy of the input `name`."""
    graph.outputs[:] = [output for output in graph.outputs if not _is_copy(output)]


def _is_copy(output: ir.Value) -> bool:
    producer = output.producer()
    if producer is None or producer.op_type != "Identity":
        return False
    source = producer.inputs[0]
    return source is not None and source.is_graph_input() and output.name == f"{source.name}{NEW_SUFFIX}"


def _drop_inputs(graph: ir.Graph, values: list[ir.Value]) -> None:
    dropped = {id(value) for value in values}
    graph.inputs[:] = [value for value in graph.inputs if id(value) not in dropped]
