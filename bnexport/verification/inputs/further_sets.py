"""Sets of float inputs for operators that standard normal numbers hardly reach.

    IsNaN, Equal (x, x)                       NaN
    IsInf                                     infinities
    ArgMax, TopK, Hardmax, Unique, ...        equal numbers
    x > 1000, Clip, Min, Max                  numbers beyond the constant

They are drawn only where the reference has such an operator, and only refute. NaN passes sums and products of any form;
infinities of both signs may cancel in one form only, and are for IsInf alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from bnexport.graph.constants import Constants
from bnexport.graph.nodes import get_float, is_standard
from bnexport.graph.refusal import Refused
from bnexport.graph.shapes import Shapes
from bnexport.model_io import walk
from bnexport.verification.inputs.samples import LARGEST, FloatSet

_COMPARING = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Clip", "Min", "Max")
_SELECTING = ("ArgMax", "ArgMin", "TopK", "Hardmax", "Unique")
# Normal numbers of four times a constant's size lie on both sides of it. Larger ones than the last are no thresholds.
_BEYOND = 4.0
_LARGEST_CONSTANT = 1e6


def find_further(model: ir.Model) -> list[FloatSet]:
    """Return the sets that the operators of a model ask for."""
    nodes = [node for graph in walk.graphs(model) for node in graph]
    found = []
    if any(_asks_for_nan(node) for node in nodes):
        found.append(FloatSet("nan"))
    if any(is_standard(node, "IsInf") for node in nodes):
        found.append(FloatSet("infinite"))
    if any(_asks_for_ties(node) for node in nodes):
        found.append(FloatSet("rounded"))
    largest = max(_thresholds(model, nodes), default=0.0)
    if largest > LARGEST:
        found.append(FloatSet("normal", _BEYOND * largest))
    return found


def _asks_for_nan(node: ir.Node) -> bool:
    return is_standard(node, "IsNaN") or (is_standard(node, "Equal") and len(set(node.inputs)) == 1)


def _asks_for_ties(node: ir.Node) -> bool:
    return is_standard(node, *_SELECTING) or (is_standard(node, "MaxPool") and len(node.outputs) > 1)


def _thresholds(model: ir.Model, nodes: list[ir.Node]) -> Iterator[float]:
    """Yield the sizes of float constants that values are compared with."""
    compared = [node for node in nodes if is_standard(node, *_COMPARING)]
    if not compared:
        return
    constants = Constants(model, Shapes(model))
    for node in compared:
        for value in node.inputs:
            with contextlib.suppress(Refused):
                yield _size(constants.floats(value, "constant"))
        with contextlib.suppress(Refused):
            yield _size(np.asarray([get_float(node, "min", 0.0), get_float(node, "max", 0.0)]))


def _size(numbers: np.ndarray) -> float:
    sizes = np.abs(numbers)
    return float(sizes.max(initial=0.0, where=sizes <= _LARGEST_CONSTANT))
