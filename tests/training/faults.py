"""Wrong gradients, planted into the graph of an exported step: what verification must not pass.

scale: the gradient of one weight is 1 % too large. term: one of two gradients that are added is left out. operand: two operands change
places, or another tensor of the same shape is read.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

KINDS = ("scale", "term", "operand")
_SWAPPED = {"ReluGrad", "Sub", "Div", "MMCVSyncBatchNormGrad", "ConvWeightGrad", "MatMul", "Gemm", "ConvInputGrad"}


def planted(model: ir.Model, gradients: Sequence[str], kind: str, seed: int = 0) -> ir.Model | None:
    """A copy of the graph with one fault of a kind, at a place drawn by seed; None where there is no such place.

    gradients: names of the parameters that have gradients.
    """
    wrong = ir.from_proto(ir.to_proto(model))
    graph = wrong.graph
    backward = _backward(graph, gradients)
    random.Random(seed).shuffle(backward)
    return wrong if any(True for node in backward if _FAULTS[kind](graph, node)) else None


def _backward(graph: ir.Graph, gradients: Sequence[str]) -> list[ir.Node]:
    """Nodes on which gradients depend and the loss does not, as shapes are known."""
    forward = makers([value for value in graph.outputs if value.name == "loss"])
    names = {f"{name}.grad" for name in gradients}
    made = [value for node in graph for value in node.outputs if value.name in names]
    reached = makers(made) - forward
    return [node for node in graph if node in reached and node.op_type not in ("Constant", "Shape")]


def makers(values: Iterable[ir.Value]) -> set[ir.Node]:
    found: set[ir.Node] = set()
    waiting = [value.producer() for value in values]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [value.producer() for value in node.inputs if value is not None]
    return found


def _size(value: ir.Value | None) -> tuple[Any, ...] | None:
    """The shape of floating-point data of some size; small vectors may be all but zero."""
    if value is None or value.shape is None or value.dtype != ir.DataType.FLOAT:
        return None
    shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
    return shape if len(shape) >= 2 else None


def scale(graph: ir.Graph, node: ir.Node, output: ir.Value, factor: float) -> None:
    """Multiply an output of the node, for all that read it; the product takes its name."""
    users = list(output.uses())
    constant = ir.node("Constant", [], attributes={"value": ir.tensor(np.array(factor, np.float32))})
    product = ir.node("Mul", [output, constant.outputs[0]])
    made, name = product.outputs[0], output.name
    output.name, made.name, constant.outputs[0].name = f"{name}.right", name, f"{name}.factor"
    made.type, made.shape = output.type, output.shape
    graph.insert_after(node, [constant, product])
    for user, index in users:
        user.replace_input_with(index, made)


def _scale(graph: ir.Graph, node: ir.Node) -> bool:
    output = next((value for value in node.outputs if str(value.name).endswith(".grad")), None)
    if _size(output) is None or output is None:
        return False
    scale(graph, node, output, 1.01)
    return True


def _term(graph: ir.Graph, node: ir.Node) -> bool:
    sizes = [_size(value) for value in node.inputs]
    if node.op_type not in ("Add", "Sum") or None in sizes or len(set(sizes)) != 1:
        return False
    for user, index in list(node.outputs[0].uses()):
        user.replace_input_with(index, node.inputs[0])
    return bool(node.inputs[0])


def _operand(graph: ir.Graph, node: ir.Node) -> bool:
    if node.op_type not in _SWAPPED or len(node.inputs) < 2:
        return False
    first, second = node.inputs[:2]
    if first is None or second is None or first is second or _size(first) is None or _size(first) != _size(second):
        return False
    node.replace_input_with(0, second)
    node.replace_input_with(1, first)
    return True


_FAULTS: dict[str, Callable[[ir.Graph, ir.Node], bool]] = {"scale": _scale, "term": _term, "operand": _operand}
