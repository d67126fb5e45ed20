"""Description of a training graph (inputs, outputs, state) as JSON in the model's metadata.

Standard library only: the exporter writes it, a session reads it without torch.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any

from bnexport.errors import MalformedModelError
from bnexport.schema import TRAINING_METADATA

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
