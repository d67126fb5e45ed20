"""What a graph says about itself, for the session; the activations that a step keeps for its backward pass."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Iterable
from typing import Any

import onnx_ir as ir

from bnexport import schema
from bnexport.errors import MalformedModelError
from bnexport.schema import NEW_SUFFIX, TRAINING_METADATA

# Description of a training graph (inputs, outputs, state) as JSON in the model's metadata.
#
# Standard library only: the exporter writes it, a session reads it without torch.

VERSION = 2

LOSS = "loss"
LEARNING_RATE = "lr"
LOSS_WEIGHT = "loss_weight"
SEED = "seed"
STEP = "optimizer.step"
ACCUMULATED = "optimizer.accumulated"
GRADIENT_SUFFIX = ".grad"


class Kind(str, enum.Enum):
    """Kind of a state tensor. Constants are buffers that the model's state_dict leaves out."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    OPTIMIZER = "optimizer"
    SEED = "seed"

    __str__ = str.__str__  # as enum.StrEnum, which is of Python 3.11


@dataclasses.dataclass(frozen=True)
class Description:
    """Description of one training graph.

    inputs: names of a batch's arrays, the target last. outputs: the model outputs that a step returns;
    evaluation_outputs: all of them. state: kind of each state tensor, in the order of the state_dict.
    aliases: further names of shared tensors in the state_dict. gradients: parameters that have gradients;
    the graph returns them in mode "gradients", and else computes them under the same names.
    standard_ops_only: batch norm, if any, is in standard operators. learning_rate: the one that a session
    starts with. indices: for arrays of labels or indices their ranges, each [first, last, ignored...]. takes_nan:
    the step looks for NaN itself.
    """

    mode: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    evaluation_outputs: tuple[str, ...]
    state: dict[str, Kind]
    aliases: dict[str, str]
    gradients: tuple[str, ...]
    optimizer: str
    optimizer_options: dict[str, Any]
    accumulate: int
    standard_ops_only: bool
    indices: dict[str, list[list[int]]] = dataclasses.field(default_factory=dict)
    takes_nan: bool = False

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer_options.get("lr", 0.0))

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str | None, where: str) -> Description:
        """Parse the description. Raises MalformedModelError for a graph that export_training_step did not write."""
        if text is None:
            raise MalformedModelError(
                f"{where}: got a model without the metadata {TRAINING_METADATA!r}, expected a training graph; "
                "write one with `bnexport train-export` or bnexport.export_training_step"
            )
        try:
            values = json.loads(text)
            version = values.pop("version")
            if version != VERSION:
                raise MalformedModelError(
                    f"{where}: got a training graph of version {version}, expected {VERSION}; export it again"
                )
            for name in ("inputs", "outputs", "evaluation_outputs", "gradients"):
                values[name] = tuple(values[name])
            values["state"] = {name: Kind(kind) for name, kind in values["state"].items()}
            return cls(**values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MalformedModelError(
                f"{where}: its metadata {TRAINING_METADATA!r} is damaged ({error}); export the graph again"
            ) from error


# Saved activations of a training step: values kept from the forward for the backward pass.
#
# A value is saved when the forward makes it, or it is a part of the batch, and a gradient is computed from it: it
# lies in memory from the one to the other. The forward is what loss, model outputs and new buffers depend on; what
# is computed again for the gradients is no part of it. Two views of one tensor count twice, so that the sum is an
# upper bound.

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
