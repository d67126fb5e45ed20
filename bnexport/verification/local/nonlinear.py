"""Nonlinear operators that both regions have: the lemmas under which a relation of their inputs passes them.

Let the folded model's input be r x, element by element, where the original's is x. Then for

    Relu, LeakyRelu, PRelu      f(r x) = r f(x)                     if r > 0
    a product, a quotient       (r x) (s y) = (r s) x y
    a maximum over a window     max(r x + t) = r max(x) + t         if r > 0, and r, t are the same all over the window
    any other operator          f(x) = f(x)                         if the inputs are equal

Only the operands that `RELATED` names may differ, and no attribute may: a slope, an exponent or a mask has to be equal.
and the values behind the operator are taken as variables: z in the original, r z (+ t) in the folded model.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from bnexport.errors import UnsupportedModelError
from bnexport.graph.evaluate import Misfit, Signature
from bnexport.verification.local import forms
from bnexport.verification.local.forms import CONSTANT, Form
from bnexport.verification.local.operators import Operand
from bnexport.verification.local.parameters import NOISE, Parameter
from bnexport.verification.local.shapes import Shape

HOMOGENEOUS = ("Relu", "LeakyRelu", "PRelu")
MAXIMA = ("MaxPool", "GlobalMaxPool", "ReduceMax")
PRODUCTS = ("Mul", "Div")


class NotRelated(UnsupportedModelError):
    """The inputs of a nonlinear operator are in no relation that passes it."""


@dataclasses.dataclass(frozen=True)
class Relation:
    """The folded model's value is ratio * x + offset; error: the bound of the error of the two, relative to r z."""

    ratio: np.ndarray
    offset: np.ndarray
    ratio_error: np.ndarray
    offset_error: np.ndarray


_SAME = Relation(np.ones(()), np.zeros(()), np.zeros(()), np.zeros(()))


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


# Places of the operands that may differ by a relation; every other operand has to be equal.
RELATED: dict[str, tuple[int, ...]] = {
    **dict.fromkeys((*HOMOGENEOUS, *MAXIMA), (0,)),
    **dict.fromkeys(PRODUCTS, (0, 1)),
}
# The sizes of their outputs depend on numbers.
_UNSIZED = ("NonZero", "Unique", "Compress", "NonMaxSuppression", "Range", "Loop", "Scan", "If")


def is_nonlinear(node: ir.Node, operands: list[Operand]) -> bool:
    """Whether the operator needs one of the lemmas; a product does only if both factors vary."""
    if node.op_type in PRODUCTS:
        return isinstance(operands[1], Form) and (node.op_type == "Div" or isinstance(operands[0], Form))
    return False


def passed(
    mine: ir.Node, operands: tuple[list[Operand], list[Operand]], version: int, group: int, count: int | None
) -> tuple[list[Operand], list[Operand]]:
    """Return the outputs of one operator in both models, as new variables. count: of directions, None for all elements."""
    first, second = operands
    kind = mine.op_type if mine.domain == "" else ""
    if mine.domain != "" or kind in _UNSIZED:
        raise UnsupportedModelError(f"{mine.op_type} is not evaluated here")
    if len([value for value in mine.outputs if value.uses() or value.is_graph_output()]) > 1:
        raise UnsupportedModelError(f"{kind} with several outputs")
    relation = _relation(mine, kind, first, second)
    shape = _shape(mine, first, version)
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
    empty: list[Operand] = [None] * (len(mine.outputs) - 1)
    return [one, *empty], [two, *empty]


def _shape(node: ir.Node, operands: list[Operand], version: int) -> tuple[int, ...]:
    """Return the shape of the operator's output."""
    arrays = [
        None if each is None else np.broadcast_to(0.0, each.shape) if isinstance(each, Form) else each.values
        for each in operands
    ]
    return Signature(node, [array is not None for array in arrays], version).shapes(arrays)[0]


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
            shared = _window(node, one.rank) if kind in MAXIMA else None
            relations.append(relate(one, two, shared))
            continue
        _require_equal(kind, one, two)
        if place in RELATED.get(kind, ()):
            relations.append(_SAME)
    if kind in PRODUCTS:
        return _of_product(kind, *relations)
    for relation in relations:
        _positive(relation, kind)
    return relations[0] if relations else _SAME


def _require_equal(kind: str, one: Operand, two: Operand) -> None:
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
    if kind not in MAXIMA:
        return np.broadcast_to(values, shape)
    if values.ndim != len(shape):
        raise UnsupportedModelError(f"{kind} changes the rank")
    first = values[
        tuple(slice(0, 1) if one != two else slice(None) for one, two in zip(values.shape, shape, strict=True))
    ]
    return np.broadcast_to(first, shape)
