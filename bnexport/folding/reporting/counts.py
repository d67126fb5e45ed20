"""Count the nodes and parameters of a model."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from bnexport.graph.nodes import is_standard
from bnexport.graph.sync_bn_nodes import is_portable_body, is_sync_batch_norm
from bnexport.model_io import walk
from bnexport.model_io.write import tensor_total


@dataclasses.dataclass(frozen=True)
class Counts:
    """Nodes of a model, bodies and functions included; a portable body counts as its node."""

    nodes: int
    batch_norm: int
    sync_batch_norm: int
    parameter_bytes: int


def count(model: ir.Model) -> Counts:
    """Counts of `model`; the inside of a portable body is not counted."""
    nodes = batch_norm = sync = 0
    bodies = (function for function in model.functions.values() if is_portable_body(function))
    skipped = {id(graph) for body in bodies for graph in (body.graph, *body.subgraphs())}
    for graph in walk.graphs(model):
        if id(graph) in skipped:
            continue
        for node in graph:
            nodes += 1
            batch_norm += is_standard(node, "BatchNormalization")
            sync += is_sync_batch_norm(node)
    return Counts(nodes, batch_norm, sync, tensor_total(model))
