"""Prove a region that is one linear operator between per-channel maps, weight by weight.

The original computes y = k (W (p x + q) + b) + h, the folded model y = k' (W' (p' x + q') + b') + h', with p, q over
input channels and k, h over output channels. Both are the same function of x if, for each weight and each channel,

    k W p = k' W' p'                    and      k (W q + b) + h = k' (W' q' + b') + h'

up to the rounding of what the folded model stores. A weight is one coefficient of one output, so nothing can cancel.
Without padding the second line holds at the borders, too; with it q = q' = 0 is asked for. Weights are streamed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from bnexport.graph.shapes import Shape
from bnexport.verification.proof.attributes import TensorRows, check_node, is_default, pieces
from bnexport.verification.proof.regions import NOISE, Parameter, Region, Side, is_training, original, stored

_SEEN = 64
_LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_COPIES = ("Identity", "Cast")
_MAPS = ("BatchNormalization", "Add", "Sub", "Mul", "Div", "Sum", "Neg", *_COPIES)


class _Stored(NamedTuple):
    """A weight, how its type rounds, the relative error of a fold's arithmetic, and how far an engine that computes it may be."""

    tensor: ir.TensorProtocol
    roundoff: tuple[float, float]
    slack: float
    error: np.ndarray | None


class NotAChain(Exception):
    """The region has another form."""


@dataclasses.dataclass(frozen=True)
class Proof:
    """The largest error found and the largest that is allowed, relative to the largest coefficient of all.

    share: the largest that is allowed, relative to the largest coefficient of its own output.
    """

    error: float
    bound: float
    share: float = 0.0


class Violation(Exception):
    """The two regions are different functions. error: of a coefficient, relative to the largest; 0 where none was compared."""

    def __init__(self, reason: str, error: float = 0.0) -> None:
        super().__init__(reason)
        self.error = error if math.isfinite(error) else 0.0


class OtherShape(Violation):
    """The two regions make different shapes, which a reader may make equal again."""


@dataclasses.dataclass
class _Map:
    """x -> k x + h for each channel, with bounds of their errors."""

    k: np.ndarray
    h: np.ndarray
    k_error: np.ndarray
    h_error: np.ndarray
    # Size of the terms that h is a sum of.
    size: np.ndarray
    # Shapes of the operands, and the number of channels that a batch norm in front asks for.
    shapes: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    channels: int | None = None

    @classmethod
    def identity(cls) -> _Map:
        return cls(np.ones(1), np.zeros(1), np.zeros(1), np.zeros(1), np.zeros(1))

    def onto(self, data: Shape) -> Shape:
        """Return the shape of a value of shape `data` behind the map. An unknown size is None or a name."""
        rank = max(len(data), *(len(shape) for shape in self.shapes), 0)
        sizes: list[int | str | None] = [*[1] * (rank - len(data)), *data]
        if self.channels is not None and len(data) > 1:
            sizes[1] = self.channels
        for shape in self.shapes:
            # An operand's size is 1, or it is that of the result.
            sizes[rank - len(shape) :] = [
                size if own == 1 else own for own, size in zip(shape, sizes[rank - len(shape) :], strict=True)
            ]
        return tuple(sizes)

    def scale(self, factor: Parameter) -> None:
        values, error = factor.values, factor.slack
        self.h_error = np.abs(values) * self.h_error + error * np.abs(self.h)
        self.k_error = np.abs(values) * self.k_error + error * np.abs(self.k)
        self.k, self.h, self.size = self.k * values, self.h * values, self.size * np.abs(values)

    def shift(self, addend: Parameter, sign: float = 1.0) -> None:
        self.h = self.h + sign * addend.values
        self.h_error = self.h_error + addend.slack
        self.size = self.size + np.abs(addend.values)


class _Chain:
    """One side's region, read from its output upwards."""

    def __init__(self, region: Region, side: Side, *, is_folded: bool, pointwise: bool = False) -> None:
        """pointwise: a depthwise 1x1 Conv is a map, not the linear operator."""
        nodes, output = region.nodes[is_folded], region.output[is_folded]
        self.side, self.is_folded = side, is_folded
        self.axis: int | None = None
        self._pointwise = pointwise
        inside = set(nodes)
        after: list[tuple[ir.Node, int]] = []
        before: list[tuple[ir.Node, int]] = []
        self.linear: ir.Node | None = None
        self.place = 0
        value, current = output, after
        while (node := value.producer()) in inside and node is not None:
            if value is not node.outputs[0] or len([each for each in node.outputs if each.uses()]) > 1:
                raise NotAChain
            data = list(side.data(node))
            if len(data) != 1 or node.domain != "":
                raise NotAChain
            check_node(node, side.constants.version(node))
            if node.op_type in _LINEAR and self.linear is None and not self._is_pointwise(node):
                self.linear, self.place, current = node, data[0][0], before
            elif self._is_map(node, data[0][1]) and node not in region.rounding:
                current.append((node, data[0][0]))
            else:
                raise NotAChain
            inside.discard(node)
            value = data[0][1]
        if inside:
            raise NotAChain
        self.input = value
        self._after, self._before = after[::-1], before[::-1]

    def _is_map(self, node: ir.Node, data: ir.Value) -> bool:
        if node.op_type not in _MAPS:
            return self._is_pointwise(node)
        return node.op_type != "Cast" or self.side.keeps_floats(node, data)

    def _is_pointwise(self, node: ir.Node) -> bool:
        """Whether a node is a depthwise 1x1 Conv, if these are maps."""
        if not self._pointwise or node.op_type != "Conv" or node.inputs[1] is None:
            return False
        if not self.side.constants.has(node.inputs[1]):
            return False
        shape = self.parameter(node, 1).values.shape
        version = self.side.constants.version(node)
        attributes = [
            each
            for name, each in node.attributes.items()
            if name not in ("group", "dilations") and not is_default(node, each, version, kernel=shape[2:])
        ]
        group = node.attributes["group"].as_int() if "group" in node.attributes else 1
        return not attributes and group == shape[0] and math.prod(shape[1:]) == 1 and len(shape) > 2

    def maps(self, rank: int | None) -> tuple[_Map, _Map]:
        """Before and after the linear operator. rank: of all values; channels are axis `channel`."""
        return self._map(self._before, rank), self._map(self._after, rank)

    def _map(self, steps: list[tuple[ir.Node, int]], rank: int | None) -> _Map:
        result, self.axis = _Map.identity(), self._channel_axis(rank)
        for index, (node, place) in enumerate(steps):
            if node.op_type == "BatchNormalization":
                self._normalise(result, node, place, rank)
                if index == 0:
                    result.channels = max(result.k.size, result.h.size)
            elif node.op_type == "Conv":
                self._channelwise(result, node, place, rank)
            elif node.op_type not in _COPIES:
                self._arithmetic(result, node, place, rank)
        return result

    def _channel_axis(self, rank: int | None) -> int | None:
        """Return the axis of channels, where the linear operator fixes it."""
        if self.linear is None:
            return None
        return 1 if self.linear.op_type != "MatMul" else None if rank is None else rank - 1

    def _along(self, axis: int) -> None:
        if self.axis is None:
            self.axis = axis
        if self.axis != axis:
            raise NotAChain

    def _normalise(self, result: _Map, node: ir.Node, place: int, rank: int | None) -> None:
        unknown = {*node.attributes} - {"epsilon", "momentum", "training_mode", "is_test", "consumed_inputs"}
        if place != 0 or len(node.inputs) != 5 or unknown or is_training(node, self.side.constants.version(node)):
            raise NotAChain
        if rank is None and self.axis is None:
            raise NotAChain
        self._along(1)
        scale, bias, mean, var = (self.parameter(node, index) for index in range(1, 5))
        if rank is not None:
            result.shapes.append((scale.values.size, *[1] * (rank - 2)))
        factor = normalising(node, scale, var)
        result.shift(mean, -1.0)
        result.scale(factor)
        result.shift(bias)

    def _channelwise(self, result: _Map, node: ir.Node, place: int, rank: int | None) -> None:
        weight = self.parameter(node, 1)
        if place != 0 or rank != weight.values.ndim:
            raise NotAChain
        self._along(1)
        result.shapes.append((weight.values.size, *[1] * (rank - 2)))
        result.scale(_flat(weight))
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            result.shift(_flat(self.parameter(node, 2)))

    def _arithmetic(self, result: _Map, node: ir.Node, place: int, rank: int | None) -> None:
        if node.attributes or self.side.constants.version(node) < 7:
            raise NotAChain
        kind = node.op_type
        others = [self.parameter(node, index) for index in range(len(node.inputs)) if index != place]
        result.shapes += [operand.values.shape for operand in others]
        others = [self._per_channel(operand, rank) for operand in others]
        if kind not in ("Sum", "Neg") and len(others) != 1:
            raise NotAChain
        if kind == "Neg" or (kind == "Sub" and place == 1):
            result.scale(Parameter(-np.ones(1)))
        for operand in others:
            if kind in ("Add", "Sum"):
                result.shift(operand)
            elif kind == "Sub":
                result.shift(operand, -1.0 if place == 0 else 1.0)
            elif kind == "Mul":
                result.scale(operand)
            elif place == 0 and operand.values.all():
                result.scale(reciprocal(operand))
            else:
                raise NotAChain

    def _per_channel(self, operand: Parameter, rank: int | None) -> Parameter:
        shape = operand.values.shape
        if operand.values.size == 1 and (rank is None or len(shape) <= rank) and not (rank is None and shape):
            return Parameter(operand.values.reshape(1), None if operand.error is None else operand.error.reshape(1))
        if rank is None or len(shape) > rank:
            raise NotAChain
        wide = [axis + rank - len(shape) for axis, size in enumerate(shape) if size != 1]
        if len(wide) != 1:
            raise NotAChain
        self._along(wide[0])
        return _flat(operand)

    def parameter(self, node: ir.Node, index: int) -> Parameter:
        """Input `index` of a node, which is constant."""
        value = node.inputs[index]
        if value is None or not self.side.constants.has(value):
            raise NotAChain
        result = stored(self.side, value, None) if self.is_folded else original(self.side, value)
        if result.values.dtype != np.float64:
            raise NotAChain
        return result


def _flat(parameter: Parameter) -> Parameter:
    return Parameter(parameter.values.reshape(-1), None if parameter.error is None else parameter.error.reshape(-1))


def normalising(node: ir.Node, scale: Parameter, var: Parameter) -> Parameter:
    """scale / sqrt(var + epsilon) of a BatchNormalization."""
    attribute = node.attributes.get("epsilon")
    epsilon = float(np.float32(1e-5)) if attribute is None else attribute.as_float()
    total = var.values + epsilon
    if not (total > 0).all():
        raise NotAChain
    factor = scale.values / np.sqrt(total)
    error = scale.slack / np.sqrt(total) + np.abs(factor) * 0.5 * (var.slack / total)
    return Parameter(factor, error)


def reciprocal(operand: Parameter) -> Parameter:
    """1 / operand."""
    inverse = 1.0 / operand.values
    return Parameter(inverse, np.asarray(operand.slack * inverse**2))


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A linear operator's weight as (rows, columns, kernel), and which channel each row and column belongs to.

    out_rows: rows are output channels; otherwise columns are.
    """

    stored: _Stored
    shape: tuple[int, int, int, int]  # groups, rows of a group, columns, kernel
    out_rows: bool
    factor: float
    bias: Parameter | None
    attributes: tuple[object, ...]
    padded: bool

    @property
    def outputs(self) -> int:
        groups, rows, columns, _ = self.shape
        return groups * (rows if self.out_rows else columns)

    @property
    def inputs(self) -> int:
        groups, rows, columns, _ = self.shape
        return groups * (columns if self.out_rows else rows)


def prove(region: Region, original_side: Side, folded_side: Side, rank: int | None) -> Proof:
    """Prove the region. rank: of its output, where it is known. Raises NotAChain or Violation."""
    mine = _Chain(region, original_side, is_folded=False)
    theirs = _Chain(region, folded_side, is_folded=True)
    if (mine.input, theirs.input) not in region.entering or len(region.entering) != 1:
        raise NotAChain
    if (mine.linear is None) != (theirs.linear is None):
        mine, theirs = (
            _Chain(region, side, is_folded=place == 1, pointwise=True)
            for place, side in enumerate((mine.side, theirs.side))
        )
    if (mine.linear is None) != (theirs.linear is None):
        raise NotAChain
    if mine.linear is None or theirs.linear is None:
        return _maps_only(mine, theirs, rank)
    if mine.linear.op_type != theirs.linear.op_type or mine.place != theirs.place:
        raise NotAChain
    first, second = _weight(mine, mine.linear), _weight(theirs, theirs.linear)
    if first.attributes != second.attributes or first.shape != second.shape or first.out_rows != second.out_rows:
        raise NotAChain
    if first.stored.tensor.shape.numpy() != second.stored.tensor.shape.numpy():
        raise NotAChain
    if mine.linear.op_type in ("Conv", "ConvTranspose"):
        rank = len(first.stored.tensor.shape)
    elif mine.linear.op_type == "Gemm":
        rank = 2
    (p, k), (p2, k2) = mine.maps(rank), theirs.maps(rank)
    for each, size in ((p, first.inputs), (p2, first.inputs), (k, first.outputs), (k2, first.outputs)):
        if each.k.size not in (1, size) or each.h.size not in (1, size):
            raise NotAChain
    if first.padded and any(each.any() for each in (p.h, p2.h, p.h_error, p2.h_error)):
        raise NotAChain
    _check_shapes(p, p2, lambda: _data_shape(mine, rank))
    _check_shapes(k, k2, lambda: _behind(mine, p, rank, first.outputs))
    return _compare(first, second, (p, k), (p2, k2))


def _maps_only(mine: _Chain, theirs: _Chain, rank: int | None) -> Proof:
    (_, k), (_, k2) = mine.maps(rank), theirs.maps(rank)
    if mine.axis is not None and theirs.axis is not None and mine.axis != theirs.axis:
        raise NotAChain
    sizes = {k.k.size, k2.k.size, k.h.size, k2.h.size} - {1}
    if len(sizes) > 1:
        raise NotAChain
    _check_shapes(k, k2, lambda: _data_shape(mine, None))
    allowed = k.k_error + k2.k_error + NOISE * np.abs(k.k)
    proof = _within(k2.k - k.k, allowed, np.abs(k.k), "scale")
    size = k.size + k2.size
    return _joined(proof, _within(k2.h - k.h, k.h_error + k2.h_error + NOISE * size, np.abs(k.h), "shift"))


def _data_shape(chain: _Chain, rank: int | None) -> Shape | None:
    """Return the shape of what enters a chain, as far as it is known. rank: that its operator asks for."""
    shape = chain.side.shapes.of(chain.input)
    return shape if shape is not None or rank is None else (None,) * rank


def _check_shapes(mine: _Map, theirs: _Map, data: Callable[[], Shape | None]) -> None:
    """Raise NotAChain where one of two maps may broadcast to another shape. data: of what both are given."""
    if mine.onto(()) == theirs.onto(()):
        return
    theirs.channels = mine.channels
    shape = data()
    if shape is None or mine.onto(shape) != theirs.onto(shape):
        raise NotAChain


def _behind(chain: _Chain, before: _Map, rank: int | None, outputs: int) -> Shape | None:
    """Return the shape of a linear operator's output, as far as it is known."""
    if chain.linear is not None and chain.linear.op_type == "MatMul":
        data = _data_shape(chain, None)
        return None if data is None else (*before.onto(data)[:-1], outputs)
    return None if rank is None else (None, outputs, *(None,) * (rank - 2))


def _within(
    difference: np.ndarray,
    allowed: np.ndarray,
    size: np.ndarray,
    what: str,
    start: int = 0,
    others: tuple[int, ...] = (),
    tiny: np.ndarray | float = 0.0,
) -> Proof:
    """start: the row of a weight that the arrays begin with. others: the axes along which one output has its coefficients.
    tiny: the part of what is allowed for numbers that are too small for their type; it is no part of the share.
    """
    difference = np.abs(difference)
    whole = float(np.max(size, initial=0.0)) or 1.0
    right = (difference <= allowed) & np.isfinite(difference)
    if not right.all():
        at = np.unravel_index(
            int(np.argmax(np.where(right, 0.0, np.where(np.isnan(difference), np.inf, difference)))), right.shape
        )
        got, limit = (float(np.broadcast_to(each, right.shape)[at]) for each in (difference, allowed))
        place = [int(each) for each in at]
        place[0] += start
        where = f"row {place[0]}, column {place[1]}" if len(place) > 1 else f"channel {place[0]}"
        if not (math.isfinite(got) and math.isfinite(limit)):
            raise Violation(f"the {what} of {where} is not finite in one of the models")
        raise Violation(f"the {what} of {where} differs by {got:.3g}, allowed {limit:.3g}", got / whole)
    largest = size.max(axis=others, initial=0.0)
    most = allowed.max(axis=others, initial=0.0)
    share = float(np.max((allowed - tiny).max(axis=others, initial=0.0) / measured(largest, whole), initial=0.0))
    return Proof(float(difference.max(initial=0.0)) / whole, float(np.max(most, initial=0.0)) / whole, share)


def measured(largest: np.ndarray, whole: float) -> np.ndarray:
    """Return what errors of each output are compared with: the others' coefficients where it has none."""
    return np.where(largest > 0, largest, whole)


def _joined(first: Proof, second: Proof) -> Proof:
    return Proof(*map(max, dataclasses.astuple(first), dataclasses.astuple(second)))


def _weight(chain: _Chain, node: ir.Node) -> _Weight:
    """Read the weight of a linear operator whose data is `chain.place`."""
    kind = node.op_type
    if kind == "MatMul":
        if chain.place != 0:
            raise NotAChain
        weight = _tensor(chain, node, 1)
        shape = tuple(weight.tensor.shape.numpy())
        if len(shape) < 2 or math.prod(shape[:-2]) != 1 or len(shape) > 2:
            raise NotAChain
        return _Weight(weight, (1, shape[0], shape[1], 1), False, 1.0, None, (), False)
    if chain.place != 0:
        raise NotAChain
    weight = _tensor(chain, node, 1)
    shape = tuple(weight.tensor.shape.numpy())
    bias = chain.parameter(node, 2) if len(node.inputs) > 2 and node.inputs[2] is not None else None
    if kind == "Gemm":
        return _gemm(node, weight, bias)
    group = node.attributes["group"].as_int() if "group" in node.attributes else 1
    if len(shape) < 3 or group < 1 or shape[0] % group:
        raise NotAChain
    if bias is not None and bias.values.shape != (shape[0] if kind == "Conv" else shape[1] * group,):
        raise NotAChain
    kernel = math.prod(shape[2:])
    if any(attribute.is_ref() for attribute in node.attributes.values()):
        raise NotAChain
    version = chain.side.constants.version(node)
    attributes = tuple(
        sorted(
            (name, str(attribute.value))
            for name, attribute in node.attributes.items()
            if not is_default(node, attribute, version, kernel=shape[2:])
        )
    )
    view = (group, shape[0] // group, shape[1], kernel)
    return _Weight(weight, view, kind == "Conv", 1.0, bias, attributes, kind != "Conv" or _pads(node))


def _gemm(node: ir.Node, stored_weight: _Stored, bias: Parameter | None) -> _Weight:
    def number(name: str, default: float) -> float:
        return float(node.attributes[name].value) if name in node.attributes else default

    tensor = stored_weight.tensor
    if number("transA", 0) or len(tensor.shape) != 2:
        raise NotAChain
    transposed = bool(number("transB", 0))
    beta = number("beta", 1.0)
    if bias is not None:
        shape = bias.values.shape
        outputs = tensor.shape.numpy()[0 if transposed else 1]
        if bias.values.size not in (1, outputs) or len(shape) > 2 or (bias.values.size > 1 and shape[-1] == 1):
            raise NotAChain
        error = None if bias.error is None else np.abs(beta) * bias.error.reshape(-1)
        bias = Parameter(beta * bias.values.reshape(-1), error)
    rows, columns = tensor.shape.numpy()
    return _Weight(stored_weight, (1, rows, columns, 1), transposed, number("alpha", 1.0), bias, (transposed,), False)


def _tensor(chain: _Chain, node: ir.Node, index: int) -> _Stored:
    """Read a weight, or compute it."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None:
        raise NotAChain
    constants = chain.side.constants
    tensor, error = constants.leaf(value), None
    if tensor is None:
        tensor, error = ir.tensor(np.ascontiguousarray(constants.array(value))), constants.error(value)
    if not tensor.dtype.is_floating_point() or tensor.dtype.bitwidth < 16:
        raise NotAChain
    roundoff = constants.roundoff(value)
    return _Stored(tensor, roundoff, chain.side.roundings * roundoff[0], error)


def _pads(node: ir.Node) -> bool:
    auto = node.attributes["auto_pad"].as_string() if "auto_pad" in node.attributes else "NOTSET"
    pads = node.attributes["pads"].as_ints() if "pads" in node.attributes else ()
    return auto not in ("NOTSET", "", "VALID") or (auto != "VALID" and any(pads))


def _compare(first: _Weight, second: _Weight, mine: tuple[_Map, _Map], theirs: tuple[_Map, _Map]) -> Proof:
    """Both lines of the head of this file."""
    scan = _Scan((first, second), (mine, theirs))
    proof = scan.run()
    size, allowed = np.zeros(first.outputs), np.zeros(first.outputs)
    totals = []
    for weight, (_, after), (offset, magnitude, error), u in (
        (first, mine, scan.sums[0], 0.0),
        (second, theirs, scan.sums[1], second.stored.roundoff[0]),
    ):
        bias = Parameter(np.zeros(1)) if weight.bias is None else weight.bias
        inner = weight.factor * offset + bias.values
        inner_size = abs(weight.factor) * magnitude
        inner_error = (u + weight.stored.slack) * inner_size + abs(weight.factor) * error + bias.slack
        totals.append(after.k * inner + after.h)
        size = size + np.abs(after.k) * (inner_size + np.abs(bias.values)) + after.size
        allowed = allowed + np.abs(after.k) * inner_error + after.k_error * np.abs(inner) + after.h_error
    shift = _within(totals[1] - totals[0], allowed + NOISE * size, np.maximum(np.abs(totals[0]), scan.largest), "bias")
    return _joined(proof, shift)


class _Scales:
    """The factor of each weight, as arrays over the rows and columns of its tensor."""

    def __init__(self, weight: _Weight, inputs: np.ndarray, outputs: np.ndarray) -> None:
        groups, rows, columns, kernel = weight.shape
        count = weight.inputs if weight.out_rows else weight.outputs
        over_rows, over_columns = (outputs, inputs) if weight.out_rows else (inputs, outputs)
        self.rows = np.broadcast_to(over_rows, groups * rows)
        self.columns = np.broadcast_to(over_columns, count).reshape(groups, columns)
        self.kernel = kernel
        self._even = bool((self.columns == 1.0).all())
        self._group = rows

    @property
    def is_one(self) -> bool:
        return self._even and bool((self.rows == 1.0).all())

    def block(self, start: int, count: int) -> np.ndarray:
        """Factors of rows start to start + count; it broadcasts to (count, columns, kernel)."""
        rows = self.rows[start : start + count].reshape(-1, 1, 1)
        if self._even:
            return rows
        if len(self.columns) == 1:
            return np.asarray(rows * self.columns[0].reshape(1, -1, 1))
        groups = np.arange(start, start + count) // self._group
        return np.asarray(rows * self.columns[groups][:, :, None])


class _Factors:
    """What a weight is multiplied by, what is added in front of it, and how far both and the weight may be off."""

    def __init__(self, weight: _Weight, before: _Map, after: _Map) -> None:
        self.scale = _Scales(weight, before.k * weight.factor, after.k)
        off = ((np.abs(before.k), after.k_error), (before.k_error, np.abs(after.k)))
        self._off = [_Scales(weight, one * abs(weight.factor), two) for one, two in off if np.any(one) and np.any(two)]
        one = np.ones(1)
        self.offset = _Scales(weight, before.h, one) if before.h.any() else None
        self.offset_error = _Scales(weight, before.h_error, one) if before.h_error.any() else None
        rows = (weight.shape[0] * weight.shape[1], weight.shape[2], weight.shape[3])
        error = weight.stored.error
        self._error = (
            None if error is None else np.broadcast_to(error, weight.stored.tensor.shape.numpy()).reshape(rows)
        )

    @property
    def is_exact(self) -> bool:
        return not self._off and self._error is None

    def allowed(self, weight: np.ndarray, start: int) -> np.ndarray | float:
        """Return how far each scaled weight may be off."""
        found: np.ndarray | float = 0.0
        for off in self._off:
            found = found + np.abs(weight) * off.block(start, len(weight))
        if self._error is not None:
            found = found + self._error[start : start + len(weight)] * np.abs(self.scale.block(start, len(weight)))
        return found

    def terms(self, weight: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray | float] | None:
        """Return weight times offset, and how far it may be off but for the weight's rounding; None where both are 0."""
        if self.offset is None and self.offset_error is None:
            return None
        zero = np.zeros((1, 1, 1))
        offset = zero if self.offset is None else self.offset.block(start, len(weight))
        error: np.ndarray | float = 0.0
        if self.offset_error is not None:
            error = np.abs(weight) * self.offset_error.block(start, len(weight))
        if self._error is not None:
            error = error + self._error[start : start + len(weight)] * np.abs(offset)
        return np.multiply(weight, offset, dtype=np.float64), error


class _Scan:
    """Reads both weights once. sums: of weight times offset, of its size, and how far it may be off, for each output."""

    def __init__(self, weights: tuple[_Weight, _Weight], maps: tuple[tuple[_Map, _Map], tuple[_Map, _Map]]) -> None:
        self._weight, self._stored = weights[0], [weight.stored for weight in weights]
        self._factors = [_Factors(weight, *each) for weight, each in zip(weights, maps, strict=True)]
        self._slack = sum(stored.slack for stored in self._stored)
        is_exact = all(each.is_exact for each in self._factors)
        self._plain = self._factors[1].scale.is_one and is_exact and self._slack == 0.0
        self.sums = [[np.zeros(self._weight.outputs) for _ in range(3)] for _ in range(2)]
        self.largest = np.zeros(self._weight.outputs)

    def run(self) -> Proof:
        groups, rows, columns, kernel = self._weight.shape
        u = self._stored[1].roundoff[0]
        worst = Proof(0.0, u, u)
        total = groups * rows
        start = 0
        with TensorRows(self._stored[0].tensor, total) as first, TensorRows(self._stored[1].tensor, total) as second:
            for count in pieces(total, columns * kernel):
                one = first.next(count).reshape(count, columns, kernel)
                two = second.next(count).reshape(count, columns, kernel)
                worst = _joined(worst, self._block(one, two, start))
                self._sum(one, two, start)
                start += count
        return worst

    def _block(self, one: np.ndarray, two: np.ndarray, start: int) -> Proof:
        scales = [each.scale.block(start, len(one)) for each in self._factors]
        exact = np.multiply(one, scales[0], dtype=np.float64)
        self._see(exact, start)
        u, half = self._stored[1].roundoff
        if self._plain:
            with np.errstate(over="ignore"):
                if np.array_equal(exact.astype(two.dtype), two):
                    return Proof(u, u, u)
            got = two.astype(np.float64)
        else:
            got = np.multiply(two, scales[1], dtype=np.float64)
        size = np.abs(exact)
        tiny = half * np.abs(scales[1])
        allowed = (u + self._slack + NOISE) * size + tiny
        for factors, weight in zip(self._factors, (one, two), strict=True):
            allowed = allowed + factors.allowed(weight, start)
        outputs = (1, 2) if self._weight.out_rows else (0, 2)
        return _within(got - exact, allowed, size, "weight", start, outputs, tiny)

    def _see(self, exact: np.ndarray, start: int) -> None:
        """Record the largest coefficient of each output, with which the shift's error is compared; some of them are enough."""
        if self._weight.out_rows:
            largest = np.abs(exact[:, :_SEEN]).max(axis=(1, 2), initial=0.0)
            self.largest[start : start + len(exact)] = largest
        elif self._weight.shape[0] == 1:
            np.maximum(self.largest, np.abs(exact[:_SEEN]).max(axis=(0, 2), initial=0.0), out=self.largest)

    def _sum(self, one: np.ndarray, two: np.ndarray, start: int) -> None:
        """Add up weight times offset of the inputs, where there is one."""
        for factors, sums, block in zip(self._factors, self.sums, (one, two), strict=True):
            found = factors.terms(block, start)
            if found is None:
                continue
            terms, error = found
            for index, each in enumerate((terms, np.abs(terms), np.broadcast_to(error, terms.shape))):
                if self._weight.out_rows:
                    sums[index][start : start + len(block)] = each.sum(axis=(1, 2))
                else:
                    sums[index] += each.sum(axis=(0, 2))
