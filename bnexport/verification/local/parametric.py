"""Operators that take a map in their parameters: what theirs tell of the results, whatever the data are.

For equal data (or related ones, where that is said), let the folded model's parameters have a prime. Then, for each channel,

    DeformConv and MMCV's      W' p = r W                        z' = r z + (b' - r b)      data x' = p x
    Instance-, Layer-, Group-, RMSNormalization    s' = r s      z' = r z + (b' - r b)
    Gather from a table        T' = r T + t                      z' = r z + t
    LSTM, GRU, RNN             W' p = W, Wb' + W' q = Wb         z' = z                     data x' = p x + q

r is read off the largest parameter of the channel, and every other one is compared with it, within the rounding of what is
stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from bnexport.errors import UnsupportedModelError
from bnexport.graph.evaluate import Misfit
from bnexport.verification.local.forms import Form
from bnexport.verification.local.operators import Operand
from bnexport.verification.local.parameters import NOISE, Parameter
from bnexport.verification.local.regions import FOREIGN
from bnexport.verification.local.relation import SAME, NotRelated, Relation, relate, require_equal


class Result(NamedTuple):
    """relation: of the outputs, in a shape that broadcasts to theirs. shape: of the output, None where it is to be inferred."""

    relation: Relation
    shape: tuple[int, ...] | None


_Operands = list[Operand]
_LAST = ("LayerNormalization", "RMSNormalization")
# Places of the weight, the bias and the offsets of deformable convolutions.
_DEFORMABLE = {
    "DeformConv": (1, 3, 2),
    "MMCVDeformConv2d": (2, None, 1),
    "MMCVModulatedDeformConv2d": (3, 4, 1),
}


def is_parametric(node: ir.Node, operands: _Operands) -> bool:
    """Whether a lemma of this file is about the node. A Gather is one where its table is constant."""
    if node.domain != "":
        return (node.domain, node.op_type) in FOREIGN
    if node.op_type == "Gather":
        return isinstance(operands[0], Parameter) and isinstance(operands[1], Form)
    return node.op_type in RULES


def _floats(operand: Operand, what: str) -> Parameter:
    if not isinstance(operand, Parameter) or operand.values.dtype != np.float64:
        raise UnsupportedModelError(f"{what} is not constant, or holds no floats")
    return operand


def _fit(
    one: np.ndarray, two: np.ndarray, one_error: np.ndarray, two_error: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ratio of each row and its error. Raises NotRelated where a row is not proportional."""
    rows = np.arange(len(one))
    largest = np.abs(one).argmax(axis=1)
    size = np.abs(one[rows, largest])
    known = size > 0
    ratio = np.divide(two[rows, largest], one[rows, largest], out=np.ones(len(one)), where=known)
    error = np.divide(
        two_error[rows, largest] + np.abs(ratio) * one_error[rows, largest], size, out=np.zeros(len(one)), where=known
    )
    allowed = two_error + np.abs(ratio)[:, None] * one_error + (error + NOISE * np.abs(ratio))[:, None] * np.abs(one)
    _require_within(two - ratio[:, None] * one, allowed + NOISE * np.abs(two))
    return ratio, error


def _require_within(difference: np.ndarray, allowed: np.ndarray) -> None:
    if not ((np.abs(difference) <= allowed) & np.isfinite(difference)).all():
        raise NotRelated("the parameters of an operator are not those of a per-channel map")


def _shift(one: Operand, two: Operand, ratio: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return b' - r b and its error. An absent bias is 0."""
    zero = Parameter(np.zeros(()))
    first, second = (zero if each is None else _floats(each, "a bias") for each in (one, two))
    try:
        shift = second.values - ratio * first.values
        slack = second.slack + np.abs(ratio) * first.slack + (error + NOISE) * np.abs(first.values)
        return np.broadcast_to(shift, ratio.shape), np.broadcast_to(slack, ratio.shape)
    except ValueError:
        raise Misfit(f"a bias of shape {second.values.shape} for {ratio.shape}") from None


def _error(parameter: Parameter) -> np.ndarray:
    return np.asarray(np.broadcast_to(parameter.slack, parameter.values.shape))


def _require_equal_but(node: ir.Node, first: _Operands, second: _Operands, *places: int | None) -> None:
    for place in range(max(len(first), len(second))):
        if place not in places:
            one, two = (each[place] if place < len(each) else None for each in (first, second))
            require_equal(node.op_type, one, two)


def _at(operands: _Operands, place: int | None) -> Operand:
    return operands[place] if place is not None and place < len(operands) else None


def _over_channels(values: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the one value of each channel (axis 1). Raises NotRelated where there are several."""
    flat, errors = (np.moveaxis(each, 1, 0).reshape(each.shape[1], -1) for each in (values, error))
    bound = errors.max(axis=1)
    _require_within(flat - flat[:, :1], 2 * bound[:, None] + NOISE * np.abs(flat))
    return flat[:, 0], bound


def _deformable(node: ir.Node, first: _Operands, second: _Operands) -> Result:
    weight, bias, offset = _DEFORMABLE[node.op_type]
    data, moved = first[0], first[offset]
    if not isinstance(data, Form) or not isinstance(second[0], Form):
        raise UnsupportedModelError(f"{node.op_type} of what is constant")
    _require_equal_but(node, first, second, 0, weight, bias)
    one, two = (_floats(each[weight], f"a weight of {node.op_type}") for each in (first, second))
    relation = relate(data, second[0])
    ratio, ratio_error = _over_channels(relation.ratio, relation.ratio_error)
    name = "groups" if "groups" in node.attributes else "group"
    groups = node.attributes[name].as_int() if name in node.attributes else 1
    if one.values.ndim != 4 or groups < 1 or one.values.shape[0] % groups or one.values.shape != two.values.shape:
        raise Misfit(f"weights of shape {one.values.shape} and {two.values.shape} of {node.op_type}")
    outputs, columns = one.values.shape[:2]
    if ratio.size != groups * columns:
        raise Misfit(f"{node.op_type} of {ratio.size} channels")
    channel = (np.arange(outputs) // (outputs // groups))[:, None] * columns + np.arange(columns)
    factor, factor_error = (each[channel][:, :, None, None] for each in (ratio, ratio_error))
    read = two.values * factor
    read_error = _error(two) * np.abs(factor) + np.abs(two.values) * factor_error
    rows = [each.reshape(outputs, -1) for each in (one.values, read, _error(one), read_error)]
    own, own_error = _fit(*rows)
    shift, shift_error = _shift(_at(first, bias), _at(second, bias), own, own_error)
    spatial = moved.shape[2:] if isinstance(moved, Form) else np.shape(moved.values)[2:] if moved else ()
    wide = (-1, *[1] * len(spatial))
    whole = Relation(*(each.reshape(wide) for each in (own, shift, own_error, shift_error)))
    return Result(whole, (data.shape[0], outputs, *spatial))


def _normalization(node: ir.Node, first: _Operands, second: _Operands) -> Result:
    data = first[0]
    if not isinstance(data, Form):
        raise UnsupportedModelError(f"{node.op_type} of what is constant")
    _require_equal_but(node, first, second, 1, 2)
    one, two = (_floats(each[1], f"a scale of {node.op_type}") for each in (first, second))
    if one.values.shape != two.values.shape:
        raise NotRelated(f"the scales of {node.op_type} have other shapes")
    rows = [each.reshape(-1, 1) for each in (one.values, two.values, _error(one), _error(two))]
    ratio, error = (each.reshape(one.values.shape) for each in _fit(*rows))
    shift, shift_error = _shift(_at(first, 2), _at(second, 2), ratio, error)
    parts = [np.asarray(each) for each in (ratio, shift, error, shift_error)]
    sizes = zip(one.values.shape[::-1], data.shape[::-1], strict=False)
    if node.op_type in _LAST and (one.values.ndim > data.rank or any(own not in (1, size) for own, size in sizes)):
        raise Misfit(f"{node.op_type} of {data.shape} with a scale of shape {one.values.shape}")
    if node.op_type in ("InstanceNormalization", "GroupNormalization"):
        if one.values.shape != data.shape[1:2]:
            raise UnsupportedModelError(f"{node.op_type} with a scale of shape {one.values.shape}")
        parts = [each.reshape(-1, *[1] * (data.rank - 2)) for each in parts]
    return Result(Relation(*parts), data.shape)


def _table(node: ir.Node, first: _Operands, second: _Operands) -> Result:
    indices = first[1]
    assert isinstance(indices, Form)
    require_equal(node.op_type, indices, second[1])
    one, two = _floats(first[0], "a table"), _floats(second[0], "a table")
    if one.values.shape != two.values.shape or one.values.ndim == 0:
        raise NotRelated("the tables have other shapes")
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    axis %= one.values.ndim
    rows, others, row_error, other_error = (
        np.moveaxis(each, axis, 0) for each in (one.values, two.values, _error(one), _error(two))
    )
    most, least = rows.argmax(axis=0)[None], rows.argmin(axis=0)[None]

    def pick(values: np.ndarray, index: np.ndarray) -> np.ndarray:
        return np.take_along_axis(values, index, axis=0)[0]

    span = pick(rows, most) - pick(rows, least)
    known = span > 0
    ratio = np.divide(pick(others, most) - pick(others, least), span, out=np.ones(span.shape), where=known)
    both = sum(pick(other_error, each) + np.abs(ratio) * pick(row_error, each) for each in (most, least))
    error = np.divide(both, span, out=np.zeros(span.shape), where=known)
    shift = pick(others, most) - ratio * pick(rows, most)
    shift_error = pick(other_error, most) + np.abs(ratio) * pick(row_error, most) + error * np.abs(pick(rows, most))
    shift_error = shift_error + NOISE * (np.abs(pick(others, most)) + np.abs(ratio * pick(rows, most)))
    allowed = other_error + np.abs(ratio) * row_error + error * np.abs(rows) + shift_error
    _require_within(others - ratio * rows - shift, allowed + NOISE * np.abs(others))
    head, tail = one.values.shape[:axis], one.values.shape[axis + 1 :]
    wide = (*head, *[1] * indices.rank, *tail)
    parts = (each.reshape(wide) for each in (ratio, shift, error, shift_error))
    return Result(Relation(*parts), (*head, *indices.shape, *tail))


def _recurrent(node: ir.Node, first: _Operands, second: _Operands) -> Result:
    data = first[0]
    if not isinstance(data, Form) or not isinstance(second[0], Form) or data.rank != 3:
        raise UnsupportedModelError(f"{node.op_type} of what is constant, or of another rank than 3")
    _require_equal_but(node, first, second, 0, 1, 3)
    relation = relate(data, second[0], (0, 1))
    ratio, offset, ratio_error, offset_error = (each[0, 0] for each in vars(relation).values())
    one, two = (_floats(each[1], f"a weight of {node.op_type}") for each in (first, second))
    if one.values.shape != two.values.shape or one.values.ndim != 3 or one.values.shape[2] != ratio.size:
        raise Misfit(f"weights of shape {one.values.shape} and {two.values.shape} of {node.op_type}")
    read_error = _error(two) * np.abs(ratio) + np.abs(two.values) * ratio_error
    _require_within(two.values * ratio - one.values, read_error + _error(one) + NOISE * np.abs(one.values))
    gates = one.values.shape[1]
    zero = Parameter(np.zeros((one.values.shape[0], 2 * gates)))
    before, behind = (
        zero if _at(each, 3) is None else _floats(each[3], f"a bias of {node.op_type}") for each in (first, second)
    )
    if before.values.shape != zero.values.shape or behind.values.shape != zero.values.shape:
        raise Misfit(f"biases of shape {before.values.shape} and {behind.values.shape} of {node.op_type}")
    moved = np.zeros(zero.values.shape)
    moved_error = np.zeros(zero.values.shape)
    moved[:, :gates] = two.values @ offset
    size = np.abs(two.values) @ np.abs(offset)
    moved_error[:, :gates] = _error(two) @ np.abs(offset) + np.abs(two.values) @ offset_error + NOISE * size
    allowed = _error(before) + _error(behind) + moved_error + NOISE * np.abs(before.values)
    _require_within(behind.values + moved - before.values, allowed)
    return Result(SAME, None)


Rule = Callable[[ir.Node, _Operands, _Operands], Result]
RULES: dict[str, Rule] = {
    **dict.fromkeys(_DEFORMABLE, _deformable),
    **dict.fromkeys(
        ("InstanceNormalization", "LayerNormalization", "GroupNormalization", "RMSNormalization"), _normalization
    ),
    "Gather": _table,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
}
