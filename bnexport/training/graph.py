"""From a traced graph to the one that users see: what changes nothing goes, names and groups are set."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript import optimizer

from bnexport import schema
from bnexport.training import kernels
from bnexport.training.description import NEW_SUFFIX

_OURS = {operator.name for operator in schema.OPERATORS}


def finish(model: ir.Model, groups: dict[str, str]) -> None:
    """Simplifies `model` in place.

    State that no computation reads is no input any more, and an output `name.new` that is the input
    `name` is dropped: parameters without gradients, statistics of a batch norm that is fixed. groups:
    what each process group of this process is called in the model.
    """
    graph = model.graph
    graph.name = "bnexport"
    passes.IdentityEliminationPass()(model)
    _drop_unchanged(graph)
    optimizer.fold_constants(model)
    passes.RemoveUnusedNodesPass()(model)
    passes.CommonSubexpressionEliminationPass()(model)
    _drop_inputs(graph, [value for value in graph.inputs if not value.uses() and not value.is_graph_output()])
    for node in model.graph.all_nodes():
        if node.domain == schema.DOMAIN and node.op_type in _OURS:
            model.opset_imports[schema.DOMAIN] = schema.VERSION
            group = node.attributes["group"].as_string()
            node.attributes["group"] = ir.AttrString("group", groups.get(group, group))
            _leave_unused_outputs_empty(node)
        elif node.domain == kernels.DOMAIN:
            model.opset_imports[kernels.DOMAIN] = kernels.VERSION
            _leave_unused_outputs_empty(node)
    passes.RemoveUnusedFunctionsPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    passes.TopologicalSortPass()(model)
    # The exporter's metadata holds stack traces with the user's paths.
    passes.ClearMetadataAndDocStringPass()(model)


def _leave_unused_outputs_empty(node: ir.Node) -> None:
    """The kernels compute what has a name; a gradient that does not exist must not have one."""
    for output in node.outputs:
        if not output.uses() and not output.is_graph_output():
            output.name, output.type, output.shape = "", None, None


def uses_library(model: ir.Model) -> bool:
    """Whether a session needs the custom-op library for `model`."""
    return schema.DOMAIN in model.opset_imports or kernels.DOMAIN in model.opset_imports


def keep_outputs(model: ir.Model, names: Iterable[str]) -> None:
    """Leaves the outputs `names`, and the inputs that they need."""
    kept = set(names)
    model.graph.outputs[:] = [output for output in model.graph.outputs if output.name in kept]
    passes.RemoveUnusedNodesPass()(model)
    inputs = model.graph.inputs
    _drop_inputs(model.graph, [value for value in inputs if not value.uses() and not value.is_graph_output()])


def _drop_unchanged(graph: ir.Graph) -> None:
    """Outputs `name.new` that are nothing but a copy of the input `name`."""
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
