"""Recognise MMCVSyncBatchNorm nodes and their portable bodies, in any domain."""

from __future__ import annotations

import onnx_ir as ir

from bnexport import schema
from bnexport.graph.nodes import get_int
from bnexport.graph.refusal import Refused
from bnexport.model_io import walk

OP_TYPE = schema.SYNC_BATCH_NORM.name


def is_sync_batch_norm(node: ir.Node) -> bool:
    """The operator in any domain: MMCV's own, the default one of old exports, or another."""
    return node.op_type == OP_TYPE


def is_portable_body(function: ir.Function) -> bool:
    """A function that computes the operator in standard ones."""
    return function.name == OP_TYPE


def training_mode(node: ir.Node) -> bool:
    """The node's attribute, or its default. Raises Refused where it is of another type."""
    return get_int(node, "training_mode", int(schema.SYNC_BATCH_NORM.attribute("training_mode").default)) != 0


def has_sync_batch_norm(model: ir.Model) -> bool:
    """Any node of the operator, in any graph or function."""
    return any(is_sync_batch_norm(node) for node in walk.nodes(model))


def trains(model: ir.Model) -> bool:
    """Any node of the operator that normalises with the batch's statistics; one that cannot be read counts."""
    for node in walk.nodes(model):
        if is_sync_batch_norm(node):
            try:
                if training_mode(node):
                    return True
            except Refused:
                return True
    return False
