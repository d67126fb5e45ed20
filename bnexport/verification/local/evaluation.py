"""Prove a region by its affine forms: the output of both models as a function of the values that enter, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from bnexport.errors import UnsupportedModelError
from bnexport.graph.evaluate import evaluate as evaluate_node
from bnexport.verification.local import forms, nonlinear, parameters
from bnexport.verification.local.attributes import same_attributes, same_outputs
from bnexport.verification.local.chains import OtherShape, Proof, Violation, measured
from bnexport.verification.local.forms import CONSTANT, Form
from bnexport.verification.local.layouts import SIZE_OPERATORS, Layouts
from bnexport.verification.local.operators import MOVING, RULES, Operand
from bnexport.verification.local.parameters import NOISE, Parameter
from bnexport.verification.local.regions import SIZES, Region, Side, name_of
from bnexport.verification.local.relation import NotRelated

# Random directions, where not every element can be a variable.
DIRECTIONS = 8
# Nodes of a region; more are no fold.
_NODES = 400


def evaluate(
    region: Region,
    sides: tuple[Side, Side],
    sizes: Sequence[tuple[int, ...]],
    *,
    directions: int | None = DIRECTIONS,
    unchanged: bool = True,
) -> Proof:
    """sizes: of the entering values. directions: random ones; None for a variable for each element.
    unchanged: numbers that are the original's are exact.

    Raises Violation, or UnsupportedModelError where it cannot be evaluated.
    """
    if max(sum(node.op_type != "Identity" for node in nodes) for nodes in region.nodes) > _NODES:
        raise UnsupportedModelError(f"the region has more than {_NODES} nodes")
    return _Evaluation(region, sides, sizes, directions, unchanged).run()


class _Evaluation:
    def __init__(
        self,
        region: Region,
        sides: tuple[Side, Side],
        sizes: Sequence[tuple[int, ...]],
        count: int | None,
        unchanged: bool,
    ) -> None:
        # What the graph computes from sizes, and lays out by them, has to be the same in both models, if it is given.
        self._layouts = region.layouts
        # Numbers that follow from sizes, by their expression: they are variables.
        self._numbers: dict[int, Form] = {}
        self._region, self._sides, self._count, self._unchanged = region, sides, count, unchanged
        self._twins = _twins(region)
        self._refuse_unpaired()
        self._values: tuple[dict[ir.Value, Operand], dict[ir.Value, Operand]] = ({}, {})
        self._group = CONSTANT
        for (mine, theirs), size in zip(region.entering, sizes, strict=True):
            # One value of a model may equal two of the other.
            known = self._values[0].get(mine) or (self._values[1].get(theirs) if theirs is not None else None)
            form = known or forms.variables(self._next(), size, forms.directions(size, count, seed=self._group))
            self._values[0][mine] = form
            if theirs is not None:
                self._values[1][theirs] = form

    def _refuse_unpaired(self) -> None:
        """Raise what `run` would end with, before anything is computed: most guesses of a search end here."""
        paired = (set(self._twins), set(self._twins.values()))
        for side, nodes in enumerate(self._region.nodes):
            varying = {pair[side] for pair in self._region.entering}
            for node in nodes:
                if node.op_type in SIZE_OPERATORS or not any(
                    value in varying for _, value in self._sides[side].data(node)
                ):
                    continue
                if (node.domain or node.op_type not in RULES) and node not in paired[side]:
                    raise _unpaired(node)
                varying.update(node.outputs)

    def _next(self) -> int:
        self._group += 1
        return self._group

    def run(self) -> Proof:
        pending = [list(nodes) for nodes in self._region.nodes]
        while pending[0] or pending[1]:
            moved = False
            for side in (0, 1):
                moved |= self._advance(side, pending[side])
            moved |= self._pass_nonlinear(pending)
            if not moved:
                raise _unpaired((pending[0] or pending[1])[0])
        mine, theirs = (self._operand(side, value) for side, value in enumerate(self._region.output))
        if isinstance(mine, Parameter) and isinstance(theirs, Parameter) and self._asks_for_sizes():
            return _equal_sizes(mine, theirs)
        if not isinstance(mine, Form) or not isinstance(theirs, Form):
            raise UnsupportedModelError("its output is constant")
        return _equal(mine, theirs)

    def _asks_for_sizes(self) -> bool:
        node = self._region.output[0].producer()
        return node is not None and node.op_type == "Shape" and node.domain == ""

    def _advance(self, side: int, pending: list[ir.Node]) -> bool:
        """Evaluates every node that is linear and has all its inputs."""
        moved = False
        for node in tuple(pending):
            if not self._ready(side, node):
                continue
            operands = self._operands(side, node)
            known = all(operand is None or isinstance(operand, Parameter) for operand in operands)
            lemma = RULES.get(node.op_type) if node.domain == "" else None
            if (lemma is None and not known) or node in self._region.rounding:
                continue
            if self._layouts is not None and self._layouts.is_opaque(side, node):
                continue
            if nonlinear.is_nonlinear(node, operands):
                continue
            if known:
                results = self._known(side, node, operands)
            else:
                assert lemma is not None
                version = self._sides[side].constants.version(node)
                lemma.check(node, version)
                self._check_numbers(side, node)
                self._check_windows(side, node)
                results = lemma.rule(node, operands, version)
            self._values[side].update(zip(node.outputs, results, strict=False))
            pending.remove(node)
            moved = True
        return moved

    def _check_windows(self, side: int, node: ir.Node) -> None:
        """Raise UnsupportedModelError where a window of a pooling may lie in padding alone at some free size."""
        data = node.inputs[0] if node.inputs else None
        if node.op_type in ("MaxPool", "AveragePool") and data is not None:
            nonlinear.check_windows(node, self._sides[side].shapes.of(data))

    def _check_numbers(self, side: int, node: ir.Node) -> None:
        """Raise UnsupportedModelError where what varies holds no floats, and the operator does more than move it."""
        model = self._sides[side]
        if model.is_random(node):
            raise UnsupportedModelError(f"{name_of(node)} ({node.op_type}) may be random")
        for _, value in model.data(node):
            if node.op_type == "Cast" and not model.keeps_floats(node, value):
                raise UnsupportedModelError(f"{name_of(node)} is a Cast between other types than floats")
            dtype = model.shapes.dtype(value)
            if node.op_type not in (*MOVING, "Shape") and dtype is not None and not dtype.is_floating_point():
                raise UnsupportedModelError(f"{name_of(node)} ({node.op_type}) computes with {dtype}")

    def _known(self, side: int, node: ir.Node, operands: list[Operand]) -> list[Operand]:
        """Evaluate a node whose inputs follow from sizes."""
        arrays = [None if operand is None else operand.values for operand in operands]  # type: ignore[union-attr]
        results = evaluate_node(node, arrays, self._sides[side].constants.version(node))
        return [None if each is None else Parameter(np.asarray(each)) for each in results]

    def _pass_nonlinear(self, pending: list[list[ir.Node]]) -> bool:
        for node in pending[0]:
            twin = self._twins.get(node)
            if twin is None or twin not in pending[1] or not self._ready(0, node) or not self._ready(1, twin):
                continue
            version = self._sides[0].constants.version(node)
            if node.op_identifier() != twin.op_identifier() or not same_attributes(node, twin):
                raise Violation(f"the attributes of {name_of(node)} ({node.op_type}) changed")
            if version != self._sides[1].constants.version(twin) or not same_outputs(node, twin, version):
                raise Violation(f"the opset or the outputs of {name_of(node)} ({node.op_type}) changed")
            if self._sides[0].is_random(node):
                raise UnsupportedModelError(f"{name_of(node)} ({node.op_type}) may be random")
            self._check_types(node, twin)
            self._check_windows(0, node)
            operands = self._operands(0, node), self._operands(1, twin)
            opaque = self._layouts is not None and self._same_expressions(self._layouts, node, twin)
            results = nonlinear.passed(node, operands, version, self._next, self._count, opaque=opaque)
            for side, each in enumerate((node, twin)):
                self._values[side].update(zip(each.outputs, results[side], strict=False))
            pending[0].remove(node)
            pending[1].remove(twin)
            return True
        return False

    def _same_expressions(self, layouts: Layouts, node: ir.Node, twin: ir.Node) -> bool:
        """Whether two nodes lay out data by sizes. Raises NotRelated where other expressions of sizes enter them."""
        for one, two in zip(node.inputs, twin.inputs, strict=False):
            if layouts.expression(0, one) != layouts.expression(1, two):
                raise NotRelated(f"the sizes that {name_of(node)} ({node.op_type}) reads are computed in another way")
        return layouts.is_opaque(0, node)

    def _check_types(self, node: ir.Node, twin: ir.Node) -> None:
        """Raise UnsupportedModelError where two constants are of different types, which their numbers do not show."""
        first, second = (side.constants for side in self._sides)
        for mine, theirs in zip(node.inputs, twin.inputs, strict=False):
            if mine is None or theirs is None or not (first.has(mine) and second.has(theirs)):
                continue
            if first.dtype(mine) != second.dtype(theirs):
                raise UnsupportedModelError(f"the type of a constant of {name_of(node)} changed")

    def _ready(self, side: int, node: ir.Node) -> bool:
        return all(value in self._values[side] for _, value in self._sides[side].data(node))

    def _operands(self, side: int, node: ir.Node) -> list[Operand]:
        twin = self._reverse.get(node) if side else None
        operands = [self._operand(side, value, twin, index) for index, value in enumerate(node.inputs)]
        if self._layouts is None or not any(isinstance(operand, Form) for operand in operands):
            return operands
        return [
            operand if index in SIZES.get(node.op_type, ()) else self._varied(self._layouts, side, value, operand)
            for index, (value, operand) in enumerate(zip(node.inputs, operands, strict=True))
        ]

    def _varied(self, layouts: Layouts, side: int, value: ir.Value | None, operand: Operand) -> Operand:
        """Return variables for numbers that follow from sizes, the same for one expression; other operands as they are."""
        number = layouts.expression(side, value)
        if number is None or not isinstance(operand, Parameter) or operand.values.dtype != np.float64:
            return operand
        if number not in self._numbers:
            shape, group = operand.values.shape, self._next()
            self._numbers[number] = forms.variables(group, shape, forms.directions(shape, self._count, seed=group))
        return self._numbers[number]

    def _operand(self, side: int, value: ir.Value | None, twin: ir.Node | None = None, index: int = 0) -> Operand:
        if value is None or not value.name:
            return None
        if value in self._values[side]:
            return self._values[side][value]
        if side == 0:
            return parameters.original(self._sides[0], value)
        before = twin.inputs[index] if self._unchanged and twin is not None and index < len(twin.inputs) else None
        constants = self._sides[0].constants
        known = constants.array(before) if before is not None and constants.has(before) else None
        return parameters.stored(self._sides[1], value, known)

    @property
    def _reverse(self) -> dict[ir.Node, ir.Node]:
        return {theirs: mine for mine, theirs in self._twins.items()}


def _unpaired(node: ir.Node) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name_of(node)} ({node.op_type}) is in one model only and not linear")


def _twins(region: Region) -> dict[ir.Node, ir.Node]:
    """Nodes of both regions that have one name and operator; what is left, by operators and their order."""
    theirs: dict[tuple[str, str], list[ir.Node]] = {}
    for node in region.nodes[1]:
        theirs.setdefault((name_of(node), node.op_type), []).append(node)
    found = {}
    for node in region.nodes[0]:
        others = theirs.get((name_of(node), node.op_type), [])
        if others:
            found[node] = others.pop(0)
    left: dict[str, list[ir.Node]] = {}
    for nodes in theirs.values():
        for node in nodes:
            left.setdefault(node.op_type, []).append(node)
    order = {node: index for index, node in enumerate(region.nodes[1])}
    for nodes in left.values():
        nodes.sort(key=order.__getitem__)
    for node in region.nodes[0]:
        if node not in found and left.get(node.op_type):
            found[node] = left[node.op_type].pop(0)
    return found


def _equal_sizes(mine: Parameter, theirs: Parameter) -> Proof:
    if not np.array_equal(mine.values, theirs.values):
        raise Violation(f"it is {theirs.values.tolist()}, expected {mine.values.tolist()}")
    return Proof(0.0, 0.0)


def _equal(mine: Form, theirs: Form) -> Proof:
    """Compare each coefficient of both forms, within its bound."""
    if mine.shape != theirs.shape:
        raise OtherShape(f"its shape is {theirs.shape}, expected {mine.shape}")
    slack = NOISE * max(mine.size, theirs.size)
    worst = 0.0
    # Of each element of the output.
    largest, most = np.zeros(mine.shape), np.zeros(mine.shape)
    for group in forms.groups_of((mine, theirs)):
        rows = forms.rows_of((mine, theirs), group)
        one, two = forms.part(mine, group, rows), forms.part(theirs, group, rows)
        allowed = mine.error(group) + theirs.error(group) + slack
        difference = np.abs(one - two)
        right = (difference <= allowed) & np.isfinite(difference)
        if not right.all():
            wrong = np.where(right, 0.0, np.where(np.isnan(difference), np.inf, difference))
            at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            limit = float(np.broadcast_to(allowed, difference.shape)[at])
            what = "the constant part" if group == CONSTANT else "a coefficient"
            raise Violation(
                f"{what} of element {tuple(int(i) for i in at[1:])} differs by {float(difference[at]):.3g},"
                f" allowed {limit:.3g}"
            )
        worst = max(worst, float(difference.max(initial=0.0)))
        largest = np.maximum(largest, np.abs(one).max(axis=0))
        most = np.maximum(most, np.broadcast_to(allowed, difference.shape).max(axis=0))
    whole = float(largest.max(initial=0.0)) or 1.0
    share = float(np.max(most / measured(largest, whole)))
    return Proof(worst / whole, float(most.max()) / whole, share)
