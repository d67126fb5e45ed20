"""Sizes that a model computes with Python's floats, in float64; exporters write float32.

    100 * 2.3 is 229.99... in float64 and 230 in float32

A Resize by such a factor keeps its factor, which says where its pixels are, and its result is cut:

    x -> Resize(scales) -> Slice to floor(size * factor)     scales rounded up: the result is never smaller than that
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import onnx_ir.convenience
import sympy  # type: ignore[import-untyped]
import torch

from bnexport import torch_versions
from bnexport.graph.nodes import get_string, is_standard

# Sizes at which both types are compared.
_SIZES = np.arange(1, 1 << 16)
_FRACTION = 64
_EXACT = {"ToFloat", "TruncToInt", "FloorToInt", "CeilToInt", "FloorDiv", "Mod", "PythonMod"}
_DOUBLE = int(ir.DataType.DOUBLE)


def is_exact(factor: float) -> bool:
    """Whether float32 computes the size of every image resized by a factor."""
    rounded = np.floor(_SIZES.astype(np.float32) * np.float32(factor))
    return np.array_equal(rounded, np.floor(_SIZES * factor))


def write_resizes(model: ir.Model, factors: Mapping[float, float]) -> None:
    """Cut the results of Resize nodes to the sizes of torch, in place; those to the nearest value are `AnySize`'s.

    factors: by what they are in float32.
    """
    for node in list(model.graph.all_nodes()):
        if not is_standard(node, "Resize") or get_string(node, "mode", "nearest") == "nearest":
            continue
        scales = _scales(node)
        exact = [] if scales is None else [factors.get(float(scale), float(scale)) for scale in scales]
        if scales is not None and not all(map(is_exact, exact)):
            _cut(node, scales, exact)


def _scales(node: ir.Node) -> np.ndarray | None:
    """Return the constant scales of a Resize. The TorchScript exporter joins them from two constants."""
    value = node.inputs[2] if len(node.inputs) > 2 else None
    joined = None if value is None else value.producer()
    parts = [value] if joined is None or joined.op_type != "Concat" else joined.inputs
    tensors = [None if part is None else ir.convenience.get_const_tensor(part) for part in parts]
    arrays = [tensor.numpy() for tensor in tensors if tensor is not None]
    return np.concatenate(arrays) if arrays and len(arrays) == len(tensors) else None


def _cut(node: ir.Node, scales: np.ndarray, factors: list[float]) -> None:
    (result,) = node.outputs
    shape = ir.node("Shape", [node.inputs[0]], attributes={"start": 2})
    wide = ir.node("Cast", shape.outputs, attributes={"to": _DOUBLE})
    product = ir.node("Mul", [wide.outputs[0], (by := _constant(np.array(factors[2:]))).outputs[0]])
    sizes = ir.node("Cast", product.outputs, attributes={"to": int(ir.DataType.INT64)})
    node.prepend([shape, wide, by, product, sizes])
    if get_string(node, "coordinate_transformation_mode", "half_pixel") == "align_corners":  # by sizes alone
        batch = ir.node("Shape", [node.inputs[0]], attributes={"start": 0, "end": 2})
        whole = ir.node("Concat", [batch.outputs[0], sizes.outputs[0]], attributes={"axis": 0})
        node.prepend([batch, whole])
        node.resize_inputs(4)
        node.replace_input_with(2, None)
        node.replace_input_with(3, whole.outputs[0])
        return
    above = np.where(scales < factors, np.nextafter(scales, np.float32(np.inf)), scales)
    axes = np.arange(2, len(scales))
    added = [_constant(each) for each in (above, 0 * axes, axes)]
    node.prepend(added[0])
    node.replace_input_with(2, added[0].outputs[0])
    operands = [result, added[1].outputs[0], sizes.outputs[0], added[2].outputs[0]]
    cut = ir.node("Slice", operands, metadata_props=node.metadata_props)
    cut.outputs[0].type, cut.outputs[0].shape = result.type, result.shape
    result.shape = None
    node.append([*added[1:], cut])
    ir.convenience.replace_all_uses_with(result, cut.outputs[0], replace_graph_outputs=True)
    cut.replace_input_with(0, result)


def _constant(array: np.ndarray) -> ir.Node:
    return ir.node("Constant", [], attributes={"value": ir.tensor(array)})


def write_sizes(exported: torch.onnx.ONNXProgram, numbers: Mapping[float, float]) -> None:
    """Compute integers made of floats of sizes, such as int(height * 0.7), in float64.

    A value in the file has the name of the node of the program. numbers: of the program, by what they are in float32.
    """
    assert exported.exported_program is not None
    nodes = {node.name: node for node in exported.exported_program.graph.nodes if _is_symbolic(node)}
    floats = {name for name, node in nodes.items() if isinstance(node.meta["val"], torch.SymFloat)}
    graph = exported.model.graph
    values = {value.name: value for node in graph for value in node.outputs}
    twins: dict[ir.Value, ir.Value] = {}

    def twin(value: ir.Value, before: ir.Node) -> ir.Value:
        """Return the value in float64."""
        if value in twins:
            return twins[value]
        node, tensor = value.producer(), ir.convenience.get_const_tensor(value)
        if tensor is not None and tensor.dtype == ir.DataType.FLOAT:
            rounded = float(tensor.numpy())
            own = _constant(np.array(numbers.get(rounded, rounded)))
        elif node is not None and value.name in floats and node.op_type != "Cast":
            operands = [None if each is None else twin(each, before) for each in node.inputs]
            own = ir.node(node.op_type, operands, attributes=node.attributes)
        else:
            source = node.inputs[0] if node is not None and node.op_type == "Cast" else value
            own = ir.node("Cast", [source], attributes={"to": _DOUBLE})
        own.outputs[0].type, own.outputs[0].shape = ir.TensorType(ir.DataType.DOUBLE), value.shape
        before.prepend(own)
        twins[value] = own.outputs[0]
        return own.outputs[0]

    for name, node in nodes.items():
        operands = {operand.name for operand in node.all_input_nodes} & floats
        value = None if name in floats or not operands or _is_short(node.meta["val"].node.expr) else values.get(name)
        while value is not None and (user := value.producer()) is not None:
            value = user.inputs[0]
            if value is not None and value.name in operands:
                user.replace_input_with(0, twin(value, user))
                break
            if value is not None:
                value.type = ir.TensorType(ir.DataType.DOUBLE)


def _is_symbolic(node: torch.fx.Node) -> bool:
    """Whether a node is arithmetic on sizes, of Python's operators and functions."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat)) and not isinstance(
        node.target, torch_versions.Operator
    )


def _is_short(expression: sympy.Expr) -> bool:
    """Whether float32 computes an expression exactly: sizes of 12 bits times factors of 12 bits, without divisions."""
    names = {type(each).__name__ for each in expression.atoms(sympy.Function)}
    return names <= _EXACT and all(
        (number * _FRACTION).is_integer() for number in map(float, expression.atoms(sympy.Float))
    )
