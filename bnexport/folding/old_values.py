"""Outputs that carried updated statistics return the old ones."""

from __future__ import annotations

import onnx_ir as ir

from bnexport.folding.context import Context


def return_old(output: ir.Value, old: ir.Value, node: ir.Node, context: Context) -> None:
    """Whatever reads `output`, a statistic that `node` updates, reads `old`; a graph output keeps its name."""
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
    for index, value in enumerate(graph.outputs):
        if value is output:
            graph.outputs[index] = same
