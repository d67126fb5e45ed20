"""Conversion of sync batch norm and of training mode to plain BatchNormalization in inference mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from bnexport import schema
from bnexport.graph.constants import Constants
from bnexport.graph.evaluate import read_tensor
from bnexport.graph.nodes import (
    Names,
    Refused,
    get_float,
    has_sync_batch_norm,
    input_at,
    is_portable_body,
    is_standard,
    is_sync_batch_norm,
    label,
    used,
)
from bnexport.graph.nodes import is_training as normalises_batches
from bnexport.graph.nodes import training_mode as is_training
from bnexport.graph.scopes import GraphContext, Scope, new_constant, scopes
from bnexport.graph.shapes import Shapes
from bnexport.graph.surgery import Surgery
from bnexport.model_io import walk

# Outputs for updated statistics or batch counters, redirected to the old values.

_COUNTER = ".num_batches_tracked"


def return_old_counters(graph: ir.Graph, context: GraphContext) -> None:
    """Redirect the outputs of batch counters, which are written with the statistics, to their old values."""
    outputs = {str(value.name) for value in graph.outputs}
    for output in tuple(graph.outputs):
        name = str(output.name)
        old = graph.initializers.get(name.removesuffix(schema.NEW_SUFFIX))
        node = output.producer()
        if not name.endswith(_COUNTER + schema.NEW_SUFFIX) or old is None or node is None:
            continue
        statistics = (name.replace(_COUNTER, f".{kind}") for kind in ("running_mean", "running_var"))
        if outputs.issuperset(statistics):
            return_old(output, old, node, context)
            context.surgery.may_be_unused(output)


def return_old(output: ir.Value, old: ir.Value, node: ir.Node, context: GraphContext) -> None:
    """Redirect readers of `output`, a statistic that `node` updates, to `old`; a graph output keeps its name."""
    graph = node.graph
    assert graph is not None
    for use in output.uses():
        use.node.replace_input_with(use.idx, old)
    if not output.is_graph_output():
        return
    identity = ir.Node("", "Identity", [old], name=context.names.fresh(f"{output.name}.unchanged"))
    same = identity.outputs[0]
    same.name, same.type, same.shape = output.name, output.type or old.type, output.shape or old.shape
    graph.insert_before(node, identity)
    context.surgery.replace_output(output, same)


# Conversion of MMCVSyncBatchNorm to inference BatchNormalization with the running statistics.
#
#     MMCVSyncBatchNorm(input, running_mean, running_var, weight, bias)   eps
#     BatchNormalization(input, scale=weight, bias=bias, mean=running_mean, var=running_var)   epsilon
#
# In a training graph that changes what the graph computes, on purpose: the updated statistics are
# replaced by the old ones, in the order of the graph, so that a module used twice reads its own old
# values; graph outputs that carried updates stay and return the old values.
#
# Refused: no running statistics; saved_mean or saved_invstd in use (a gradient is computed); a training
# node whose statistics are the neutral 0 and 1 and are not updated, since that is how a module without
# statistics is written.

_INPUT = {value.name: index for index, value in enumerate(schema.SYNC_BATCH_NORM.inputs)}
_OUTPUT = {value.name: index for index, value in enumerate(schema.SYNC_BATCH_NORM.outputs)}


def convert_sync_batch_norm(node: ir.Node, training: bool, context: GraphContext) -> ir.Node:
    """Convert a sync batch norm to BatchNormalization. Raises Refused."""
    source, mean, var = (input_at(node, _INPUT[name]) for name in ("input", "running_mean", "running_var"))
    if source is None or not node.outputs:
        raise Refused("bad-node", f"it has no {'output' if source else 'input'}")
    if not context.opset:
        raise Refused("opset", "the model imports no standard operators")
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
    dtype = context.dtype(mean)
    if size is None or dtype is None:
        raise Refused("shape", f"it has no {name}, and the number or the type of the channels is not known")
    assert node.graph is not None
    array = np.full(size, fill, dtype.numpy())
    return new_constant(context, node.graph, node, array, f"{label(node)}.{name}")


def _neutral(mean: ir.Value, var: ir.Value, constants: Constants) -> bool:
    try:
        tensors = [constants.stored(value, "running statistic") for value in (mean, var)]
    except Refused:
        return False
    if tensors[0] is None or tensors[1] is None:
        return False
    return bool((read_tensor(tensors[0]) == 0).all() and (read_tensor(tensors[1]) == 1).all())


# Conversion of BatchNormalization in training mode to inference, only on request.
#
# The node stays; training_mode (or is_test, or the extra outputs) goes. Its updated statistics become the
# old ones, as for MMCVSyncBatchNorm.


def trains(node: ir.Node, context: GraphContext) -> bool:
    """Whether a node is a BatchNormalization in training mode. Raises Refused where its attribute cannot be read."""
    return is_standard(node, "BatchNormalization") and normalises_batches(node, context.opset)


def convert_training_mode(node: ir.Node, context: GraphContext) -> ir.Node:
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


# Conversion of a whole model, in place: every MMCVSyncBatchNorm becomes BatchNormalization in inference.


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Result for one node. scope: the graph's, as reports name it. batch_norm: the converted node; None if refused."""

    name: str
    op_type: str
    scope: str
    training: bool
    batch_norm: ir.Node | None
    reason: Refused | None = None


def convert(
    model: ir.Model, *, trained: bool = False, choose: Callable[[ir.Node], bool] = lambda _: True
) -> list[Conversion]:
    """Convert every MMCVSyncBatchNorm that can be converted, in place; `insert_casts` may be needed behind it.

    trained: BatchNormalization in training mode, too. choose: of the sync batch norms; it may raise Refused.
    """
    surgery = Surgery()
    conversions: list[Conversion] = []
    for scope in scopes(model, surgery, GraphContext) if trained or has_sync_batch_norm(model) else ():
        done = [each for node in _nodes(scope) if (each := _converted(node, scope, choose)) is not None]
        if trained:
            done += [each for node in _nodes(scope) if (each := _retired(node, scope)) is not None]
        if any(each.training and each.batch_norm is not None for each in done):
            return_old_counters(scope.graphs[0], scope.context)
        conversions += done
    surgery.sweep()
    drop_unused_bodies(model)
    return conversions


def drop_unused_bodies(model: ir.Model) -> None:
    """Remove portable bodies, and opset imports of their domains, that no node refers to any more."""
    if not model.functions and schema.DOMAIN not in model.opset_imports:
        return
    bodies = [key for key, function in model.functions.items() if is_portable_body(function)]
    calls = {node.op_identifier() for node in walk.nodes(model)}
    for key in bodies:
        if key not in calls:
            del model.functions[key]
    domains = {node.domain for node in walk.nodes(model)} | {key[0] for key in model.functions}
    if schema.DOMAIN not in domains:
        for imports in (model.opset_imports, *(function.opset_imports for function in model.functions.values())):
            # A model without any import is not valid.
            if len(imports) > 1:
                imports.pop(schema.DOMAIN, None)


def _nodes(scope: Scope[GraphContext]) -> list[ir.Node]:
    return [node for graph in scope.graphs for node in graph]


def _converted(node: ir.Node, scope: Scope[GraphContext], choose: Callable[[ir.Node], bool]) -> Conversion | None:
    if not is_sync_batch_norm(node):
        return None
    name = label(node)
    try:
        if not choose(node):
            return None
        training = is_training(node)
        return Conversion(
            name, node.op_type, scope.name, training, convert_sync_batch_norm(node, training, scope.context)
        )
    except Refused as reason:
        return Conversion(name, node.op_type, scope.name, True, None, reason)


def _retired(node: ir.Node, scope: Scope[GraphContext]) -> Conversion | None:
    try:
        if not trains(node, scope.context):
            return None
        return Conversion(label(node), node.op_type, scope.name, True, convert_training_mode(node, scope.context))
    except Refused as reason:
        return Conversion(label(node), node.op_type, scope.name, True, None, reason)


# Casts around BatchNormalization whose parameters have another type than its data, before opset 15.
#
# MMCVSyncBatchNorm keeps float32 statistics beside float16 data; BatchNormalization can do so from opset 15
# on. What the rules leave of such nodes in older models is put between two Casts.

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
