"""Removal of Identity nodes, and what keeps passes of other packages from breaking the outputs of bodies.

    y = Identity(x)    readers of y read x. Where y is an output of its graph, x takes its place and its name,
                       if a node of the same graph makes x and x is no output itself; else the node stays

ONNX Runtime loads no body that returns a value of an outer graph, and onnx-ir lets no value be an output of two
graphs. The passes of onnx-ir and onnxscript do not look: what replaces an output may be such a value. So during
their work each output of a body or function is made by a node of its own, which they do not know.
"""

from __future__ import annotations

import onnx_ir as ir

from bnexport.graph.names import Names
from bnexport.graph.nodes import is_standard
from bnexport.model_io import walk

_GUARD = "bnexport.guard"


def remove_identities(model: ir.Model) -> None:
    """Remove Identity nodes in place; names of outputs stay."""
    for graph in list(walk.graphs(model)):
        for node in [node for node in graph if is_standard(node, "Identity")]:
            _remove(node, graph)


def _remove(node: ir.Node, graph: ir.Graph) -> None:
    if len(node.inputs) != 1 or len(node.outputs) != 1 or node.inputs[0] is None:
        return
    source, output = node.inputs[0], node.outputs[0]
    is_output, maker = output.is_graph_output(), source.producer()
    if is_output and (maker is None or maker.graph is not graph or source.is_graph_output()):
        return
    source.type, source.shape = source.type or output.type, source.shape or output.shape
    output.replace_all_uses_with(source, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    if is_output:
        source.name, output.name = output.name, None


def guard_outputs(model: ir.Model) -> None:
    """Make each output of a body or function by a node of no known operator, in place."""
    names = Names(model)
    for graph in list(walk.graphs(model)):
        for place, output in enumerate(() if graph is model.graph else tuple(graph.outputs)):
            # The number keeps two guards from being one repeated expression.
            guard = ir.node(_GUARD, [output], {"place": place}, domain=_GUARD)
            value = guard.outputs[0]
            value.type, value.shape, value.name = output.type, output.shape, names.fresh(f"{output.name}.returned")
            maker = output.producer()
            if maker is not None and maker.graph is graph:
                value.name, output.name = output.name, value.name
            graph.append(guard)
            graph.outputs[place] = value


def open_guards(model: ir.Model, *, inlined: bool = False) -> None:
    """Turn guards into Identity nodes. inlined: only those whose body has become a part of the graph around it."""
    for node in walk.nodes(model):
        if node.domain == _GUARD and not (
            inlined and node.outputs[0].is_graph_output() and node.graph is not model.graph
        ):
            node.domain, node.op_type = "", "Identity"
            node.attributes.clear()
