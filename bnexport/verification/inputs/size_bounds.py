"""Sizes beyond the constants of a graph: where it computes with sizes, another branch or row may be taken there."""

from __future__ import annotations

import contextlib

import onnx_ir as ir

from bnexport.graph.constants import Constants
from bnexport.graph.nodes import is_standard
from bnexport.graph.refusal import Refused
from bnexport.graph.shapes import Shapes
from bnexport.model_io import walk

_COMPUTING = (
    "Min",
    "Max",
    "Clip",
    "Less",
    "LessOrEqual",
    "Greater",
    "GreaterOrEqual",
    "Equal",
    "Mod",
    "Sub",
    "Div",
    "Range",
    "Slice",
)
_TAKING = ("Gather", "Slice", "GatherND", "Resize")
_LARGEST, _TABLES = 4096, 4
# Sizes where the graph has no constants, larger and smaller ones.
_USUAL = (257, 33)


def find_bounds(*models: ir.Model) -> list[int]:
    """Return sizes to try for one dimension until one runs, largest first: beyond each constant, all of a table, usual ones.

    Nothing where no model reads a size.
    """
    numbers: set[int] = set()
    tables: set[int] = set()
    reads_sizes = False
    for model in models:
        nodes = [node for graph in walk.graphs(model) for node in graph]
        if not any(is_standard(node, "Shape", "Size") for node in nodes):
            continue
        reads_sizes = True
        constants = Constants(model, Shapes(model))
        for node in nodes:
            if is_standard(node, *_COMPUTING):
                for value in node.inputs:
                    with contextlib.suppress(Refused):
                        numbers.update(constants.ints(value, "constant"))
            if is_standard(node, *_TAKING) and node.inputs and not all(map(constants.is_constant, node.inputs)):
                with contextlib.suppress(Refused):
                    tables.update(constants.describe(node.inputs[0], "table").shape)
    if not reads_sizes:
        return []
    beyond = {2 * each + 1 for each in numbers if 1 < each < _LARGEST // 2}
    whole = {each for each in tables if _USUAL[1] < each <= _LARGEST}
    return sorted({*sorted(beyond)[-1:], *sorted(whole)[-_TABLES:], *_USUAL}, reverse=True)
