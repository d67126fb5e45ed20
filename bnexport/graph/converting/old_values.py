"""Outputs for updated statistics or batch counters, redirected to the old values."""

from __future__ import annotations

import onnx_ir as ir

from bnexport import schema
from bnexport.graph.scopes import GraphContext

_COUNTER = ".num_batches_tracked"


def return_old_counters(graph: ir.Graph, context: GraphContext) -> None:
    """Redirect the outputs of batch counters, which are written with the statistics, to their old values."""
    outputs = {str(value.name) for value in graph.outputs}
    for output in tuple(graph.outputs):
        name = str(output.name)
        old = graph.initializers.get(name.removesuffix(schema.NEW_SUFFIX))
        node = output.producer()
        if not name.endswith(_COUNTER + schema.NEW_SUFFIX) or old is None or node is None:
            continue
        statistics = (name.replace(_COUNTER, f".{kind}") for kind in ("running_mean", "running_var"))
        if outputs.issuperset(statistics):
            return_old(output, old, node, context)
            context.surgery.may_be_unused(output)


def return_old(output: ir.Value, old: ir.Value, node: ir.Node, context: GraphContext) -> None:
    """Redirect readers of `output`, a statistic that `node` updates, to `old`; a graph output keeps its name."""
    graph = node.graph
    assert graph is not None
    for use in output.uses():
        use.node.replace_input_with(use.idx, old)
    if not output.is_graph_output():
        return
    identity = ir.Node("", "Identity", [old], name=context.names.fresh(f"{output.name}.unchanged"))
    same = identity.outputs[0]
    same.name, same.type, same.shape = output.name, output.type or old.type, output.shape or old.shape
    graph.insert_before(node, identity)
    context.surgery.replace_output(output, same)
