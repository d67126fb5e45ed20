"""Inspection of a model: operators, batch norms with their attributes and shapes, versions, sizes."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from bnexport import pages, schema
from bnexport.graph.nodes import is_portable_body, is_standard, is_sync_batch_norm, kind, label
from bnexport.graph.shapes import sizes_of
from bnexport.model_io import walk
from bnexport.model_io.external import ContainedTensor
from bnexport.model_io.read import Source, open_source
from bnexport.model_io.write import tensor_total

if TYPE_CHECKING:
    from rich.table import Table

# Kinds of operators that a table of one model names; those behind are counted.
_KINDS = 8


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

    def summary(self, everything: bool = True) -> dict[str, str]:
        """Return what the model has, in words. everything: name every kind of operator."""
        counts = list(self.op_counts.items())
        kinds = [f"{count} {name}" for name, count in counts]
        if not everything and len(kinds) > _KINDS:
            rest = sum(count for _, count in counts[_KINDS:])
            kinds[_KINDS:] = [f"and {rest} of {len(kinds) - _KINDS} more kinds"]
        opsets = ", ".join(f"{name or 'onnx'} {version}" for name, version in self.opsets.items())
        return {
            "producer": self.producer,
            "IR version, opsets": f"{self.ir_version}, {opsets}",
            "inputs": "\n".join(_value(value) for value in self.inputs),
            "outputs": "\n".join(_value(value) for value in self.outputs),
            "nodes": f"{self.nodes:,} ({', '.join(kinds)})",
            "parameters": f"{self.parameter_count:,} ({self.parameter_bytes:,} bytes)",
            "functions": ", ".join(self.functions) or "none",
            "groups": ", ".join(f"{name or 'none'} (size {size})" for name, size in self.groups) or "none",
            "external files": ", ".join(self.external_files) or "none",
        }

    def tables(self, *, everything: bool = True) -> list[Table]:
        """Return a table of the model, and one of its batch norms if it has any."""
        found = [pages.table(self.path or "", ("", ""), self.summary(everything).items())]
        return [*found, _batch_norm_table(self.batch_norms)] if self.batch_norms else found

    def _repr_html_(self) -> str:
        return pages.fragment(self.notes, self.tables())


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
            counts[kind(node)] += 1
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


def side_by_side(names: Sequence[str], reports: Sequence[InspectReport], *, everything: bool = True) -> Table:
    """Return a table with a column for each model: what `InspectReport.summary` has, then its operators by kind.

    everything: also rows in which all models are equal.
    """
    rows = [
        ("nodes", *(f"{report.nodes:,}" for report in reports)),
        *((name, *(report.summary()[name] for report in reports)) for name in reports[0].summary() if name != "nodes"),
    ]
    kinds = dict.fromkeys(name for report in reports for name in report.op_counts)
    rows += [(name, *(f"{report.op_counts.get(name, 0):,}" for report in reports)) for name in kinds]
    shown = [row for row in rows if everything or len(set(row[1:])) > 1]
    title = f"{len(shown)} of {len(rows)} rows, those that differ; -v shows all" if len(shown) < len(rows) else ""
    return pages.table(title, ("", *names), shown)


def _batch_norm_table(norms: Sequence[BatchNormInfo]) -> Table:
    """Return a table with a row for each batch norm; what all have in common is in its title."""
    described = [
        {"operator": f"{norm.domain or 'onnx'}:{norm.op_type}"}
        | {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in norm.attributes.items()}
        for norm in norms
    ]
    common = {name: value for name, value in described[0].items() if all(each.get(name) == value for each in described)}
    rows = [
        (
            norm.node,
            norm.channels or "",
            _shape(norm.input_shape),
            ", ".join(f"{name}={value}" for name, value in each.items() if name not in common and value),
        )
        for norm, each in zip(norms, described)
    ]
    shared = ", ".join(f"{name} {value}" for name, value in common.items() if value)
    title = f"{len(rows)} batch norm{'s' * (len(rows) != 1)}{f', with {shared}' if shared else ''}"
    columns = ("node", "channels", "input", "attributes")[: 4 if any(row[3] for row in rows) else 3]
    return pages.table(title, columns, (row[: len(columns)] for row in rows), right=["channels"], whole=["node"])


def _value(value: Any) -> str:
    return f"{value.name}: {value.dtype} {_shape(value.shape)}"


def _shape(shape: tuple[Any, ...] | None) -> str:
    """Return the sizes in brackets: ? for an unknown one, * for one that is computed from others."""
    if shape is None:
        return ""
    sizes = (
        "?" if size is None else size if str(size).isidentifier() or isinstance(size, int) else "*" for size in shape
    )
    return f"({', '.join(map(str, sizes))})"
