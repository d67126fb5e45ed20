"""Recognition of MMCVSyncBatchNorm nodes and their portable bodies, in any domain."""

from __future__ import annotations

import onnx_ir as ir

from bnexport import schema
from bnexport.graph.nodes import get_int
from bnexport.graph.refusal import Refused
from bnexport.model_io import walk

OP_TYPE = schema.SYNC_BATCH_NORM.name


def is_sync_batch_norm(node: ir.Node) -> bool:
    """Whether the node is MMCVSyncBatchNorm in any domain: MMCV's, the default one of old exports, or another."""
    return node.op_type == OP_TYPE


def is_portable_body(function: ir.Function) -> bool:
    """Whether the function computes MMCVSyncBatchNorm in standard operators."""
    return function.name == OP_TYPE


def training_mode(node: ir.Node) -> bool:
    """Return the node's attribute training_mode, or its default. Raise Refused if its type is wrong."""
    return get_int(node, "training_mode", int(schema.SYNC_BATCH_NORM.attribute("training_mode").default)) != 0


def has_sync_batch_norm(model: ir.Model) -> bool:
    """Whether any graph or function contains an MMCVSyncBatchNorm node."""
    return any(is_sync_batch_norm(node) for node in walk.nodes(model))


def trains(model: ir.Model) -> bool:
    """Whether any MMCVSyncBatchNorm node uses batch statistics; a node that cannot be read counts as one."""
    for node in walk.nodes(model):
        if is_sync_batch_norm(node):
            try:
                if training_mode(node):
                    return True
            except Refused:
                return True
    return False
