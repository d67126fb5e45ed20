"""Scopes of a model: each graph that imports its own opset, with its subgraphs."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from bnexport.folding.context import Context, Options
from bnexport.folding.converting.sync_bn import FALLBACK_OPSET
from bnexport.graph.names import Names
from bnexport.graph.shapes import Shapes
from bnexport.graph.surgery import Surgery
from bnexport.graph.sync_bn_nodes import is_portable_body, is_sync_batch_norm


@dataclasses.dataclass(frozen=True)
class Scope:
    """A graph with its subgraphs, under one opset: the main graph, or a function."""

    name: str
    graphs: tuple[ir.Graph, ...]
    context: Context


def scopes(model: ir.Model, options: Options, surgery: Surgery) -> tuple[Scope, ...]:
    """Return the main graph, then the functions; portable bodies are left out."""
    names, shapes = Names(model), Shapes(model, surgery)

    def scope(name: str, graph: ir.Graph, *, in_function: bool) -> Scope:
        # The standard domain has two names.
        opset = graph.opset_imports.get("", graph.opset_imports.get("ai.onnx", 0))
        context = Context(model, opset, names, shapes, surgery, options, in_function=in_function)
        return Scope(name, (graph, *graph.subgraphs()), context)

    functions = (function for function in model.functions.values() if not is_portable_body(function))
    return (
        scope("main graph", model.graph, in_function=False),
        *(scope(f"function {function.name}", function.graph, in_function=True) for function in functions),
    )


def import_standard_operators(scope: Scope) -> None:
    """Import the standard opset if the graph lacks it: inserted nodes need one."""
    if scope.context.opset:
        return
    nodes = [node for graph in scope.graphs for node in graph]
    if not any(is_sync_batch_norm(node) for node in nodes):
        return
    if not any(node.domain == "" and not is_sync_batch_norm(node) for node in nodes):
        scope.graphs[0].opset_imports[""] = scope.context.opset = FALLBACK_OPSET
