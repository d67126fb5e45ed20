"""Numbers for the values of two models: equal numbers mean equal values, whatever the names; and the nodes that correspond."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport import tolerances
from bnexport.errors import UnsupportedModelError
from bnexport.model_io import ContainedTensor, walk
from bnexport.model_io.validate import printable
from bnexport.verification.proof.attributes import TensorRows, is_default, outputs_count, same_attribute, same_tensor
from bnexport.verification.proof.regions import ROUNDINGS, Side, is_training, name_of

# Numbers for the values of two models: equal numbers mean equal values, whatever the models' names.
#
# An operator with the same attributes on inputs of the same numbers gives the same numbers again (value numbering, as
# compilers do it). Stored and computed constants are numbered by their type, shape and content. What may be random gets a
# number of its own each time; so does what holds a body, which is compared as a whole (`attributes`).

# Elements of a tensor that its key holds; tensors that begin alike are compared as a whole.
_HEAD = 4096
# Elements of a computed constant that is compared within its rounding.
_NEAR = 1 << 20


class Numbering:
    """The numbers of one pair of models; side 0 is the original. exact: no constant is equal within rounding alone."""

    def __init__(self, sides: tuple[Side, Side], *, exact: bool = False) -> None:
        self._sides, self._exact = sides, exact
        # What operands of the changed model count as.
        self._read: dict[tuple[ir.Node, int], int] = {}
        self._next = itertools.count()
        self._by_key: dict[Hashable, tuple[int, ...]] = {}
        # What a proof told of nodes of the changed model: others that equal them make the same.
        self._learned: dict[Hashable, tuple[int, ...]] = {}
        self._of: tuple[dict[ir.Value, int], dict[ir.Value, int]] = ({}, {})
        self._first: tuple[dict[int, ir.Value], dict[int, ir.Value]] = ({}, {})
        self._heads: dict[Hashable, list[tuple[ir.TensorProtocol, int]]] = {}
        self._computed: dict[Hashable, list[tuple[ir.Value, int]]] = {}

    def fresh(self) -> int:
        """Return a number that no value has."""
        return next(self._next)

    def set(self, side: int, value: ir.Value, number: int) -> None:
        self._of[side][value] = number
        self._first[side].setdefault(number, value)

    def read(self, node: ir.Node, index: int, number: int) -> None:
        """Let an operand of the changed model count as a value of the original that it equals as well."""
        self._read[node, index] = number

    def of(self, side: int, value: ir.Value) -> int | None:
        """Return the number of a value, None where it has none yet."""
        number = self._of[side].get(value)
        if number is None and self._sides[side].constants.has(value):
            number = self._constant(side, value)
            self.set(side, value, number)
        return number

    def prove(self, value: ir.Value, number: int) -> None:
        """Give its number to a value of the changed model, and to what equal operators make."""
        self.set(1, value, number)
        node = value.producer()
        if node is None or value.index() != 0 or self._sides[1].is_random(node):
            return
        key = self.key(1, node)
        if key is not None:
            self._learned.setdefault(key, (number,))

    def snapshot(self) -> tuple[dict[Any, Any], ...]:
        """Return the numbers of the changed model."""
        return dict(self._of[1]), dict(self._first[1]), dict(self._learned)

    def restore(self, saved: tuple[dict[Any, Any], ...]) -> None:
        """Go back to an earlier state of the changed model's numbers."""
        of, first, learned = map(dict, saved)
        self._of, self._first, self._learned = (self._of[0], of), (self._first[0], first), learned

    def first(self, side: int, number: int) -> ir.Value | None:
        """Return the first value of one model that has this number."""
        return self._first[side].get(number)

    def number(self, side: int, node: ir.Node) -> bool:
        """Give numbers to the outputs of an operator; of the other model only if the original has an equal one."""
        key = self.key(side, node)
        if key is None:
            return False
        numbers = self._by_key.get(key) or (self._learned.get(key, ()) if side else ())
        if not side and len(numbers) < len(node.outputs):
            # Of two equal nodes one may have more of its optional outputs.
            numbers += tuple(self.fresh() for _ in node.outputs[len(numbers) :])
            self._by_key[key] = numbers
        if not numbers:
            return False
        for value, number in zip(node.outputs, numbers, strict=False):
            self.set(side, value, number)
        return True

    def key(self, side: int, node: ir.Node) -> Hashable | None:
        """Return what determines the outputs of a node, without its bodies; None where an input has no number."""
        present = [value if value is not None and value.name else None for value in node.inputs]
        while present and present[-1] is None:
            present.pop()
        inputs = tuple(
            None if value is None else self._read.get((node, index), self.of(side, value))
            for index, value in enumerate(present)
        )
        if any(value is not None and number is None for value, number in zip(present, inputs, strict=True)):
            return None
        version = self._sides[side].constants.version(node)
        return (
            *node.op_identifier(),
            version,
            self._attributes(side, node, version),
            outputs_count(node, version),
            inputs,
        )

    def _attributes(self, side: int, node: ir.Node, version: int) -> Hashable:
        """Return the attributes that are not their defaults."""
        kernel = self._sides[side].kernel(node)
        trains = is_training(node, version)
        return tuple(
            (name, attribute.type.value, self._attribute(attribute))
            for name, attribute in sorted(node.attributes.items())
            if not list(walk.bodies(attribute))
            and not is_default(node, attribute, version, kernel=kernel, trains=trains)
        )

    def _attribute(self, attribute: ir.Attr) -> Hashable:
        if attribute.is_ref():
            return ("of the caller", attribute.ref_attr_name)
        value: Any = attribute.value
        if attribute.type is ir.AttributeType.TENSOR:
            return self._stored(value)
        if attribute.type is ir.AttributeType.TENSORS:
            return tuple(map(self._stored, value))
        return tuple(value) if isinstance(value, list | tuple) else str(value) if value != value else value  # noqa: PLR0124

    def _constant(self, side: int, value: ir.Value) -> int:
        constants = self._sides[side].constants
        leaf = constants.leaf(value)
        if leaf is not None and leaf.size > _NEAR:
            return self._stored(leaf)
        try:
            tensor = leaf if leaf is not None else ir.tensor(np.ascontiguousarray(constants.own(value)))
        except UnsupportedModelError:  # it is what its operator makes of other constants
            node = value.producer()
            is_numbered = node is not None and self.number(side, node)
            return self._of[side][value] if is_numbered else self.fresh()
        number = self._stored(tensor, known=True) if side else self._stored(tensor)
        if number is not None and side:
            return number
        near = self._computed.setdefault((tensor.dtype, tuple(tensor.shape.numpy())), [])
        if number is not None:
            near.append((value, number))
            return number
        found = next((other for mine, other in near if self._is_near(mine, value)), None)
        return self._stored(tensor) if found is None else found

    def _is_near(self, mine: ir.Value, theirs: ir.Value) -> bool:
        """Whether two constants, one of them computed, are equal within what an engine's arithmetic may have rounded."""
        first, second = (side.constants for side in self._sides)
        errors = [error for error in (first.error(mine), second.error(theirs)) if error is not None]
        return (
            bool(errors)
            and not self._exact
            and bool((np.abs(first.array(mine) - second.array(theirs)) <= sum(errors)).all())
        )

    def _stored(self, tensor: ir.TensorProtocol, *, known: bool = False) -> Any:
        """Return the number of a tensor's type, shape and content. known: None instead of a new number."""
        shape = tuple(tensor.shape.numpy())
        size = math.prod(shape)
        if size == 0:
            head = b""
        elif tensor.dtype is ir.DataType.STRING:
            head = repr(tensor.numpy().tolist()).encode()
        elif tensor.dtype.bitwidth < 8:
            head = tensor.tobytes()
        elif size <= _HEAD and not isinstance(tensor, ContainedTensor):
            head = tensor.numpy().tobytes()
        else:
            with TensorRows(tensor, size) as rows:
                head = np.ascontiguousarray(rows.next(min(size, _HEAD))).tobytes()
        key = ("constant", tensor.dtype, shape, hashlib.blake2b(head).digest())
        others = self._heads.setdefault(key, [])
        for other, number in others:
            if size <= _HEAD or same_tensor(other, tensor):
                return number
        if known:
            return None
        others.append((tensor, self.fresh()))
        return others[-1][1]


# Find nodes that stand at the same place in two models, and differ in constants or attributes alone.
#
# A node of the changed model has a counterpart where the original has the same operator on equal values. If the models are
# equal but for such nodes, they correspond node by node: one of them is another model, whatever a run shows. A constant may
# differ by what the rounding of its type explains.

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
