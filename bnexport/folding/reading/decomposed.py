"""Batch norm in training mode written out by an exporter as a batch mean and a difference.

    m = ReduceMean(x, axes), d = Sub(x, m)

The axes hold the batch and every other but one, that of the channels; m may come through operators that
only reshape it. Its statistics are those of the batch, so nothing can be folded. It is reported, since a
user who looks for a batch norm should find out why it is still there. A layer norm (the last axes) and an
instance norm (the batch is not among the axes) are none.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from bnexport.folding.context import Context
from bnexport.graph.nodes import get_ints, input_at, is_standard
from bnexport.graph.refusal import Refused

REASON = Refused("training", "it subtracts the mean of the batch: a batch norm in training, written out")

# What an exporter may put between the mean and the difference.
_RESHAPING = ("Identity", "Cast", "CastLike", "Reshape", "Squeeze", "Unsqueeze", "Expand")
_STEPS = 4


def training_sites(nodes: Iterable[ir.Node], context: Context) -> list[ir.Node]:
    """Return the Sub nodes of batch norms in training mode that are written out."""
    return [node for node in nodes if is_standard(node, "Sub") and _subtracts_batch_mean(node, context)]


def _subtracts_batch_mean(node: ir.Node, context: Context) -> bool:
    data, value = input_at(node, 0), input_at(node, 1)
    if data is None or value is None:
        return False
    producer = _origin(value, _RESHAPING).producer()
    if producer is None or not is_standard(producer, "ReduceMean"):
        return False
    reduced = input_at(producer, 0)
    casts = ("Identity", "Cast", "CastLike")
    if reduced is None or _origin(reduced, casts) is not _origin(data, casts):
        return False
    return _over_batch(producer, reduced, context)


def _origin(value: ir.Value, op_types: tuple[str, ...]) -> ir.Value:
    """Return the value from which `value` was made by at most a few of these operators."""
    for _ in range(_STEPS):
        node = value.producer()
        source = None if node is None or not is_standard(node, *op_types) else input_at(node, 0)
        if source is None:
            break
        value = source
    return value


def _over_batch(node: ir.Node, data: ir.Value, context: Context) -> bool:
    try:
        axes = get_ints(node, "axes") or ()
        if context.opset >= 18:
            axes = context.constants.ints(input_at(node, 1), "axes")
    except Refused:
        return False
    rank = context.rank(data)
    if rank is None:
        return 0 in axes and 1 not in axes and not any(axis < 0 for axis in axes)
    kept = set(range(rank)) - {axis + rank if axis < 0 else axis for axis in axes}
    return len(kept) == 1 and 0 not in kept
