"""Numbers for the values of two models: equal numbers mean equal values, whatever the names; how nodes and tensors compare."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport import tolerances
from bnexport.errors import UnsupportedModelError
from bnexport.graph.evaluate import FLAGS
from bnexport.model_io import ContainedTensor, walk
from bnexport.model_io.external import read_into
from bnexport.model_io.validate import printable
from bnexport.verification.proof.sides import LOOSE, ROUNDINGS, ConstantValues, Side, is_training, name_of

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


class Numbering:
    """The numbers of one pair of models; side 0 is the original. exact: no constant is equal within rounding alone."""

    def __init__(self, sides: tuple[Side, Side], *, exact: bool = False) -> None:
        self._sides, self._exact = sides, exact
        self._next = itertools.count()
        self._by_key: dict[Hashable, tuple[int, ...]] = {}
        self._of: tuple[dict[ir.Value | None, int], dict[ir.Value | None, int]] = ({}, {})
        self._first: tuple[dict[int, ir.Value], dict[int, ir.Value]] = ({}, {})
        self._heads: dict[Hashable, list[tuple[ir.TensorProtocol, int]]] = {}
        self._computed: dict[Hashable, list[tuple[ir.Value, int]]] = {}

    def fresh(self) -> int:
        """Return a number that no value has."""
        return next(self._next)

    def set(self, side: int, value: ir.Value, number: int) -> None:
        self._of[side][value] = number
        self._first[side].setdefault(number, value)

    def of(self, side: int, value: ir.Value | None) -> int | None:
        """Return the number of a value, None where it has none yet."""
        number = self._of[side].get(value)
        if number is None and self._sides[side].constants.has(value):
            number = self._constant(side, value)
            self.set(side, value, number)
        return number

    def original(self, value: ir.Value) -> int:
        """Return the number of a value of the original, whose nodes all get theirs before those of the other model."""
        number = self.of(0, value)
        assert number is not None, "its graph is not read"
        return number

    def first(self, side: int, number: int) -> ir.Value | None:
        """Return the first value of one model that has this number."""
        return self._first[side].get(number)

    def number(self, side: int, node: ir.Node) -> bool:
        """Give numbers to the outputs of an operator; of the other model only if the original has an equal one."""
        key = self.key(side, node)
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

    def key(self, side: int, node: ir.Node) -> Hashable | None:
        """Return what determines the outputs of a node, without its bodies; None where an input has no number."""
        inputs: list[int | None] = []
        for value in node.inputs:
            number = self.of(side, value) if value is not None and value.name else None
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

    def attributes(self, side: int, node: ir.Node, without: frozenset[str] = frozenset()) -> tuple[Any, ...]:
        """Return the attributes that are not their defaults."""
        if not node.attributes:
            return ()
        version = self._sides[side].constants.version(node)
        kernel = self._sides[side].kernel(node) if "kernel_shape" in node.attributes else None
        trains = is_training(node, version)
        return tuple(
            (name, *self.token(attribute))
            for name, attribute in sorted(node.attributes.items())
            if name not in without
            and not list(walk.bodies(attribute))
            and not is_default(node, attribute, version, kernel=kernel, trains=trains)
        )

    def token(self, attribute: ir.Attr) -> tuple[Hashable, ...]:
        """Return what is equal for attributes of equal types and values."""
        kind, value = attribute.type, attribute.value
        if attribute.is_ref():
            return (kind.value, "of the caller", attribute.ref_attr_name)
        if kind is ir.AttributeType.TENSOR:
            return (kind.value, self._stored(value))
        if kind is ir.AttributeType.TENSORS:
            return (kind.value, *map(self._stored, value))
        return (kind.value, *value) if isinstance(value, list | tuple) else (kind.value, repr(value))

    def _constant(self, side: int, value: ir.Value) -> int:
        constants = self._sides[side].constants
        leaf = constants.leaf(value)
        if leaf is not None and math.prod(constants.shape(value)) > _NEAR:
            return self._stored(leaf, constants.shape(value))
        try:
            tensor = leaf if leaf is not None else _evaluated(constants, value)
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


def _evaluated(constants: ConstantValues, value: ir.Value) -> ir.TensorProtocol:
    """Return a computed constant. Raises UnsupportedModelError where arithmetic in its type leaves no digits of it."""
    own, error = constants.own(value), None
    with contextlib.suppress(UnsupportedModelError):  # it overflows: the lemma that reads it says so
        error = constants.error(value)
    if error is not None and not np.max(error, initial=0.0) <= LOOSE * np.max(
        np.abs(constants.array(value)), initial=0.0
    ):
        raise UnsupportedModelError(f"the constant {value.name!r} has no digits in its type")
    return ir.tensor(np.asarray(own, order="C"))


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
        first, second = (
            {name: value for name, *value in self._numbers.attributes(side, node)}
            for side, node in enumerate((mine, theirs))
        )
        for name in sorted(first.keys() | second.keys()):
            if name not in _SPELLED and first.get(name) != second.get(name):
                return f"{printable(name_of(mine))}: the attribute {printable(name)!r} changed"
        return ""

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


# Read stored tensors in blocks, so that a comparison holds a few megabytes at a time.

# Elements of one block: it stays in the second-level cache.
BLOCK = 1 << 17


class TensorRows(contextlib.AbstractContextManager["TensorRows"]):
    """A tensor seen as (rows, row), read from the first row to the last."""

    def __init__(self, tensor: ir.TensorProtocol, rows: int) -> None:
        self._stack = contextlib.ExitStack()
        self._file: Any = None
        self._position = 0
        if isinstance(tensor, ContainedTensor) and tensor.dtype.bitwidth >= 8:
            self._file = self._stack.enter_context(tensor.file.open())
            self._file.seek(tensor.offset or 0)
            self._dtype = tensor.dtype.numpy().newbyteorder("<")
            self._row = tensor.size // rows if rows else 0
            self._buffer = np.empty(0, self._dtype)
        else:
            self._array = tensor.numpy().reshape(rows, -1) if tensor.size else np.zeros((rows, 0))

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def next(self, count: int) -> np.ndarray:
        """Return the next `count` rows, valid until the next call."""
        if self._file is None:
            self._position += count
            return self._array[self._position - count : self._position]
        if self._buffer.size != count * self._row:
            self._buffer = np.empty(count * self._row, self._dtype)
        read_into(self._file, self._buffer.view(np.uint8).data)
        return self._buffer.reshape(count, self._row)


def same_tensor(first: ir.TensorProtocol, second: ir.TensorProtocol) -> bool:
    """Equal type, shape and bytes."""
    if first is second:
        return True
    if first.dtype != second.dtype or first.shape.numpy() != second.shape.numpy():
        return False
    place = _place(first)
    if place is not None and place == _place(second):
        return True
    if first.dtype is ir.DataType.STRING:
        return bool(np.array_equal(first.numpy(), second.numpy()))
    if first.dtype.bitwidth < 8:
        return bool(first.tobytes() == second.tobytes())
    size = first.size
    if size == 0:
        return True
    with TensorRows(first, size) as one, TensorRows(second, size) as two:
        for count in pieces(size, 1):
            mine, other = one.next(count), two.next(count)
            unsigned = f"u{mine.dtype.itemsize}"
            if mine.dtype.itemsize > 8:
                if mine.tobytes() != other.tobytes():
                    return False
            elif not np.array_equal(
                np.ascontiguousarray(mine).reshape(-1).view(unsigned),
                np.ascontiguousarray(other).reshape(-1).view(unsigned),
            ):
                return False
    return True


def pieces(rows: int, row: int) -> Iterator[int]:
    """Yield how many rows to read at a time."""
    step = max(1, BLOCK // max(row, 1))
    for start in range(0, rows, step):
        yield min(step, rows - start)


def _place(tensor: ir.TensorProtocol) -> tuple[object, int | None] | None:
    """Return the file that holds a tensor, and where; None for one in memory."""
    return (tensor.file, tensor.offset) if isinstance(tensor, ContainedTensor) else None


# Operators whose schemas describe these defaults in words alone: 1 and 0 along each axis.
_WINDOWED = ("Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "AveragePool", "MaxPool", "LpPool")
_ONES, _ZEROS = ("strides", "dilations"), ("pads", "output_padding")


def is_default(
    node: ir.Node, attribute: ir.Attr, version: int, *, kernel: Sequence[int] | None = None, trains: bool = True
) -> bool:
    """Whether an absent attribute would mean the same.

    version: of the opset. kernel: the size of the node's, where it is known. trains: False for a BatchNormalization in
    inference, which has nothing to average.
    """
    if attribute.is_ref() or node.domain != "":
        return False
    name, value = attribute.name, attribute.value
    if name in ("kernel_shape", *_ONES, *_ZEROS) and attribute.type is not ir.AttributeType.INTS:
        return False
    if node.op_type in _WINDOWED and name in _ONES:
        return all(size == 1 for size in value)
    if node.op_type in _WINDOWED and name in _ZEROS:
        return not any(value)
    if name == "kernel_shape" and node.op_type in ("Conv", "ConvTranspose"):
        return tuple(value) == kernel
    if (node.op_type, name) == ("BatchNormalization", "momentum") and not trains:
        return True
    return _schema_default(node.op_type, version, name, value)


def outputs_count(node: ir.Node, version: int) -> int:
    """Return the number of outputs; 0 where the schema calls all but the first ones optional, whose absence changes nothing.

    The number is part of what a Split does, of what an older BatchNormalization means, and of an unknown operator.
    """
    if len(node.outputs) == 1:
        return 1
    signature = _signature(node.op_type, version) if node.domain == "" else None
    present = max((index + 1 for index, value in enumerate(node.outputs) if value.name), default=0)
    if signature is None or node.op_type == "BatchNormalization" or present > signature.outputs:
        return present
    return max(signature.required, 1) if signature.optional else present


@dataclasses.dataclass(frozen=True)
class _Signature:
    """What a schema says of an operator. least, most: inputs. kinds: ONNX's numbers of attribute types.

    required, outputs: least and most outputs. optional: whether those beyond `required` are one by one, none variadic.
    """

    least: int
    most: int
    kinds: dict[str, int]
    required: int
    outputs: int
    optional: bool


@functools.cache
def _signature(operator: str, version: int) -> _Signature | None:
    found = schema(operator, version)
    if found is None:
        return None
    kinds = {name: attribute.type.value for name, attribute in found.attributes.items()}
    import onnx

    option = onnx.defs.OpSchema.FormalParameterOption.Optional
    optional = all(output.option == option for output in found.outputs[found.min_output :])
    return _Signature(
        found.min_input, found.max_input, kinds, found.min_output, found.max_output, optional and not _variadic(found)
    )


def _variadic(found: Any) -> bool:
    import onnx

    return any(output.option == onnx.defs.OpSchema.FormalParameterOption.Variadic for output in found.outputs)


def check_node(node: ir.Node, version: int) -> None:
    """Raise UnsupportedModelError where a node of the standard is not as its schema says, or belongs to its function's caller."""
    signature = _signature(node.op_type, version)
    if signature is None or not signature.least <= len(node.inputs) <= signature.most:
        raise UnsupportedModelError(f"{node.op_type} with {len(node.inputs)} inputs, of opset {version}")
    if any(value is None or not value.name for value in node.inputs[: signature.least]):
        raise UnsupportedModelError(f"{node.op_type} without an input that it needs")
    for name, attribute in node.attributes.items():
        if attribute.is_ref() or attribute.type.value != signature.kinds.get(name):
            raise UnsupportedModelError(f"{node.op_type} with an attribute {name!r} that its schema does not have")
        if name in FLAGS and attribute.value not in (0, 1):
            raise UnsupportedModelError(f"{node.op_type} with {name}={attribute.value}, which is neither 0 nor 1")


def schema(operator: str, version: int) -> Any:
    """Return the schema of an operator of the standard, or None."""
    import onnx

    try:
        return onnx.defs.get_schema(operator, version)
    except onnx.defs.SchemaError:
        return None


def _schema_default(operator: str, version: int, name: str, value: object) -> bool:
    import onnx

    known = schema(operator, version)
    declared = None if known is None else known.attributes.get(name)
    if declared is None or not declared.default_value.name:
        return False
    default = onnx.helper.get_attribute_value(declared.default_value)
    if isinstance(default, bytes):
        default = default.decode()
    if isinstance(default, float):
        return isinstance(value, float) and np.float32(default) == np.float32(value)
    return bool(default == value)
