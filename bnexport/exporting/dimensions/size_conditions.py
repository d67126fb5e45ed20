"""Conditions on sizes that torch.export assumed while tracing.

`if x.shape[0] > 4` leaves one branch in the program and the condition as a guard, which an ONNX graph does not keep.
Most guards are harmless: torch.export notes wherever a size of 1 would be broadcast. So they only say which sizes to
compare the exported model at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from bnexport.exporting.dimensions.sizes import Changes, DimensionGroup, Shapes

# Conditions of reshapes come by the dozen; those that a model's own code asks are short.
_MOST = 16
_LARGEST_MODULUS = 7
_TORCH = str(Path(torch.__file__).parent)


class SizeConditions:
    """The conditions of a program.

    inputs: fake tensors, the program's inputs with their symbolic sizes. asked: only those of the model's own code;
    torch has many of its own, as for the choice of a kernel.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], *, asked: bool = False) -> None:
        self._symbols: dict[Any, tuple[int, int]] = {}
        found: dict[Any, bool] = {}
        for place, value in enumerate(inputs):
            for dimension, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    self._symbols[size.node.expr] = (place, dimension)
                    found.update({guard.expr: _is_asked(guard) for guard in size.node.shape_env.guards})
        known = [condition for condition in found if condition.free_symbols <= set(self._symbols)]
        known = [condition for condition in known if found[condition] or not asked]
        self.all = sorted(known, key=lambda condition: (not found[condition], int(condition.count_ops())))[:_MOST]

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


def _is_asked(guard: Any) -> bool:
    """Whether a condition comes from code outside torch."""
    place = getattr(guard.sloc.framework_loc, "filename", "")
    return bool(place) and not place.startswith(_TORCH)
