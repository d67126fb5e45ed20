"""Batch norm in training that an exporter wrote out as a mean over the batch and a difference.

    m = ReduceMean(x, axes), d = Sub(x, m)        axes hold the batch (0) and not the channels (1)

Its statistics are those of the batch, so nothing can be folded. It is reported, since a user who looks
for a batch norm should find out why it is still there.
"""

from __future__ import annotations

import onnx_ir as ir

from bnexport.folding.context import Context
from bnexport.folding.nodes import get_ints, input_at, is_standard
from bnexport.folding.refusal import Refused

REASON = Refused("training", "it subtracts the mean of the batch: a batch norm in training, written out")


def training_sites(graph: ir.Graph, context: Context) -> list[ir.Node]:
    """The Sub nodes of batch norms in training that are written out."""
    return [node for node in graph if is_standard(node, "Sub") and _subtracts_batch_mean(node, context)]


def _subtracts_batch_mean(node: ir.Node, context: Context) -> bool:
    data, mean = input_at(node, 0), input_at(node, 1)
    producer = None if mean is None else mean.producer()
    if data is None or producer is None or not is_standard(producer, "ReduceMean") or input_at(producer, 0) is not data:
        return False
    try:
        axes = get_ints(producer, "axes") or ()
        if context.opset >= 18:
            axes = context.constants.ints(input_at(producer, 1), "axes")
    except Refused:
        return False
    rank = context.rank(data)
    axes = tuple(axis + rank if axis < 0 and rank is not None else axis for axis in axes)
    return 0 in axes and 1 not in axes and not any(axis < 0 for axis in axes)
