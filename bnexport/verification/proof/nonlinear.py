"""Lemmas beyond linear operators: relations of values, operators that take a map in their parameters, nonlinear ones.

For equal data (or related ones, where that is said), let the folded model's parameters have a prime. Then, for each channel,

    DeformConv and MMCV's      W' p = r W                        z' = r z + (b' - r b)      data x' = p x
    Instance-, Layer-, Group-, RMSNormalization    s' = r s      z' = r z + (b' - r b)
    Gather from a table        T' = r T + t                      z' = r z + t
    LSTM, GRU, RNN             W' p = W, Wb' + W' q = Wb         z' = z                     data x' = p x + q

r is read off the largest parameter of the channel, and every other one is compared with it, within the rounding of what is
stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from bnexport.errors import UnsupportedModelError
from bnexport.graph.evaluate import Misfit, Signature
from bnexport.graph.shapes import Shape
from bnexport.verification.proof import forms
from bnexport.verification.proof.forms import CONSTANT, Form
from bnexport.verification.proof.lemmas import MOVING, Operand, as_form, crops, moving
from bnexport.verification.proof.regions import FOREIGN, NOISE, Parameter

# Relations of a value in both models: the folded model's is ratio * x + offset, element by element.


class NotRelated(UnsupportedModelError):
    """The inputs of a nonlinear operator are in no relation that passes it."""


@dataclasses.dataclass(frozen=True)
class Relation:
    """The folded model's value is ratio * x + offset; error: the bound of the error of the two, relative to r z."""

    ratio: np.ndarray
    offset: np.ndarray
    ratio_error: np.ndarray
    offset_error: np.ndarray


SAME = Relation(np.ones(()), np.zeros(()), np.zeros(()), np.zeros(()))


def relate(mine: Form, theirs: Form, shared: tuple[int, ...] | None = None) -> Relation:
    """Find the relation of two forms. shared: axes along which one ratio and one offset hold; None for no offset.

    Raises NotRelated.
    """
    if mine.shape != theirs.shape:
        raise NotRelated(f"the shapes {mine.shape} and {theirs.shape} of one value differ")
    groups = forms.groups_of((mine, theirs))
    columns: list[tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    for group in groups:
        rows = forms.rows_of((mine, theirs), group)
        columns.append(
            (
                group,
                forms.part(mine, group, rows),
                forms.part(theirs, group, rows),
                forms.error_part(mine, group, rows),
                forms.error_part(theirs, group, rows),
            )
        )
    fitted = [each for each in columns if shared is None or each[0] != CONSTANT]
    axes = (0, *(axis + 1 for axis in shared or ()))
    square, product, error = (np.zeros(mine.shape) for _ in range(3))
    for _, one, two, one_error, two_error in fitted:
        square = square + (one * one).sum(axis=axes, keepdims=True)[0]
        product = product + (one * two).sum(axis=axes, keepdims=True)[0]
        error = error + (np.abs(one) * (one_error + two_error)).sum(axis=axes, keepdims=True)[0]
    known = square > 0
    ratio = np.divide(product, square, out=np.ones(mine.shape), where=known)
    ratio_error = np.divide(error, square, out=np.zeros(mine.shape), where=known)
    offset, offset_error = np.zeros(mine.shape), np.zeros(mine.shape)
    if shared is not None:
        _, one, two, one_error, two_error = columns[0]
        places = axes[1:]
        rest = two - ratio * one
        offset = np.broadcast_to(rest.mean(axis=places, keepdims=True)[0], mine.shape)
        size = (two_error + np.abs(ratio) * one_error + ratio_error * np.abs(one)).max(axis=places, keepdims=True)[0]
        offset_error = np.broadcast_to(size, mine.shape)
    slack = NOISE * max(mine.size, theirs.size)
    for group, one, two, one_error, two_error in columns:
        rest = two - ratio * one - (offset if group == CONSTANT else 0.0)
        allowed = two_error + np.abs(ratio) * one_error + ratio_error * np.abs(one)
        allowed = allowed + (offset_error if group == CONSTANT else 0.0) + slack * np.maximum(1.0, np.abs(ratio))
        if not ((np.abs(rest) <= allowed) & np.isfinite(rest)).all():
            raise NotRelated("the two inputs of a nonlinear operator are not proportional")
    return Relation(ratio, offset, ratio_error, offset_error)


def require_equal(kind: str, one: Operand, two: Operand) -> None:
    """Raise NotRelated unless both are equal, to the last bit where they are constants."""
    if isinstance(one, Form) and isinstance(two, Form):
        if one.shape != two.shape or one.errors or two.errors:
            raise NotRelated(f"the inputs of {kind} are not equal")
        slack = NOISE * max(one.size, two.size)
        for group in forms.groups_of((one, two)):
            rows = forms.rows_of((one, two), group)
            difference = np.abs(forms.part(one, group, rows) - forms.part(two, group, rows))
            if not ((difference <= slack) & np.isfinite(difference)).all():
                raise NotRelated(f"the inputs of {kind} are not equal")
    elif isinstance(one, Parameter) and isinstance(two, Parameter):
        if one.values.dtype != two.values.dtype or not np.array_equal(one.values, two.values, equal_nan=True):
            raise NotRelated(f"a constant of {kind} changed")
    elif one is not None or two is not None:
        raise NotRelated(f"the inputs of {kind} are constant, or absent, in one model only")


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
    if not one.size:
        raise NotRelated("an operator has parameters without elements")
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


# Nonlinear operators that both regions have: the lemmas under which a relation of their inputs passes them.
#
# Let the folded model's input be r x, element by element, where the original's is x. Then for
#
#     Relu, LeakyRelu, PRelu      f(r x) = r f(x)                     if r > 0
#     Reshape, Slice, Pad, ...    M(r x + t) = M(r) M(x) + M(t)       where sizes say how M moves elements
#     Resize                      as a maximum, of either sign        where sizes say how far
#     a product, a quotient       (r x) (s y) = (r s) x y
#     a maximum over a window     max(r x + t) = r max(x) + t         if r > 0, and r, t are the same all over the window
#     a map in its parameters     parametric.py
#     any other operator          f(x) = f(x)                         if the inputs are equal
#
# Only the operands that `RELATED` names may differ, and no attribute may: a slope, an exponent or a mask has to be equal.
# and the values behind the operator are taken as variables: z in the original, r z (+ t) in the folded model.

HOMOGENEOUS = ("Relu", "LeakyRelu", "PRelu")
MAXIMA = ("MaxPool", "GlobalMaxPool", "ReduceMax")
PRODUCTS = ("Mul", "Div")
RESIZES = ("Resize", "Upsample")


# Places of the operands that may differ by a relation; every other operand has to be equal.
RELATED: dict[str, tuple[int, ...]] = {
    **dict.fromkeys((*HOMOGENEOUS, *MAXIMA, *RESIZES), (0,)),
    **dict.fromkeys(PRODUCTS, (0, 1)),
}
# The sizes of their outputs depend on numbers.
_UNSIZED = ("NonZero", "Unique", "Compress", "NonMaxSuppression", "Range", "Loop", "Scan", "If")


def is_nonlinear(node: ir.Node, operands: list[Operand]) -> bool:
    """Whether the operator needs one of the lemmas; a product does only if both factors vary."""
    if is_parametric(node, operands):
        return True
    if node.op_type in PRODUCTS:
        return isinstance(operands[1], Form) and (node.op_type == "Div" or isinstance(operands[0], Form))
    return False


def passed(
    mine: ir.Node,
    operands: tuple[list[Operand], list[Operand]],
    version: int,
    fresh: Callable[[], int],
    count: int | None,
    *,
    opaque: bool = False,
) -> tuple[list[Operand], list[Operand]]:
    """Return the outputs of one operator in both models, as new variables. count: of directions, None for all elements.
    opaque: it lays out its data by sizes.
    """
    first, second = operands
    kind = mine.op_type
    told = is_parametric(mine, first)
    if (mine.domain != "" and not told) or kind in _UNSIZED:
        raise UnsupportedModelError(f"{kind} is not evaluated here")
    if opaque and kind in MOVING:
        return _moved(mine, operands, version, fresh, count)
    read = [index for index, value in enumerate(mine.outputs) if value.uses() or value.is_graph_output()]
    if told:
        relation, shape = RULES[kind](mine, first, second)
    else:
        relation, shape = _relation(mine, kind, first, second), None
    if read != [0] and not (told and relation is SAME):
        raise UnsupportedModelError(f"{kind} with several outputs")
    shapes = _shapes(mine, first, version) if shape is None else [shape]
    results: tuple[list[Operand], list[Operand]] = ([None] * len(mine.outputs), [None] * len(mine.outputs))
    for index in read:
        one, two = _related(relation, shapes[index], kind, fresh(), count)
        results[0][index], results[1][index] = one, two
    return results


def _moved(
    node: ir.Node,
    operands: tuple[list[Operand], list[Operand]],
    version: int,
    fresh: Callable[[], int],
    count: int | None,
) -> tuple[list[Operand], list[Operand]]:
    """Pass r x + t through an operator that moves elements: r and t move with them. What is put in is equal."""
    first, second = operands
    if len(first) != len(second) or not isinstance(first[0], Form) or not isinstance(second[0], Form):
        raise UnsupportedModelError(f"{node.op_type} of what is constant")
    for one, two in zip(first[1:], second[1:], strict=True):
        require_equal(node.op_type, one, two)
    relation = relate(first[0], second[0], ())
    ratio, *others = (
        [as_form(each).blocks[CONSTANT][0] for each in moving(node, [Parameter(part), *first[1:]], version)]
        for part in (relation.ratio - 1.0, relation.offset, relation.ratio_error, relation.offset_error)
    )
    results: tuple[list[Operand], list[Operand]] = ([], [])
    for parts in zip(ratio, *others, strict=True):
        whole = Relation(parts[0] + 1.0, *parts[1:])
        for result, form in zip(results, _related(whole, parts[0].shape, node.op_type, fresh(), count), strict=True):
            result.append(form)
    return results


def _related(relation: Relation, shape: tuple[int, ...], kind: str, group: int, count: int | None) -> tuple[Form, Form]:
    """Return variables of a shape, and what the folded model has in their place."""
    rows = forms.directions(shape, count, seed=group)
    one = forms.variables(group, shape, rows)
    ratio, offset, ratio_error, offset_error = (_onto(each, shape, kind) for each in dataclasses.astuple(relation))
    two = Form(
        shape,
        {CONSTANT: offset[None].copy(), group: rows * ratio},
        {},
        one.size * max(1.0, np.abs(ratio).max(initial=0)),
    )
    if ratio_error.any():
        two.errors[group] = np.abs(rows) * ratio_error
    if offset_error.any():
        two.errors[CONSTANT] = offset_error[None].copy()
    return one, two


def _shapes(node: ir.Node, operands: list[Operand], version: int) -> list[tuple[int, ...]]:
    """Return the shapes of the operator's outputs."""
    arrays = [
        None if each is None else np.broadcast_to(0.0, each.shape) if isinstance(each, Form) else each.values
        for each in operands
    ]
    return Signature(node, [array is not None for array in arrays], version).shapes(arrays)


def check_windows(node: ir.Node, declared: Shape | None) -> None:
    """Raise UnsupportedModelError where a window of a pooling may lie in padding alone: its value is fixed.

    declared: shape of the data. Only elements that are apart can be on both sides of the data, or a pad that is too wide.
    """

    def numbers(name: str) -> list[int]:
        return list(node.attributes[name].as_ints()) if name in node.attributes else []

    kernel, dilations, pads = map(numbers, ("kernel_shape", "dilations", "pads"))
    automatic = node.attributes["auto_pad"].as_string() if "auto_pad" in node.attributes else "NOTSET"
    if not any(pads) and not automatic.startswith("SAME"):
        return
    pads = pads or [0] * (2 * len(kernel))
    for axis, (count, step) in enumerate(zip(kernel, dilations, strict=False)):
        size = declared[axis + 2] if declared is not None and axis + 2 < len(declared) else None
        is_wide = max(pads[axis], pads[axis + len(kernel)]) > (count - 1) * step
        if step > 1 and (is_wide or not isinstance(size, int) or size < step):
            raise UnsupportedModelError(f"a window of {node.op_type} may lie in padding alone")


def _relation(node: ir.Node, kind: str, first: list[Operand], second: list[Operand]) -> Relation:
    """Relate the operands that a lemma names. Raises NotRelated where another one is not equal."""
    if len(first) != len(second):
        raise NotRelated(f"the numbers of inputs of {kind} differ")
    relations = []
    for place, (one, two) in enumerate(zip(first, second, strict=True)):
        if place in RELATED.get(kind, ()) and isinstance(one, Form) and isinstance(two, Form):
            shared = _window(node, one.rank) if kind in (*MAXIMA, *RESIZES) else None
            relations.append(relate(one, two, shared))
            continue
        require_equal(kind, one, two)
        if place in RELATED.get(kind, ()):
            relations.append(SAME)
    if kind in RESIZES and crops(node):
        raise NotRelated(f"{kind} puts in numbers of its own")
    if kind in PRODUCTS:
        return _of_product(kind, *relations)
    for relation in relations:
        if kind not in RESIZES:
            _positive(relation, kind)
    return relations[0] if relations else SAME


def _of_product(kind: str, left: Relation, right: Relation) -> Relation:
    if kind == "Div":
        if not right.ratio.all():
            raise NotRelated("a divisor is scaled by 0")
        inverse = 1.0 / right.ratio
        right = Relation(inverse, right.offset, right.ratio_error * inverse**2, right.offset_error)
    try:
        np.broadcast_shapes(left.ratio.shape, right.ratio.shape)
    except ValueError:
        raise Misfit(f"{kind} of {left.ratio.shape} and {right.ratio.shape}") from None
    ratio = left.ratio * right.ratio
    error = np.abs(left.ratio) * right.ratio_error + left.ratio_error * np.abs(right.ratio)
    return Relation(ratio, np.zeros(ratio.shape), error, np.zeros(ratio.shape))


def _positive(relation: Relation, kind: str) -> None:
    if not (relation.ratio > 0).all():
        raise NotRelated(f"a scale that is not positive would pass {kind}")


def _window(node: ir.Node, rank: int) -> tuple[int, ...]:
    if node.op_type != "ReduceMax":
        return tuple(range(2, rank))
    axes = node.attributes.get("axes")
    return tuple(range(rank)) if axes is None else tuple(axis % rank for axis in axes.as_ints())


def _onto(values: np.ndarray, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Bring a relation of the input into the shape of the output."""
    if kind not in (*MAXIMA, *RESIZES):
        return np.broadcast_to(values, shape)
    if values.ndim != len(shape) or (kind in RESIZES and values.shape[:2] != shape[:2]):
        raise UnsupportedModelError(f"{kind} changes the rank, or the number of channels")
    first = values[
        tuple(slice(0, 1) if one != two else slice(None) for one, two in zip(values.shape, shape, strict=True))
    ]
    return np.broadcast_to(first, shape)
