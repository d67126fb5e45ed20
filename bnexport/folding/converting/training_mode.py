"""Conversion of BatchNormalization in training mode to inference, only on request.

The node stays; training_mode (or is_test, or the extra outputs) goes. Its updated statistics become the
old ones, as for MMCVSyncBatchNorm.
"""

from __future__ import annotations

import onnx_ir as ir

from bnexport.folding.context import Context
from bnexport.folding.converting.old_values import return_old
from bnexport.folding.converting.sync_bn import Conversion
from bnexport.graph.batch_norm import is_training
from bnexport.graph.nodes import input_at, is_standard, label, used
from bnexport.graph.refusal import Refused


def convert(context: Context, graphs: list[ir.Graph]) -> list[Conversion]:
    """Convert every BatchNormalization in training mode to inference."""
    conversions = []
    for graph in graphs:
        for node in tuple(graph):
            if not is_standard(node, "BatchNormalization"):
                continue
            name = label(node)
            try:
                if not is_training(node, context.opset):
                    continue
                _convert(node, context)
                conversions.append(Conversion(name, "BatchNormalization", True, node))
            except Refused as reason:
                conversions.append(Conversion(name, "BatchNormalization", True, None, reason))
    return conversions


def _convert(node: ir.Node, context: Context) -> None:
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
