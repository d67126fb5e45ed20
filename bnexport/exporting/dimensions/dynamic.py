"""The dimensions of an export's inputs: which are dynamic, under which names, and why others are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch

from bnexport.errors import UnsupportedModelError, UsageError
from bnexport.exporting.notes import Kind, Note

# An input, counted from 0, and one of its dimensions.
Axis = tuple[int, int]
Dynamic = bool | Mapping[str, Mapping[int, str] | Sequence[int]]

_SPATIAL = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """names, inputs: of the example. free: the dynamic dimensions of each input, with their names. static: a note for each that
    was chosen and had to become static. required: those that the caller names, which must not.
    """

    names: tuple[str, ...]
    inputs: tuple[torch.Tensor, ...]
    free: tuple[Mapping[int, str], ...]
    required: frozenset[Axis] = frozenset()
    static: Mapping[Axis, Note] = dataclasses.field(default_factory=dict)

    @classmethod
    def chosen(cls, names: Sequence[str], inputs: tuple[torch.Tensor, ...], dynamic: Dynamic) -> Dimensions:
        """Choose all or none, or those that a mapping lists by input: a mapping from each to its name, or a sequence.

        All are dimension 0 and those from 2 on of each input of rank 2 or more. Raises UsageError for an input or a dimension
        that is none.
        """
        names, everything = tuple(names), _all(names, inputs)
        if isinstance(dynamic, bool):
            return cls(names, inputs, everything if dynamic else tuple({} for _ in inputs))
        unknown = sorted(set(dynamic) - set(names))
        if unknown:
            raise UsageError(f"dynamic: got {', '.join(unknown)}, expected inputs among {', '.join(names)}")
        free = []
        for name, tensor, defaults in zip(names, inputs, everything):
            given = dynamic.get(name, ())
            wrong = [index for index in given if not (isinstance(index, int) and 0 <= index < tensor.dim())]
            if wrong:
                raise UsageError(
                    f"dynamic: {name}: got dimension {wrong[0]!r}, expected one from 0 to {tensor.dim() - 1}"
                )
            own = given if isinstance(given, Mapping) else {}
            free.append({index: own.get(index) or defaults.get(index, f"{name}_dim_{index}") for index in given})
        required = frozenset((place, index) for place, shape in enumerate(free) for index in shape)
        return cls(names, inputs, tuple(free), required)

    @property
    def axes(self) -> list[Axis]:
        """The dynamic dimensions."""
        return [(place, index) for place, shape in enumerate(self.free) for index in shape]

    def without(self, axes: Iterable[Axis], kind: Kind, reason: str = "", operator: str = "") -> Dimensions:
        """Make dimensions static, with a note for each that is not yet."""
        gone = {
            (place, index): Note(
                kind,
                reason,
                self.names[place],
                index,
                self.free[place][index],
                self.inputs[place].shape[index],
                operator,
            )
            for place, index in axes
            if index in self.free[place]
        }
        free = tuple(
            {index: name for index, name in shape.items() if (place, index) not in gone}
            for place, shape in enumerate(self.free)
        )
        return dataclasses.replace(self, free=free, static={**self.static, **gone})

    def caused_by(self, axes: Collection[Axis], operator: str) -> Dimensions:
        """Name the operator in the notes on dimensions that are static."""
        named = {axis: dataclasses.replace(self.static[axis], operator=operator) for axis in axes}
        return dataclasses.replace(self, static={**self.static, **named})

    def narrower(self, reason: str) -> Iterator[Dimensions]:
        """Yield fewer dynamic dimensions: the batch alone, then the other sizes, then none."""
        for kept in (lambda index: index == 0, lambda index: index != 0, lambda _: False):
            gone = [axis for axis in self.axes if not kept(axis[1])]
            if gone:
                yield self.without(gone, "static", reason)

    def check_required(self) -> None:
        """Raise UnsupportedModelError for a dimension that the caller names and that is static now."""
        for (place, index), note in self.static.items():
            if (place, index) in self.required:
                raise UnsupportedModelError(
                    f"dynamic: {note}; leave dimension {index} of {self.names[place]!r} out, or change that operator of the"
                    " model; nothing was written"
                )


def _all(names: Sequence[str], inputs: tuple[torch.Tensor, ...]) -> tuple[dict[int, str], ...]:
    result = []
    for name, tensor in zip(names, inputs):
        dimensions: dict[int, str] = {}
        if tensor.dim() >= 2:
            prefix, rest = f"{name}_" if len(inputs) > 1 else "", tensor.dim() - 2
            tails = _SPATIAL.get(rest, tuple(f"dim_{index + 2}" for index in range(rest)))
            dimensions = {
                0: f"{prefix}batch",
                **{index + 2: f"{prefix}{tail}" for index, tail in enumerate(tails) if rest},
            }
        result.append(dimensions)
    return tuple(result)
