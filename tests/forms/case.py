"""One form of an operator: its attributes and operands, and the shapes it is tried on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx.defs

FIRST = 7
# Ranks 2 to 5, a vector and a scalar. Sizes that differ show an exchanged axis by the shape, sizes that are equal do not.
RANKS = (4, 2, 3, 5)
SIZES = ((2, 4, 3, 5, 1), (3, 3, 3, 3, 3), (2, 4, 4, 4, 1), (2, 2, 3, 4, 2), (2, 1, 4, 3, 2), (0, 4, 3, 5, 2), (1, 4, 3, 5, 2),
    (1, 1, 1, 1, 1), (1, 8, 4, 2, 2))  # fmt: skip
SHAPES = [*dict.fromkeys(sizes[:rank] for rank in RANKS for sizes in SIZES), (4,), ()]
Shape = tuple[int, ...]


class Data:
    """The operand that the batch norms are in front of and behind."""


@dataclasses.dataclass(frozen=True)
class Other:
    """Another input of the model."""

    shape: Shape


DATA = Data()
# None is an optional input that is absent.
Operand = Data | Other | np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Case:
    """A node. outputs: how many it has; read: which of them goes on."""

    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    operands: Sequence[Operand] = (DATA,)
    outputs: int = 1
    read: int = 0

    def absent(self, declared: onnx.defs.OpSchema) -> set[str]:
        """Return the names of the optional inputs that it lacks."""
        lacks = [*(operand is None for operand in self.operands), *[True] * len(declared.inputs)]
        optional = onnx.defs.OpSchema.FormalParameterOption.Optional
        return {each.name for each, lack in zip(declared.inputs, lacks) if each.option == optional and lack}

    def tags(self, declared: onnx.defs.OpSchema) -> set[str]:
        """Return what this form covers."""
        given = {f"{name}={value}" for name, value in self.attributes.items()}
        return given | {f"no {name}" for name in self.absent(declared)} | {f"{len(self.operands)} operands"}

    def __str__(self) -> str:
        shown = {Data: "x", type(None): "none"}
        operands = (shown.get(type(each)) or getattr(each, "shape", ()) for each in self.operands)
        attributes = ", ".join(f"{name}={value}" for name, value in self.attributes.items())
        return f"<{attributes}> ({', '.join(map(str, operands))})"


def form(*operands: Operand, outputs: int = 1, read: int = 0, **attributes: Any) -> Case:
    """Return the form of the operands, of the data alone by default."""
    return Case(attributes, operands or (DATA,), outputs, read)


@dataclasses.dataclass(frozen=True)
class Setting:
    """An operator of one version of its schema, and the shape of its data."""

    op_type: str
    version: int
    shape: Shape
    generator: np.random.Generator

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def dims(self) -> int:
        """Return the number of positions' axes, behind the batch and the channels."""
        return self.rank - 2

    def knows(self, attribute: str) -> bool:
        """Whether the schema has the attribute."""
        return attribute in schema(self.op_type, self.version).attributes

    def floats(self, *shape: int) -> np.ndarray:
        """Return a random constant, away from 0."""
        values = self.generator.standard_normal(shape)
        return np.asarray(np.sign(values) * (np.abs(values) + 0.25), np.float32)

    def each(
        self, choices: Mapping[str, Sequence[Any]], base: Mapping[str, Any] | None = None, mixed: int = 8
    ) -> Iterator[dict[str, Any]]:
        """Yield the base, each choice alone, and some mixtures, of the attributes that this version has."""
        known = {name: list(values) for name, values in choices.items() if self.knows(name)}
        start = {name: value for name, value in (base or {}).items() if self.knows(name)}
        yield dict(start)
        for name, values in known.items():
            for value in values:
                yield {**start, name: value}
        for _ in range(mixed if len(known) > 1 else 0):
            names = [name for name in known if self.generator.random() < 0.5]
            yield {**start, **{name: known[name][self.generator.integers(len(known[name]))] for name in names}}


@functools.cache
def schema(op_type: str, version: int) -> onnx.defs.OpSchema:
    """Return the schema that holds at this opset."""
    return onnx.defs.get_schema(op_type, version)


@functools.cache
def versions(op_type: str, newest: int) -> tuple[tuple[int, int], ...]:
    """Return the first and last opset, between 7 and `newest`, of each schema of an operator."""
    found = [each for each in onnx.defs.get_all_schemas_with_history() if each.name == op_type and each.domain == ""]
    changes = sorted(each.since_version for each in found)
    gone = {each.since_version for each in found if each.deprecated}
    spans = []
    for since, following in zip(changes, [*changes[1:], newest + 1], strict=True):
        first, last = max(since, FIRST), min(following - 1, newest)
        if first <= last and since not in gone:
            spans.append((first, last))
    return tuple(spans)


def axes_of(rank: int) -> list[int]:
    """Return every axis, counted from either end."""
    return [*range(rank), *range(-rank, 0)]
