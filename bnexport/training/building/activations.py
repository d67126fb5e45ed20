"""Saved activations of a training step: values kept from the forward for the backward pass.

A value is saved when the forward makes it, or it is a part of the batch, and a gradient is computed from it: it
lies in memory from the one to the other. The forward is what loss, model outputs and new buffers depend on; what
is computed again for the gradients is no part of it. Two views of one tensor count twice, so that the sum is an
upper bound.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import onnx_ir as ir

from bnexport import schema
from bnexport.schema import NEW_SUFFIX
from bnexport.training.building.description import GRADIENT_SUFFIX, Description, Kind

# They read a value's sizes, for which nobody keeps its elements.
_READS_SIZES = {"Shape", "Size"}


@dataclasses.dataclass(frozen=True)
class SavedActivation:
    """One saved value. shape: () of sizes as the graph has them, numbers or names; None where unknown, as bytes."""

    name: str
    operator: str
    dtype: str
    shape: tuple[int | str, ...] | None
    bytes: int | None


def saved_activations(model: ir.Model, description: Description, batch: int) -> tuple[SavedActivation, ...]:
    """Return the saved values of a training graph, largest first; bytes are those for `batch` rows."""
    graph = model.graph
    not_forward = {name + GRADIENT_SUFFIX for name in description.gradients} | {
        name + NEW_SUFFIX for name, kind in description.state.items() if kind in {Kind.PARAMETER, Kind.OPTIMIZER}
    }
    forward = makers(value for value in graph.outputs if value.name not in not_forward)
    elements = _elements(graph)
    made = [value for node in graph if node in forward for value in node.outputs if value in elements]
    given = [value for value in graph.inputs if value.name in description.inputs]
    saved = [
        _describe(value, batch)
        for value in (*given, *made)
        if any(node not in forward and node.op_type not in _READS_SIZES for node, _ in value.uses())
    ]
    return tuple(sorted(saved, key=lambda each: -(each.bytes or 0)))


def _elements(graph: ir.Graph) -> set[ir.Value]:
    """Return the values computed from elements of inputs; others are constants and arithmetic on sizes."""
    found = set(graph.inputs)
    for node in graph:
        if node.op_type not in _READS_SIZES and any(value in found for value in node.inputs):
            found.update(node.outputs)
    return found


def makers(values: Iterable[ir.Value]) -> set[ir.Node]:
    """Return the nodes that `values` depend on."""
    found: set[ir.Node] = set()
    waiting = [value.producer() for value in values]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [value.producer() for value in node.inputs if value is not None]
    return found


def _describe(value: ir.Value, batch: int) -> SavedActivation:
    like = _like(value)
    shape = None if like.shape is None else tuple(size if isinstance(size, int) else str(size) for size in like.shape)
    dtype = value.dtype or (like.dtype if like is not value else None)
    producer = value.producer()
    operator = "" if producer is None else producer.op_type
    if operator == "MaxPool" and value.index() == 1:
        dtype = ir.DataType.INT64
    size = None
    if shape is not None and dtype is not None:
        size = math.prod(batch if isinstance(part, str) else part for part in shape) * math.ceil(dtype.bitwidth / 8)
    return SavedActivation(str(value.name), operator, "?" if dtype is None else dtype.numpy().name, shape, size)


def _like(value: ir.Value) -> ir.Value:
    """Return a value of the same shape, for outputs that the exporter leaves without one."""
    node = value.producer()
    if value.shape is not None or node is None:
        return value
    if node.op_type == schema.SYNC_BATCH_NORM.name:
        # Statistics have the shape of the vectors that come in.
        return next((vector for vector in node.inputs[1:] if vector is not None and vector.shape is not None), value)
    return node.outputs[0] if node.op_type == "MaxPool" else value
