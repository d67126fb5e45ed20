"""Casts around BatchNormalization whose parameters have another type than its data, before opset 15.

MMCVSyncBatchNorm keeps float32 statistics beside float16 data; BatchNormalization can do so from opset 15
on. What the rules leave of such nodes in older models is put between two Casts.
"""

from __future__ import annotations

import onnx_ir as ir

from bnexport.graph.names import Names
from bnexport.graph.nodes import is_standard, label
from bnexport.graph.shapes import Shapes

_MIXED_TYPES_OPSET = 15


def insert_casts(model: ir.Model) -> None:
    """Insert data -> Cast -> BatchNormalization -> Cast if the opset requires a single type."""
    owners = [model.graph, *(function.graph for function in model.functions.values())]
    names, shapes = Names(model), Shapes(model)
    for owner in owners:
        if owner.opset_imports.get("", _MIXED_TYPES_OPSET) >= _MIXED_TYPES_OPSET:
            continue
        for graph in (owner, *owner.subgraphs()):
            for node in tuple(graph):
                if is_standard(node, "BatchNormalization") and len(node.inputs) == 5:
                    _cast(node, graph, names, shapes)


def _cast(node: ir.Node, graph: ir.Graph, names: Names, shapes: Shapes) -> None:
    data, mean = node.inputs[0], node.inputs[3]
    data_type = None if data is None else shapes.dtype(data)
    parameter_type = None if mean is None else shapes.dtype(mean)
    if data is None or data_type is None or parameter_type is None or data_type == parameter_type:
        return
    before = ir.Node(
        "", "Cast", [data], [ir.AttrInt64("to", parameter_type.value)], name=names.fresh(f"{label(node)}.cast_in")
    )
    after = ir.Node(
        "", "Cast", [None], [ir.AttrInt64("to", data_type.value)], name=names.fresh(f"{label(node)}.cast_out")
    )
    inner, outer = node.outputs[0], after.outputs[0]
    before.outputs[0].name = names.fresh(f"{data.name}.cast")
    before.outputs[0].type, before.outputs[0].shape = ir.TensorType(parameter_type), data.shape
    graph.insert_before(node, before)
    outer.name, outer.type, outer.shape = inner.name, ir.TensorType(data_type), inner.shape
    graph.insert_after(node, after)
    inner.replace_all_uses_with(outer, replace_graph_outputs=True)
    inner.name, inner.type = names.fresh(f"{inner.name}.uncast"), ir.TensorType(parameter_type)
    after.replace_input_with(0, inner)
    node.replace_input_with(0, before.outputs[0])
