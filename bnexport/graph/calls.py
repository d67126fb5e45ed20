"""Call graph of model-local functions, and the size of a model after inlining.

Functions that call each other twice, level by level, double in size with every level: a file of a few
kilobytes can stand for more nodes than fit in memory. What looks through calls asks `expanded_sizes` first.
"""

from __future__ import annotations

import graphlib

import onnx_ir as ir

from bnexport.model_io import walk


def callers_first(model: ir.Model) -> list[ir.OperatorIdentifier]:
    """Return the functions of a model, callers before callees. model_io refuses recursion."""
    order: graphlib.TopologicalSorter[ir.OperatorIdentifier] = graphlib.TopologicalSorter()
    for key, function in model.functions.items():
        order.add(key)
        for node in function.all_nodes():
            if node.op_identifier() in model.functions:
                order.add(node.op_identifier(), key)
    return list(order.static_order())


def expanded_sizes(model: ir.Model) -> tuple[int, dict[ir.OperatorIdentifier, int]]:
    """Count nodes of the main graph and of each function as if every call were inlined."""
    sizes: dict[ir.OperatorIdentifier, int] = {}
    for key in reversed(callers_first(model)):
        sizes[key] = sum(1 + sizes.get(node.op_identifier(), 0) for node in model.functions[key].all_nodes())
    graphs = (model.graph, *model.graph.subgraphs())
    main = sum(1 + sizes.get(node.op_identifier(), 0) for graph in graphs for node in graph)
    return main, sizes


def calls(model: ir.Model) -> dict[ir.OperatorIdentifier, list[ir.Node]]:
    """Return the nodes that call each function."""
    found: dict[ir.OperatorIdentifier, list[ir.Node]] = {}
    for node in walk.nodes(model):
        if node.op_identifier() in model.functions:
            found.setdefault(node.op_identifier(), []).append(node)
    return found
