"""Conversion of BatchNormalization in training mode to inference, only on request.

The node stays; training_mode (or is_test, or the extra outputs) goes. Its updated statistics become the
old ones, as for MMCVSyncBatchNorm.
"""

from __future__ import annotations

import onnx_ir as ir

from bnexport.graph.batch_norm import is_training
from bnexport.graph.converting.old_values import return_old
from bnexport.graph.nodes import input_at, is_standard, used
from bnexport.graph.refusal import Refused
from bnexport.graph.scopes import GraphContext


def trains(node: ir.Node, context: GraphContext) -> bool:
    """Whether a node is a BatchNormalization in training mode. Raises Refused where its attribute cannot be read."""
    return is_standard(node, "BatchNormalization") and is_training(node, context.opset)


def convert_node(node: ir.Node, context: GraphContext) -> ir.Node:
    """Convert a BatchNormalization in training mode to inference. Raises Refused."""
    mean, var = input_at(node, 3), input_at(node, 4)
    if mean is None or var is None:
        raise Refused("no-statistics", "it has no running statistics")
    if any(used(output) for output in node.outputs[3:]):
        raise Refused("statistics-used", "the statistics of the batch are used")
    for output, old in zip(node.outputs[1:3], (mean, var), strict=False):
        return_old(output, old, node, context)
    node.resize_outputs(1)
    node.attributes.pop("training_mode", None)
    if context.opset < 7:
        node.attributes["is_test"] = ir.AttrInt64("is_test", 1)
    return node
