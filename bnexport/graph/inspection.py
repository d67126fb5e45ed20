"""Inspection of a model: operators, batch norms with their attributes and shapes, versions, sizes."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import onnx_ir as ir

from bnexport import schema
from bnexport.graph.nodes import is_portable_body, is_standard, is_sync_batch_norm, label
from bnexport.graph.shapes import sizes_of
from bnexport.model_io import walk
from bnexport.model_io.external import ContainedTensor
from bnexport.model_io.read import Source, open_source
from bnexport.model_io.write import tensor_total


@dataclasses.dataclass(frozen=True)
class ValueInfo:
    """An input or output; unknown sizes are None, named ones their name."""

    name: str
    dtype: str | None
    shape: tuple[int | str | None, ...] | None


@dataclasses.dataclass(frozen=True)
class BatchNormInfo:
    """One batch norm node. channels: from the statistics, if they are stored in the model."""

    node: str
    domain: str
    op_type: str
    graph: str
    attributes: dict[str, Any]
    channels: int | None
    input_shape: tuple[int | str | None, ...] | None
    outputs_used: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class InspectReport:
    """Result of `inspect`. nodes, op_counts: bodies and functions included; a portable body counts as its node.
    parameter_count, parameter_bytes: of all tensors, those in Constant nodes, too.

    groups: (name, size) of the nodes' process groups. external_files: files next to the model that hold weights.
    notes: what was mended while the file was read.
    """

    ir_version: int
    opsets: dict[str, int]
    producer: str
    nodes: int
    op_counts: dict[str, int]
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    batch_norms: tuple[BatchNormInfo, ...]
    functions: tuple[str, ...]
    groups: tuple[tuple[str, int], ...]
    parameter_count: int
    parameter_bytes: int
    external_files: tuple[str, ...]
    subgraphs: int
    path: str | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as the command line prints it with --json."""
        return {"schema_version": schema.REPORT_VERSION, **dataclasses.asdict(self)}


def inspect(source: Source, *, fixed_initializers: bool = False) -> InspectReport:
    """Describe a model; weights are not read.

    Args:
        source: a path, ModelProto or onnx_ir.Model.
        fixed_initializers: as `fold` takes it.

    Raises:
        ModelError: the file is refused.
    """
    opened = open_source(source, fixed_initializers=fixed_initializers)
    model = opened.model
    counts: collections.Counter[str] = collections.Counter()
    batch_norms = []
    groups: dict[tuple[str, int], None] = {}
    subgraphs = 0
    owners: list[tuple[str, list[ir.Graph]]] = [("main graph", [model.graph, *model.graph.subgraphs()])]
    for function in model.functions.values():
        if not is_portable_body(function):
            owners.append((f"function {function.name}", [function.graph, *function.subgraphs()]))
    for name, graphs in owners:
        subgraphs += len(graphs) - 1
        for node in (node for graph in graphs for node in graph):
            counts[f"{node.domain}:{node.op_type}" if node.domain else node.op_type] += 1
            if is_sync_batch_norm(node) or is_standard(node, "BatchNormalization"):
                info = _batch_norm(node, name)
                batch_norms.append(info)
                if is_sync_batch_norm(node):
                    group, size = info.attributes["group"], info.attributes["group_size"]
                    # Attributes may be of any type; an int group is the number of a group, in MMCV's own files.
                    if isinstance(group, (str, int)) and isinstance(size, int):
                        groups[str(group), size] = None
    held = [slot.get() for slot in walk.tensors(model)]
    files = {tensor.file for tensor in held if isinstance(tensor, ContainedTensor)}
    return InspectReport(
        ir_version=model.ir_version,
        opsets=dict(model.opset_imports),
        producer=" ".join(part for part in (model.producer_name, model.producer_version) if part),
        nodes=sum(counts.values()),
        op_counts=dict(counts.most_common()),
        inputs=tuple(_info(value) for value in model.graph.inputs if not value.is_initializer()),
        outputs=tuple(_info(value) for value in model.graph.outputs),
        batch_norms=tuple(batch_norms),
        functions=tuple(f"{domain}:{name}" if domain else name for domain, name, _overload in model.functions),
        groups=tuple(groups),
        parameter_count=sum(tensor.size for tensor in held),
        parameter_bytes=tensor_total(model),
        external_files=tuple(sorted({"/".join(file.parts) for file in files if not file.is_model})),
        subgraphs=subgraphs,
        path=opened.path,
        notes=opened.notes,
    )


def _batch_norm(node: ir.Node, graph: str) -> BatchNormInfo:
    sync = is_sync_batch_norm(node)
    attributes: dict[str, Any] = {}
    if sync:
        attributes = {attribute.name: attribute.default for attribute in schema.SYNC_BATCH_NORM.attributes}
    for name, attribute in node.attributes.items():
        attributes[name] = f"@{attribute.ref_attr_name}" if attribute.is_ref() else _plain(attribute)
    statistics = node.inputs[1] if len(node.inputs) > 1 else None
    channels = None
    if statistics is not None and statistics.shape is not None and len(statistics.shape) == 1:
        size = sizes_of(statistics.shape)[0]
        channels = size if isinstance(size, int) else None
    data = node.inputs[0] if node.inputs else None
    return BatchNormInfo(
        node=label(node),
        domain=node.domain,
        op_type=node.op_type,
        graph=graph,
        attributes=attributes,
        channels=channels,
        input_shape=None if data is None else _info(data).shape,
        outputs_used=tuple(bool(value.uses() or value.is_graph_output()) for value in node.outputs),
    )


def _plain(attribute: ir.Attr) -> Any:
    value = attribute.value
    if isinstance(value, (int, float, str)):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(item, (int, float, str)) for item in value):
        return list(value)
    return attribute.type.name


def _info(value: ir.Value) -> ValueInfo:
    shape = None if value.shape is None else sizes_of(value.shape)
    dtype = value.dtype.name.lower() if value.dtype is not None else None
    return ValueInfo(str(value.name), dtype, shape)
