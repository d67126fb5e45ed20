"""Strict access to nodes: operator type, inputs and attributes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from bnexport.graph.refusal import Refused
from bnexport.model_io.validate import printable

_SCOPES = "pkg.torch.onnx.name_scopes"
_KIND = re.compile(r"[A-Za-z]+(_\d+)?")


def label(node: ir.Node) -> str:
    """Return the name of a node in reports: its name or its first output, with unprintable characters escaped."""
    if node.name:
        return printable(node.name)
    output = next((value.name for value in node.outputs if value.name), "")
    return printable(f"{node.op_type} -> {output}")


def module_path(node: ir.Node) -> str:
    """Return the path of the torch module that made the node, such as `backbone.bn1`, where its exporter or ours wrote it.

    The dynamo exporter keeps scopes; the TorchScript exporter names a node /backbone/bn1/BatchNormalization; ours
    backbone.bn1/BatchNormalization. Empty for other nodes.
    """
    scopes, name = node.metadata_props.get(_SCOPES), node.name or ""
    if scopes:
        try:
            return next((str(each) for each in reversed(ast.literal_eval(scopes)[:-1]) if each), "")
        except (SyntaxError, ValueError, TypeError):
            return ""
    path, _, kind = name.rpartition("/")
    if not path.startswith("/"):
        return printable(path) if "/" not in path and _KIND.fullmatch(kind) else ""
    parts = path.split("/")[1:]
    # A list in a module is there twice: layer1/layer1.0.
    kept = (part for part, following in zip(parts, [*parts[1:], ""]) if not following.startswith(f"{part}."))
    return printable(".".join(kept))


def is_standard(node: ir.Node, *op_types: str) -> bool:
    """Whether the node is one of these ONNX operators of the standard domain."""
    return node.domain == "" and node.op_type in op_types


def input_at(node: ir.Node, index: int) -> ir.Value | None:
    """Return input `index`, or None if it is absent or empty."""
    value = node.inputs[index] if index < len(node.inputs) else None
    return value if value is not None and value.name else None


def used(value: ir.Value) -> bool:
    return bool(value.is_graph_output() or value.uses())


def only_attributes(node: ir.Node, known: Iterable[str]) -> None:
    """Raise Refused for attributes outside `known`, which may change the meaning of the operator."""
    unknown = sorted(set(node.attributes) - set(known))
    if unknown:
        raise Refused("unknown-attribute", f"{node.op_type} has the attribute {unknown[0]!r}, which is not known here")


def _attribute(node: ir.Node, name: str, kind: ir.AttributeType) -> ir.Attr | None:
    attribute = node.attributes.get(name)
    if attribute is None:
        return None
    if attribute.is_ref():
        raise Refused("reference-attribute", f"{node.op_type}'s {name} is given by the function's caller")
    if attribute.type is not kind:
        raise Refused(
            "bad-attribute", f"{node.op_type}'s {name} is of type {attribute.type.name}, expected {kind.name}"
        )
    return attribute


def get_int(node: ir.Node, name: str, default: int) -> int:
    attribute = _attribute(node, name, ir.AttributeType.INT)
    return default if attribute is None else attribute.as_int()


def get_flag(node: ir.Node, name: str, default: bool = False) -> bool:
    """Return a switch of 0 or 1. Raises Refused for other numbers, which ONNX Runtime reads as 1 in some operators, as 0 in others."""
    value = get_int(node, name, int(default))
    if value not in (0, 1):
        raise Refused("unknown-attribute", f"{node.op_type} has {name}={value}, which is neither 0 nor 1")
    return bool(value)


def get_float(node: ir.Node, name: str, default: float) -> float:
    attribute = _attribute(node, name, ir.AttributeType.FLOAT)
    # Attributes are float32 in the file, and so are the defaults of the standard.
    return float(np.float32(default)) if attribute is None else attribute.as_float()


def get_string(node: ir.Node, name: str, default: str) -> str:
    attribute = _attribute(node, name, ir.AttributeType.STRING)
    return default if attribute is None else attribute.as_string()


def get_ints(node: ir.Node, name: str) -> tuple[int, ...] | None:
    attribute = _attribute(node, name, ir.AttributeType.INTS)
    return None if attribute is None else tuple(attribute.as_ints())
