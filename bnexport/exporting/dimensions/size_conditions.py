"""Conditions on sizes that torch.export assumed while tracing.

`if x.shape[0] > 4` leaves one branch in the program and the condition as a guard, which an ONNX graph does not keep.
Most guards are harmless: torch.export notes wherever a size of 1 would be broadcast. So they only say which sizes to
compare the exported model at. Guards on one dimension become its range in the program, a `Limit`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

import bnexport.errors
from bnexport.exporting.dimensions.sizes import Changes, DimensionGroup, Shapes

# Conditions of reshapes come by the dozen; those that a model's own code asks are short.
_MOST = 16
_LARGEST_MODULUS = 7
# Conditions of these are not the model's.
_OWN = tuple(str(Path(file).parent) for file in (torch.__file__, bnexport.errors.__file__))
# The lower end of an ordinary dynamic dimension's range: torch.export takes sizes of 0 and 1 for constants.
SMALLEST = 2
Axis = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Limit:
    """The range of a dynamic dimension of a program, if it has ends.

    axis: (input, dimension). low, high: None for no end. lines: those of the model's code that ask for them; torch's own are empty.
    """

    axis: Axis
    low: int | None
    high: int | None
    lines: tuple[str, str] = ("", "")

    @property
    def beyond(self) -> list[tuple[int, str]]:
        """The nearest sizes outside, and who asks for the end. A least size of torch's own is mostly that of a window."""
        low = [] if self.low is None or not self.lines[0] else [(self.low - 1, self.lines[0])]
        return low + ([] if self.high is None else [(self.high + 1, self.lines[1])])

    @property
    def counts(self) -> bool:
        """Whether it is more than a least height, which the model asks for just so."""
        return self.axis[1] == 0 or bool(self.beyond)

    def __contains__(self, size: int) -> bool:
        return (self.low is None or size >= self.low) and (self.high is None or size <= self.high)

    def __str__(self) -> str:
        ends = [f"at least {self.low}"] if self.low is not None else []
        ends += [] if self.high is None else [f"at most {self.high}"]
        asked = [line for (_, line) in self.beyond if line]
        return f"{' and '.join(ends)}, the model limits it{f' ({asked[-1]})' if asked else ''}"


def limits(inputs: Sequence[torch.Tensor], ranges: Mapping[Any, Any], axes: Collection[Axis]) -> tuple[Limit, ...]:
    """Return the limits of these dimensions in a program. inputs: fake tensors. ranges: its range_constraints."""
    found: list[Limit] = []
    for place, index in axes:
        size = inputs[place].shape[index]
        given = ranges.get(size.node.expr) if isinstance(size, torch.SymInt) else None
        if given is None:
            continue
        asked = getattr(size.node.shape_env, "var_to_range_sloc", {}).get(size.node.expr)
        lines = ("", "") if asked is None else (_line(asked.lower), _line(asked.upper))
        low, high = int(given.lower), int(given.upper) if given.upper.is_Integer else None
        if low > SMALLEST or high is not None:
            found.append(Limit((place, index), low if low > SMALLEST else None, high, lines))
    return tuple(found)


class SizeConditions:
    """The conditions of a program.

    inputs: fake tensors, the program's inputs with their symbolic sizes. asked: only those of the model's own code;
    torch has many of its own, as for the choice of a kernel.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], *, asked: bool = False) -> None:
        self._symbols: dict[Any, Axis] = {}
        found: dict[Any, str] = {}
        for place, value in enumerate(inputs):
            for dimension, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    self._symbols[size.node.expr] = (place, dimension)
                    found.update({guard.expr: _line(guard.sloc) for guard in size.node.shape_env.guards})
        known = [condition for condition in found if condition.free_symbols <= set(self._symbols)]
        known = [condition for condition in known if found[condition] or not asked]
        self.all = sorted(known, key=lambda condition: (not found[condition], int(condition.count_ops())))[:_MOST]
        self._lines = {condition: found[condition] for condition in self.all}

    def broken(self, shapes: Shapes) -> set[Any]:
        """Return the conditions that do not hold at these sizes."""
        return {condition for condition in self.all if self.breaks(condition, shapes)}

    def breaks(self, condition: Any, shapes: Shapes) -> bool:
        """Whether one of the conditions does not hold at these sizes."""
        sizes = {symbol: sympy.Integer(shapes[place][index]) for symbol, (place, index) in self._symbols.items()}
        try:
            return bool(condition.xreplace(sizes) == sympy.false)
        except (ArithmeticError, TypeError, ValueError):  # a division by zero
            return False

    def asked_for(self, axes: Collection[Axis], shapes: Shapes, names: Sequence[Mapping[int, str]]) -> str:
        """Return a condition of the model's code on one of these dimensions that does not hold at these sizes, with its
        line; empty if there is none. names: of the dimensions of each input.
        """
        for condition, line in self._lines.items():
            concerned = {symbol: self._symbols[symbol] for symbol in condition.free_symbols}
            if line and set(axes) & set(concerned.values()) and self.breaks(condition, shapes):
                known = {symbol: names[place].get(index, str(symbol)) for symbol, (place, index) in concerned.items()}
                text = str(condition.xreplace({symbol: sympy.Symbol(name) for symbol, name in known.items()}))
                return f"{'a condition' if '(' in text else text} at {line}"
        return ""

    def candidates(self, condition: Any, groups: Sequence[DimensionGroup]) -> Iterator[Changes]:
        """Yield changes of one or two groups that may break a condition.

        Images of less than half the size are left out: a network is not asked for them, and few take them.
        """
        axes = {self._symbols[symbol] for symbol in condition.free_symbols}
        concerned = [group for group in groups if axes & set(group.axes)]
        limits = sorted(int(number) for number in condition.atoms(sympy.Integer) if number > 0)
        for group in concerned:
            n = group.size
            near = [n + step for step in range(1, _LARGEST_MODULUS)]
            bounds = [limit + step for limit in limits for step in (-1, 0, 1)]
            least = 1 if group.place == 0 else (n + 1) // 2
            yield from ({group: size} for size in [*bounds, *near, 2 * n, n // 2] if size >= least)
        for one in concerned:
            yield from ({one: one.size + other.size, other: other.size} for other in concerned if one is not other)


def _line(location: Any) -> str:
    """Return the line of code outside torch that asks; empty for one of torch's own."""
    frame = location.framework_loc
    path = getattr(frame, "filename", "")
    if not path or path.startswith(_OWN):
        return ""
    return f"{'/'.join(Path(path).parts[-2:])}:{frame.lineno} in {frame.name}"
