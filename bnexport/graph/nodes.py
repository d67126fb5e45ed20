"""Nodes: operators, attributes, names, types and versions; the refusal to read one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from bnexport import schema
from bnexport.model_io import walk
from bnexport.model_io.validate import printable

# Refusals: a code for tests and tools, and a sentence for people.


class Refused(Exception):
    """Raised when a rule or a reader does not apply. The folder records it; it never leaves the package."""

    def __init__(self, code: str, text: str) -> None:
        self.code = code
        self.text = printable(text)
        super().__init__(self.text)


# Float types supported for parameters.

# Weights are rounded to these types; anything else is not a parameter type.
FLOAT_TYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


# Versions of a model: of its operators, and the lowest one of the file format that holds it.

# The first with model-local functions.
_FUNCTIONS = 8


def set_lowest_ir_version(model: ir.Model) -> None:
    """Set the lowest IR version that has the opset, and functions: a newer one keeps the file from older runtimes."""
    opset = model.opset_imports.get("")
    lowest = 0 if opset is None else onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])
    model.ir_version = max(lowest, _FUNCTIONS)


def opsets(model: ir.Model) -> dict[ir.Graph, int]:
    """Return the opset of the standard operators in each graph; 0 where none is imported."""
    found: dict[ir.Graph, int] = {}
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        # The standard domain has two names.
        version = graph.opset_imports.get("", graph.opset_imports.get("ai.onnx", 0))
        found.update(dict.fromkeys((graph, *graph.subgraphs()), version))
    return found


# Strict access to nodes: operator type, inputs and attributes.

_SCOPES = "pkg.torch.onnx.name_scopes"
_KIND = re.compile(r"[A-Za-z]+(_\d+)?")


def label(node: ir.Node) -> str:
    """Return the name of a node in reports: its name or its first output, with unprintable characters escaped."""
    if node.name:
        return printable(node.name)
    output = next((value.name for value in node.outputs if value.name), "")
    return printable(f"{node.op_type} -> {output}")


def kind(node: ir.Node) -> str:
    """Return the operator of a node with its domain, if that is not ONNX's."""
    return f"{node.domain}:{node.op_type}" if node.domain else node.op_type


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


def required_input(node: ir.Node, index: int = 0) -> ir.Value:
    """Return input `index`. Raises Refused where it is absent or empty, which no operator that asks for it allows."""
    value = input_at(node, index)
    if value is None:
        raise Refused("bad-node", f"{label(node)} lacks input {index}")
    return value


def used(value: ir.Value) -> bool:
    return bool(value.is_graph_output() or value.uses())


def read_once(value: ir.Value) -> bool:
    """Whether one input of one node is all that reads the value."""
    return len(value.uses()) == 1 and not value.is_graph_output()


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


def get_floats(node: ir.Node, name: str) -> tuple[float, ...] | None:
    attribute = _attribute(node, name, ir.AttributeType.FLOATS)
    return None if attribute is None else tuple(attribute.as_floats())


def get_ints(node: ir.Node, name: str) -> tuple[int, ...] | None:
    attribute = _attribute(node, name, ir.AttributeType.INTS)
    return None if attribute is None else tuple(attribute.as_ints())


def from_front(axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """Count axes from the first one; negative ones are counted from the last."""
    return tuple(axis + rank if axis < 0 else axis for axis in axes)


def padded(node: ir.Node) -> bool:
    """Whether a convolution or a pool may add zeros at the borders."""
    auto_pad = get_string(node, "auto_pad", "NOTSET")
    if auto_pad == "VALID":
        return False
    return auto_pad not in ("NOTSET", "") or any(get_ints(node, "pads") or ())


# Allocation of unused names.


class Names:
    def __init__(self, model: ir.Model) -> None:
        self._taken: set[str] = set()
        self._numbers: dict[str, int] = {}
        for graph in walk.graphs(model):
            self._taken.update(value.name for value in graph.inputs if value.name)
            self._taken.update(graph.initializers)
            for node in graph:
                self._taken.update(value.name for value in node.outputs if value.name)
                if node.name:
                    self._taken.add(node.name)

    def fresh(self, wish: str) -> str:
        """Return `wish` if it is unused, otherwise `wish` with a number appended."""
        name, number = wish, self._numbers.get(wish, 1)
        while name in self._taken:
            name, number = f"{wish}_{number}", number + 1
        self._numbers[wish] = number
        self._taken.add(name)
        return name


# Mode of BatchNormalization by opset, as ONNX Runtime decides it.
#
# opset 1 to 6     training unless the attribute is_test is set
# opset 7 to 13    training if outputs after the first are named, whether or not anything reads them
# opset 14 and up  training if the attribute training_mode is set


def is_training(node: ir.Node, opset: int) -> bool:
    """Whether the node normalises with batch statistics. Raise Refused if its attribute cannot be read."""
    if opset < 7:
        return get_int(node, "is_test", 0) == 0
    if opset < 14:
        return any(output.name for output in node.outputs[1:])
    return get_int(node, "training_mode", 0) != 0


# Recognition of MMCVSyncBatchNorm nodes and their portable bodies, in any domain.

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


def is_quantised(model: ir.Model) -> bool:
    """Whether values are rounded to integers and back."""
    return any(is_standard(node, "QuantizeLinear") for node in walk.nodes(model))


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
