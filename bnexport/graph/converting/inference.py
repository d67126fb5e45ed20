"""Conversion of a whole model, in place: every MMCVSyncBatchNorm becomes BatchNormalization in inference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from bnexport import schema
from bnexport.graph.converting import sync_bn, training_mode
from bnexport.graph.converting.old_values import return_old_counters
from bnexport.graph.mixed_types import insert_casts
from bnexport.graph.nodes import label
from bnexport.graph.refusal import Refused
from bnexport.graph.scopes import GraphContext, Scope, scopes
from bnexport.graph.surgery import Surgery
from bnexport.graph.sync_bn_nodes import has_sync_batch_norm, is_portable_body, is_sync_batch_norm
from bnexport.graph.sync_bn_nodes import training_mode as is_training
from bnexport.model_io import walk

# For graphs that import no standard opset.
FALLBACK_OPSET = 17


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
        _import_standard_operators(scope)
        done = [each for node in _nodes(scope) if (each := _converted(node, scope, choose)) is not None]
        if trained:
            done += [each for node in _nodes(scope) if (each := _retired(node, scope)) is not None]
        if any(each.training and each.batch_norm is not None for each in done):
            return_old_counters(scope.graphs[0], scope.context)
        conversions += done
    surgery.sweep()
    drop_unused_bodies(model)
    return conversions


def convert_model(model: ir.Model) -> ir.Model:
    """Convert MMCVSyncBatchNorm in place; add casts that its opset requires."""
    if convert(model):
        insert_casts(model)
    return model


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
        return Conversion(name, node.op_type, scope.name, training, sync_bn.convert_node(node, training, scope.context))
    except Refused as reason:
        return Conversion(name, node.op_type, scope.name, True, None, reason)


def _retired(node: ir.Node, scope: Scope[GraphContext]) -> Conversion | None:
    try:
        if not training_mode.trains(node, scope.context):
            return None
        return Conversion(label(node), node.op_type, scope.name, True, training_mode.convert_node(node, scope.context))
    except Refused as reason:
        return Conversion(label(node), node.op_type, scope.name, True, None, reason)


def _import_standard_operators(scope: Scope[GraphContext]) -> None:
    """Import the standard opset if the graph lacks it: inserted nodes need one."""
    if scope.context.opset:
        return
    nodes = _nodes(scope)
    if not any(is_sync_batch_norm(node) for node in nodes):
        return
    if not any(node.domain == "" and not is_sync_batch_norm(node) for node in nodes):
        scope.graphs[0].opset_imports[""] = scope.context.opset = FALLBACK_OPSET
