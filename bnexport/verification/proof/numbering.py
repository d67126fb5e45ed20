"""Numbers for the values of two models: equal numbers mean equal values, whatever the names; and how two nodes differ."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport import tolerances
from bnexport.errors import UnsupportedModelError
from bnexport.model_io import ContainedTensor, walk
from bnexport.model_io.validate import printable
from bnexport.verification.proof.attributes import TensorRows, is_default, outputs_count, same_attribute, same_tensor
from bnexport.verification.proof.sides import LOOSE, ROUNDINGS, Side, is_training, name_of

# Numbers for the values of two models: equal numbers mean equal values, whatever the models' names.
#
# An operator with the same attributes on inputs of the same numbers gives the same numbers again (value numbering, as
# compilers do it). Stored and computed constants are numbered by their type, shape and content. What may be random gets a
# number of its own each time; so does what holds a body, which is compared as a whole (`attributes`).

# Elements of a tensor that its key holds; tensors that begin alike are compared as a whole.
_HEAD = 4096
# Elements of a computed constant that is compared within its rounding.
_NEAR = 1 << 20
_COMMUTING = ("Add", "Mul", "Sum", "Max", "Min", "Mean", "And", "Or", "Xor", "Equal")
_NONE: Mapping[int, int] = {}


class Numbering:
    """The numbers of one pair of models; side 0 is the original. exact: no constant is equal within rounding alone."""

    def __init__(self, sides: tuple[Side, Side], *, exact: bool = False) -> None:
        self._sides, self._exact = sides, exact
        self._next = itertools.count()
        self._by_key: dict[Hashable, tuple[int, ...]] = {}
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

    def of(self, side: int, value: ir.Value) -> int | None:
        """Return the number of a value, None where it has none yet."""
        number = self._of[side].get(value)
        if number is None and self._sides[side].constants.has(value):
            number = self._constant(side, value)
            self.set(side, value, number)
        return number

    def first(self, side: int, number: int) -> ir.Value | None:
        """Return the first value of one model that has this number."""
        return self._first[side].get(number)

    def number(self, side: int, node: ir.Node, operands: Mapping[int, int] = _NONE) -> bool:
        """Give numbers to the outputs of an operator; of the other model only if the original has an equal one.

        operands: the numbers that some of its inputs count as.
        """
        key = self.key(side, node, operands)
        if key is None:
            return False
        numbers = self._by_key.get(key, ())
        if not side and len(numbers) < len(node.outputs):
            # Of two equal nodes one may have more of its optional outputs.
            numbers += tuple(self.fresh() for _ in node.outputs[len(numbers) :])
            self._by_key[key] = numbers
        if not numbers:
            return False
        for value, number in zip(node.outputs, numbers, strict=False):
            self.set(side, value, number)
        return True

    def forget(self, node: ir.Node) -> None:
        """Take the numbers of the changed model's node away."""
        for value in node.outputs:
            number = self._of[1].pop(value, None)
            if number is not None and self._first[1].get(number) is value:
                del self._first[1][number]

    def key(self, side: int, node: ir.Node, operands: Mapping[int, int] = _NONE) -> Hashable | None:
        """Return what determines the outputs of a node, without its bodies; None where an input has no number."""
        inputs: list[int | None] = []
        for index, value in enumerate(node.inputs):
            number = self.of(side, value) if value is not None and value.name else None
            number = operands.get(index, number)
            if number is None and value is not None and value.name:
                return None
            inputs.append(number)
        while inputs and inputs[-1] is None:
            inputs.pop()
        if node.op_type in _COMMUTING and None not in inputs:
            inputs.sort()
        version = self._sides[side].constants.version(node)
        made = outputs_count(node, version)
        return (*node.op_identifier(), version, self.attributes(side, node), made, *inputs)

    def attributes(self, side: int, node: ir.Node, without: frozenset[str] = frozenset()) -> Hashable:
        """Return the attributes that are not their defaults."""
        if not node.attributes:
            return ()
        version = self._sides[side].constants.version(node)
        kernel = self._sides[side].kernel(node) if "kernel_shape" in node.attributes else None
        trains = is_training(node, version)
        return tuple(
            (name, attribute.type.value, self._attribute(attribute))
            for name, attribute in sorted(node.attributes.items())
            if name not in without
            and not list(walk.bodies(attribute))
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
        if leaf is not None and math.prod(constants.shape(value)) > _NEAR:
            return self._stored(leaf, constants.shape(value))
        try:
            tensor = leaf if leaf is not None else ir.tensor(np.ascontiguousarray(constants.own(value)))
        except UnsupportedModelError:  # it is what its operator makes of other constants
            node = value.producer()
            is_numbered = node is not None and self.number(side, node)
            return self._of[side][value] if is_numbered else self.fresh()
        shape = constants.shape(value) if leaf is not None else tuple(tensor.shape.numpy())
        number = self._stored(tensor, shape, known=bool(side))
        if number is not None and side:
            return number
        near = self._computed.setdefault((tensor.dtype, shape), [])
        if number is not None:
            near.append((value, number))
            return number
        found = next((other for mine, other in near if self._is_near(mine, value)), None)
        return self._stored(tensor, shape) if found is None else found

    def _is_near(self, mine: ir.Value, theirs: ir.Value) -> bool:
        """Whether two constants, one of them computed, are equal within what an engine's arithmetic may have rounded."""
        first, second = (side.constants for side in self._sides)
        errors = [error for error in (first.error(mine), second.error(theirs)) if error is not None]
        if not errors or self._exact:
            return False
        one, allowed = first.array(mine), np.asarray(sum(errors))
        is_close = np.max(allowed, initial=0.0) <= LOOSE * np.max(np.abs(one), initial=0.0)
        return bool(is_close and (np.abs(one - second.array(theirs)) <= allowed).all())

    def _stored(self, tensor: ir.TensorProtocol, shape: tuple[int, ...] | None = None, *, known: bool = False) -> Any:
        """Return the number of a tensor's type, shape and content. known: None instead of a new number."""
        shape = tuple(tensor.shape.numpy()) if shape is None else shape
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


# Elements of a constant that is compared number by number; a larger one that is not the same differs.
_LARGEST = 1 << 26


# What may be said in several ways: bounds and axes from either end, pads by their sizes, shapes.
_SPELLED = ("auto_pad", "axes", "axis", "ends", "pads", "shape", "starts")
_SHAPING = ("Expand", "Pad", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Unsqueeze")


class Differences:
    """How nodes of one pair of models differ that do the same with equal values but for constants and attributes."""

    def __init__(self, sides: tuple[Side, Side], numbers: Numbering) -> None:
        self._sides, self._numbers = sides, numbers

    def between(self, mine: ir.Node, theirs: ir.Node) -> str:
        """Return how a node differs from one of the original, by more than rounding; empty where it does not."""
        for one, two in zip(mine.inputs, theirs.inputs, strict=False):
            if one is not None and two is not None and self._numbers.of(0, one) != self._numbers.of(1, two):
                if not all(side.constants.has(each) for side, each in zip(self._sides, (one, two), strict=True)):
                    return ""
                text = "" if mine.op_type in _SHAPING else self._of_constants(one, two)
                if text:
                    return f"{printable(name_of(mine))}: the constant {printable(str(two.name))!r} {text}"
        version = self._sides[0].constants.version(mine)
        for name in sorted(mine.attributes.keys() | theirs.attributes.keys()):
            first, second = (node.attributes.get(name) for node in (mine, theirs))
            if name not in _SPELLED and not self._same(mine, first, second, version):
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


def _ones(shape: tuple[int, ...]) -> int:
    """Return how many sizes in front are 1."""
    return next((index for index, size in enumerate(shape) if size != 1), len(shape))
