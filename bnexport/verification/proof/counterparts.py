"""Find nodes that stand at the same place in two models, and differ in constants or attributes alone.

A node of the changed model has a counterpart where the original has the same operator on equal values. If the models are
equal but for such nodes, they correspond node by node: one of them is another model, whatever a run shows. A constant may
differ by what the rounding of its type explains.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np
import onnx_ir as ir

from bnexport import tolerances
from bnexport.errors import UnsupportedModelError
from bnexport.model_io import walk
from bnexport.model_io.validate import printable
from bnexport.verification.proof.attributes import is_default, outputs_count, same_attribute
from bnexport.verification.proof.numbering import Numbering
from bnexport.verification.proof.regions import ROUNDINGS, Side, name_of

# Elements of a constant that is compared number by number; a larger one that is not the same differs.
_LARGEST = 1 << 26
_CONSTANT = "constant"


class Counterparts:
    """The counterparts of one pair of models, as far as values have numbers."""

    def __init__(self, sides: tuple[Side, Side], numbers: Numbering) -> None:
        self._sides, self._numbers = sides, numbers

    def of(self, graphs: tuple[ir.Graph, ir.Graph]) -> Iterator[tuple[ir.Node, ir.Node]]:
        """Yield nodes of the changed graph behind their counterparts: those whose values are needed, and unknown."""
        alike: dict[Hashable, list[ir.Node]] = {}
        for node in graphs[0]:
            if not self._sides[0].is_constant_node(node) and self._is_open(node):
                alike.setdefault(self._key(0, node), []).append(node)
        needed = self._needed(graphs[1])
        for node in graphs[1]:
            key = self._key(1, node) if node in needed else None
            if key is not None:
                for mine in sorted(alike.get(key, ()), key=lambda mine: name_of(mine) != name_of(node)):
                    yield mine, node

    def difference(self, mine: ir.Node, theirs: ir.Node) -> str:
        """Return how a node differs from its counterpart, by more than rounding; empty where it does not."""
        for one, two in zip(mine.inputs, theirs.inputs, strict=False):
            if one is not None and two is not None and self._numbers.of(0, one) != self._numbers.of(1, two):
                text = self._of_constants(one, two)
                if text:
                    return f"{printable(name_of(mine))}: the constant {printable(str(two.name))!r} {text}"
        version = self._sides[0].constants.version(mine)
        for name in sorted(mine.attributes.keys() | theirs.attributes.keys()):
            first, second = (node.attributes.get(name) for node in (mine, theirs))
            if not self._same(mine, first, second, version):
                return f"{printable(name_of(mine))}: the attribute {printable(name)!r} changed"
        return ""

    def _same(self, mine: ir.Node, first: ir.Attr | None, second: ir.Attr | None, version: int) -> bool:
        known = [each for each in (first, second) if each is not None]
        if any(list(walk.bodies(each)) for each in known):
            return True
        if first is not None and second is not None and same_attribute(first, second):
            return True
        kernel = self._sides[0].kernel(mine)
        return all(is_default(mine, each, version, kernel=kernel) for each in known)

    def _of_constants(self, one: ir.Value, two: ir.Value) -> str:
        constants = [side.constants for side in self._sides]
        leaves = [each.leaf(value) for each, value in zip(constants, (one, two), strict=True)]
        if any(leaf is not None and leaf.size > _LARGEST for leaf in leaves):
            return "differs"
        try:
            first, second = constants[0].array(one), constants[1].array(two)
            errors = [error for error in (constants[0].error(one), constants[1].error(two)) if error is not None]
        except UnsupportedModelError as error:
            # An expression may have been computed; that two are the same one is known.
            return "" if any(leaf is not None for leaf in leaves) else f"differs, as far as is known: {error}"
        # Ones in front change no number; a shape that they change is seen at any run.
        first, second = (each.reshape(each.shape[_ones(each.shape) :]) for each in (first, second))
        kind = self._sides[0].shapes.dtype(one)
        if first.shape != second.shape or kind != self._sides[1].shapes.dtype(two):
            return f"has shape {list(second.shape)}, expected {list(first.shape)}, or another type"
        if first.dtype.kind != "f":
            unequal = int((first != second).sum())
            return f"differs in {unequal:,} of {first.size:,} values" if unequal else ""
        unit = tolerances.UNIT_ROUNDOFF.get(kind.numpy().name if kind is not None else "", 0.0)
        allowed = ROUNDINGS * unit * np.abs(first) + sum(error.reshape(first.shape) for error in errors)
        difference = np.abs(first - second)
        is_same = (difference <= allowed) | (first == second) | (np.isnan(first) & np.isnan(second))
        return "" if is_same.all() else f"differs by {difference[~is_same].max():.3g}"

    def _is_open(self, node: ir.Node) -> bool:
        """Whether no value of the changed model is known to equal an output of the original's node."""
        numbers = [self._numbers.of(0, value) for value in node.outputs]
        return all(number is None or self._numbers.first(1, number) is None for number in numbers)

    def _key(self, side: int, node: ir.Node) -> Hashable | None:
        """Return the operator and the values it reads, whatever its constants are; None where one has no number."""
        constants = self._sides[side].constants
        inputs: list[Hashable] = []
        for value in node.inputs:
            if value is None or not value.name:
                inputs.append(None)
                continue
            inputs.append(_CONSTANT if constants.has(value) else self._numbers.of(side, value))
            if inputs[-1] is None:
                return None
        version = constants.version(node)
        return (*node.op_identifier(), version, outputs_count(node, version), *inputs)

    def _needed(self, graph: ir.Graph) -> set[ir.Node]:
        """Return the nodes of the changed graph whose values are unknown, and that outputs depend on."""
        needed: set[ir.Node] = set()
        waiting = list(graph.outputs)
        while waiting:
            value = waiting.pop()
            node = value.producer()
            if node is None or node in needed or self._numbers.of(1, value) is not None:
                continue
            needed.add(node)
            waiting += [each for each in node.inputs if each is not None]
            waiting += [each for inner in walk.inner_nodes(node) for each in inner.inputs if each is not None]
        return needed


def _ones(shape: tuple[int, ...]) -> int:
    """Return how many sizes in front are 1."""
    return next((index for index, size in enumerate(shape) if size != 1), len(shape))
