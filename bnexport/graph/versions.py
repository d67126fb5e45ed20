"""Versions of a model: of its operators, and the lowest one of the file format that holds it."""

from __future__ import annotations

import onnx
import onnx_ir as ir

# The first with model-local functions.
_FUNCTIONS = 8


def set_lowest_ir_version(model: ir.Model) -> None:
    """Set the lowest IR version that has the opset, and functions: a newer one keeps the file from older runtimes."""
    opset = model.opset_imports.get("")
    lowest = 0 if opset is None else onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])
    model.ir_version = max(lowest, _FUNCTIONS)


def opsets(model: ir.Model) -> dict[ir.Graph, int]:
    """Return the opset of the standard operators in each graph; 0 where none is imported."""
    found: dict[ir.Graph, int] = {}
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        # The standard domain has two names.
        version = graph.opset_imports.get("", graph.opset_imports.get("ai.onnx", 0))
        found.update(dict.fromkeys((graph, *graph.subgraphs()), version))
    return found
