"""Sets of float inputs for operators that standard normal numbers hardly reach.

    IsNaN, Equal (x, x)                       NaN
    IsInf                                     infinities
    ArgMax, TopK, Hardmax, Unique, ...        equal numbers
    x > 0.3, Equal, Round, Floor, ...         multiples of 1/2, and numbers equal to the constant
    x > 1000, Clip, Min, Max, Add             numbers beyond the constant
    a mask among the inputs                   truth values that are all true

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

# Texts, and constants that inputs are made equal to.
_TEXTS, _DISTINCT = 1000, 16
_COMPARING = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Clip", "Min", "Max")
# What is added saturates what follows. Places of biases; the other operands are as large as the data.
_ADDING = {"Add": 0, "Sub": 0, "Gemm": 2, "Conv": 2}
_STEPPING = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "Round", "Floor", "Ceil", "Sign")
_MOVING = ("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split", "Concat")
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
    constants = Constants(model, Shapes(model))
    steps = [node for node in nodes if is_standard(node, *_STEPPING) and _reads_input(node, constants)]
    if steps or any(_asks_for_ties(node) for node in nodes):
        found.append(FloatSet("rounded", numbers=tuple(sorted(_equal_to(steps, constants)))[:_DISTINCT]))
    if any(value.dtype is ir.DataType.BOOL for value in model.graph.inputs):
        found.append(FloatSet("full"))
    largest = max(_thresholds(constants, nodes), default=0.0)
    if largest > LARGEST:
        found.append(FloatSet("normal", _BEYOND * largest))
    return found


def _asks_for_nan(node: ir.Node) -> bool:
    return is_standard(node, "IsNaN") or (is_standard(node, "Equal") and len(set(node.inputs)) == 1)


def _asks_for_ties(node: ir.Node) -> bool:
    return is_standard(node, *_SELECTING) or (is_standard(node, "MaxPool") and len(node.outputs) > 1)


def _reads_input(node: ir.Node, constants: Constants) -> bool:
    """Whether numbers of an input arrive as they are, or plus a constant: they can be equal to a threshold, in any rounding."""
    waiting = [value for value in node.inputs if value is not None]
    while waiting:
        value = waiting.pop()
        made = value.producer()
        if made is None:
            if value.is_graph_input() and value.dtype is not None and value.dtype.is_floating_point():
                return True
        elif is_standard(made, *_MOVING) or (
            is_standard(made, "Add", "Sub") and any(map(constants.is_constant, made.inputs))
        ):
            waiting += [each for each in made.inputs if each is not None]
    return False


def _equal_to(steps: list[ir.Node], constants: Constants) -> set[float]:
    """Return the float constants that inputs are compared with."""
    found: set[float] = set()
    for node in steps:
        for value in node.inputs:
            with contextlib.suppress(Refused):
                array = constants.floats(value, "constant")
                found.update(array.reshape(-1)[:_DISTINCT].tolist())
    return {number for number in found if abs(number) <= _LARGEST_CONSTANT}


def find_texts(model: ir.Model) -> tuple[str, ...]:
    """Return the texts in a model's attributes and constants, which its inputs may be compared with; "a" is in few of them."""
    found = dict.fromkeys(("a", ""))
    for graph in walk.graphs(model):
        tensors = [value.const_value for value in graph.initializers.values() if value.const_value is not None]
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type is ir.AttributeType.STRINGS and not attribute.is_ref():
                    found.update(dict.fromkeys(attribute.as_strings()))
                elif attribute.type is ir.AttributeType.TENSOR and not attribute.is_ref():
                    tensors.append(attribute.as_tensor())
        for tensor in tensors:
            if tensor.dtype is ir.DataType.STRING:
                found.update(
                    dict.fromkeys(each.decode(errors="replace") for each in tensor.numpy().reshape(-1)[:_TEXTS])
                )
    return tuple(found)[:_TEXTS]


def _thresholds(constants: Constants, nodes: list[ir.Node]) -> Iterator[float]:
    """Yield the sizes of float constants that values are compared with, or that are added to them."""
    for node in nodes:
        if not is_standard(node, *_COMPARING, *_ADDING):
            continue
        for value in node.inputs[_ADDING.get(node.op_type, 0) :]:
            with contextlib.suppress(Refused):
                yield _size(constants.floats(value, "constant"))
        if is_standard(node, *_ADDING):
            continue
        with contextlib.suppress(Refused):
            yield _size(np.asarray([get_float(node, "min", 0.0), get_float(node, "max", 0.0)]))


def _size(numbers: np.ndarray) -> float:
    sizes = np.abs(numbers)
    return float(sizes.max(initial=0.0, where=sizes <= _LARGEST_CONSTANT))
