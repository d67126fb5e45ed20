"""Nonlinear operators that both regions have: the lemmas under which a relation of their inputs passes them.

Let the folded model's input be r x, element by element, where the original's is x. Then for

    Relu, LeakyRelu, PRelu      f(r x) = r f(x)                     if r > 0
    Reshape, Slice, Pad, ...    M(r x + t) = M(r) M(x) + M(t)       where sizes say how M moves elements
    Resize                      as a maximum, of either sign        where sizes say how far
    a product, a quotient       (r x) (s y) = (r s) x y
    a maximum over a window     max(r x + t) = r max(x) + t         if r > 0, and r, t are the same all over the window
    a map in its parameters     parametric.py
    any other operator          f(x) = f(x)                         if the inputs are equal

Only the operands that `RELATED` names may differ, and no attribute may: a slope, an exponent or a mask has to be equal.
and the values behind the operator are taken as variables: z in the original, r z (+ t) in the folded model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from bnexport.errors import UnsupportedModelError
from bnexport.graph.evaluate import Misfit, Signature
from bnexport.graph.shapes import Shape
from bnexport.verification.local import forms, parametric
from bnexport.verification.local.forms import CONSTANT, Form
from bnexport.verification.local.operators import MOVING, Operand, as_form, crops, moving
from bnexport.verification.local.parameters import Parameter
from bnexport.verification.local.relation import SAME, NotRelated, Relation, relate, require_equal

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
    if parametric.is_parametric(node, operands):
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
    told = parametric.is_parametric(mine, first)
    if (mine.domain != "" and not told) or kind in _UNSIZED:
        raise UnsupportedModelError(f"{kind} is not evaluated here")
    if opaque and kind in MOVING:
        return _moved(mine, operands, version, fresh, count)
    read = [index for index, value in enumerate(mine.outputs) if value.uses() or value.is_graph_output()]
    if told:
        relation, shape = parametric.RULES[kind](mine, first, second)
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
