"""Conversion of MMCVSyncBatchNorm to inference BatchNormalization with the running statistics.

    MMCVSyncBatchNorm(input, running_mean, running_var, weight, bias)   eps
    BatchNormalization(input, scale=weight, bias=bias, mean=running_mean, var=running_var)   epsilon

In a training graph that changes what the graph computes, on purpose: the updated statistics are
replaced by the old ones, in the order of the graph, so that a module used twice reads its own old
values; graph outputs that carried updates stay and return the old values.

Refused: no running statistics; saved_mean or saved_invstd in use (a gradient is computed); a training
node whose statistics are the neutral 0 and 1 and are not updated, since that is how a module without
statistics is written.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from bnexport import schema
from bnexport.graph.constants import Constants
from bnexport.graph.converting.old_values import return_old
from bnexport.graph.evaluate import read_tensor
from bnexport.graph.nodes import get_float, input_at, label, used
from bnexport.graph.refusal import Refused
from bnexport.graph.scopes import GraphContext, new_constant

_INPUT = {value.name: index for index, value in enumerate(schema.SYNC_BATCH_NORM.inputs)}
_OUTPUT = {value.name: index for index, value in enumerate(schema.SYNC_BATCH_NORM.outputs)}


def convert_node(node: ir.Node, training: bool, context: GraphContext) -> ir.Node:
    """Convert a sync batch norm to BatchNormalization. Raises Refused."""
    source, mean, var = (input_at(node, _INPUT[name]) for name in ("input", "running_mean", "running_var"))
    if source is None or not node.outputs:
        raise Refused("bad-node", f"it has no {'output' if source else 'input'}")
    if mean is None or var is None:
        raise Refused("no-statistics", "it has no running statistics; only the batch's own can normalise its input")
    for name in ("saved_mean", "saved_invstd"):
        if len(node.outputs) > _OUTPUT[name] and used(node.outputs[_OUTPUT[name]]):
            raise Refused("statistics-used", f"its output {name} is used, as for a gradient")
    updates = [
        node.outputs[_OUTPUT[name]]
        for name in ("running_mean_out", "running_var_out")
        if len(node.outputs) > _OUTPUT[name]
    ]
    if training and not any(used(output) for output in updates) and _neutral(mean, var, context.constants):
        raise Refused(
            "no-statistics",
            "its running statistics are the neutral 0 and 1 and are not updated, as in a module without statistics",
        )
    eps = get_float(node, "eps", float(schema.SYNC_BATCH_NORM.attribute("eps").default))
    weight = _parameter(node, "weight", mean, 1.0, context)
    bias = _parameter(node, "bias", mean, 0.0, context)
    for output, old in zip(updates, (mean, var), strict=False):
        return_old(output, old, node, context)
    batch_norm = _insert(node, source, [weight, bias, mean, var], eps, context)
    context.surgery.remove(node)
    return batch_norm


def _insert(node: ir.Node, source: ir.Value, parameters: list[ir.Value], eps: float, context: GraphContext) -> ir.Node:
    """Insert the BatchNormalization in place of the node. `mixed_types` adds casts if its opset requires them."""
    graph = node.graph
    assert graph is not None
    attributes = [ir.AttrFloat32("epsilon", eps)]
    if context.opset < 7:
        attributes.append(ir.AttrInt64("is_test", 1))
    old = node.outputs[0]
    name = node.name or context.names.fresh(f"{label(node)}.BatchNormalization")
    batch_norm = ir.Node("", "BatchNormalization", [source, *parameters], attributes, name=name)
    replacement = batch_norm.outputs[0]
    replacement.name, replacement.type, replacement.shape = old.name, old.type or source.type, old.shape
    replacement.metadata_props.update(old.metadata_props)
    batch_norm.metadata_props.update(node.metadata_props)
    graph.insert_before(node, batch_norm)
    context.surgery.replace(old, replacement)
    return batch_norm


def _parameter(node: ir.Node, name: str, mean: ir.Value, fill: float, context: GraphContext) -> ir.Value:
    """Return weight or bias; a constant of ones or zeros if the node has none."""
    value = input_at(node, _INPUT[name])
    if value is not None:
        return value
    size = context.size(mean, 0)
    if size is None and mean.const_value is not None:
        size = int(mean.const_value.size)
    if size is None or mean.dtype is None:
        raise Refused("shape", f"it has no {name}, and the number of channels is not known")
    assert node.graph is not None
    array = np.full(size, fill, mean.dtype.numpy())
    return new_constant(context, node.graph, node, array, f"{label(node)}.{name}")


def _neutral(mean: ir.Value, var: ir.Value, constants: Constants) -> bool:
    try:
        tensors = [constants.stored(value, "running statistic") for value in (mean, var)]
    except Refused:
        return False
    if tensors[0] is None or tensors[1] is None:
        return False
    return bool((read_tensor(tensors[0]) == 0).all() and (read_tensor(tensors[1]) == 1).all())
