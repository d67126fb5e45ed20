"""Prove a region by its affine forms: the output of both models as a function of the values that enter, in float64."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from bnexport.errors import BnexportError, UnsupportedModelError
from bnexport.graph.evaluate import Misfit
from bnexport.graph.evaluate import evaluate as evaluate_node
from bnexport.model_io.validate import printable
from bnexport.verification.proof import chains, forms, nonlinear, regions
from bnexport.verification.proof.attributes import same_attributes, same_outputs
from bnexport.verification.proof.chains import NotAChain, OtherShape, Proof, Violation, measured
from bnexport.verification.proof.forms import CONSTANT, Form, TooLarge
from bnexport.verification.proof.layouts import (
    MOST_VARIABLES,
    SIZE_OPERATORS,
    Layouts,
    candidates,
    depends_on_sizes,
    keeps_declared,
    ones,
    residues,
    total,
)
from bnexport.verification.proof.lemmas import MOVING, RULES, Operand
from bnexport.verification.proof.nonlinear import NotRelated
from bnexport.verification.proof.regions import NOISE, ROUNDING, SIZES, Parameter, Region, Side, is_training, name_of
from bnexport.verification.verdict import Mark, SiteProof

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
            if node.op_identifier() != twin.op_identifier() or not same_attributes(node, twin, version):
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
            return regions.original(self._sides[0], value)
        before = twin.inputs[index] if self._unchanged and twin is not None and index < len(twin.inputs) else None
        constants = self._sides[0].constants
        known = constants.array(before) if before is not None and constants.has(before) else None
        return regions.stored(self._sides[1], value, known)

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
            got = float(difference[at])
            raise Violation(
                f"{what} of element {tuple(int(i) for i in at[1:])} differs by {got:.3g}, allowed {limit:.3g}",
                got / (max(mine.size, theirs.size) or 1.0),
            )
        worst = max(worst, float(difference.max(initial=0.0)))
        largest = np.maximum(largest, np.abs(one).max(axis=0))
        most = np.maximum(most, np.broadcast_to(allowed, difference.shape).max(axis=0))
    whole = float(largest.max(initial=0.0)) or 1.0
    share = float(np.max(most / measured(largest, whole)))
    return Proof(worst / whole, float(most.max()) / whole, share)


# Prove one region: as a chain where it is one, else by its affine forms.

# A coefficient is proved where it may be off by no more than this part of the largest one of its output, or as many
# roundings of the output's type: a fold's arithmetic rounds some times.
_LOOSE, _ROUNDINGS = 1e-3, 16


class Prover:
    """Regions of one pair of models. claimed: somebody says that their outputs are equal; otherwise that is a guess, and a
    reader may make other shapes equal again."""

    def __init__(self, sides: tuple[Side, Side], *, claimed: bool = True) -> None:
        self._sides, self._claimed = sides, claimed
        self._shapes = sides[0].shapes

    def prove(self, name: str, region: Region) -> SiteProof:
        """Prove one output of a region. name: of the sites that it belongs to."""
        try:
            self._refuse_lost_training(region)
            region = dataclasses.replace(region, rounding=self._rounding(region))
            with np.errstate(all="ignore"):
                return self._proved(name, region)
        except Violation as error:
            if 0 in (self._shapes.of(region.output[0]) or ()):
                return SiteProof(name, "not_run", reason=f"{_where(region)}: its shape has no element to compare")
            is_seen = self._claimed or not isinstance(error, OtherShape) or region.output[0].is_graph_output()
            mark: Mark = "failed" if is_seen else "not_run"
            return SiteProof(name, mark, error.error, reason=f"{_where(region)}: {error}")
        except BnexportError as error:
            return SiteProof(name, "not_run", reason=f"{_where(region)}: {error}")

    def _proved(self, name: str, region: Region) -> SiteProof:
        try:
            return self._mark(name, region, self._chain(region))
        except NotAChain:
            return self._evaluated(name, region)

    def _refuse_lost_training(self, region: Region) -> None:
        """Refuse them: statistics of the batch are no fixed map of each channel. Raises Violation."""
        mine, theirs = (
            any(is_training(node, side.constants.version(node)) for node in nodes)
            for side, nodes in zip(self._sides, region.nodes, strict=True)
        )
        if mine and not theirs:
            raise Violation("the original normalises with the statistics of the batch, the other model does not")

    def _rounding(self, region: Region) -> frozenset[ir.Node]:
        """Return the Casts to a coarser type than every value that enters or leaves has.

        Raises UnsupportedModelError where what leaves is of two types: one of them may have lost its last digits.
        """
        casts = [node for nodes in region.nodes for node in nodes if node.op_type == "Cast" and "to" in node.attributes]
        if not casts:
            return frozenset()
        made = [side.shapes.dtype(value) for side, value in zip(self._sides, region.output, strict=True)]
        if None in made or made[0] != made[1]:
            types = [dtype.name.lower() if dtype is not None else "unknown" for dtype in made]
            raise UnsupportedModelError(f"its type is {types[1]}, expected {types[0]}")
        values = (region.output[0], *(value for value, _ in region.entering))
        known = [ROUNDING[dtype][0] for dtype in map(self._shapes.dtype, values) if dtype in ROUNDING]
        coarsest = max(known, default=ROUNDING[ir.DataType.FLOAT][0])
        targets = {node: ir.DataType(node.attributes["to"].as_int()) for node in casts}
        return frozenset(
            node
            for node, dtype in targets.items()
            if dtype.is_floating_point() and (dtype not in ROUNDING or ROUNDING[dtype][0] > coarsest)
        )

    def _mark(self, name: str, region: Region, proof: Proof) -> SiteProof:
        """Return the mark of a region whose whole map was compared: no proof where numbers may be off by too much."""
        if proof.share <= _LOOSE or proof.share <= _ROUNDINGS * self._roundoff(region):
            return SiteProof(name, "proved", proof.error, proof.bound)
        reason = (
            f"what is computed for it in the graph may be off by {proof.share:.2g} of an output's largest coefficient"
        )
        return SiteProof(name, self._unproved, proof.error, proof.bound, reason)

    @property
    def _unproved(self) -> Mark:
        """The mark of a region that was compared, but not at all sizes or not closely: a claim needs more."""
        return "not_run" if self._claimed else "compared"

    def _roundoff(self, region: Region) -> float:
        """Return the unit roundoff of the type that a region makes; of its constants where inference does not know it."""
        dtype = self._shapes.dtype(region.output[0])
        if dtype is not None:
            return ROUNDING[dtype][0] if dtype in ROUNDING else 0.0
        constants = self._sides[0].constants
        values = (value for node in region.nodes[0] for value in node.inputs if value is not None)
        return max((constants.roundoff(value)[0] for value in values if constants.has(value)), default=0.0)

    def _chain(self, region: Region) -> Proof:
        rank = None
        if not any(node.op_type in ("Conv", "ConvTranspose", "Gemm") for node in region.nodes[0]):
            shape = self._shapes.of(region.output[0])
            rank = None if shape is None else len(shape)
        return chains.prove(region, *self._sides, rank)

    def _evaluated(self, name: str, region: Region) -> SiteProof:
        layouts = Layouts(region, self._sides)
        depends = layouts.computed or layouts.clipped
        if depends and not layouts.differ:
            with contextlib.suppress(Violation, BnexportError):
                proof = self._at_small_sizes(name, dataclasses.replace(region, layouts=layouts))
                if proof.method == "proved":
                    return proof
        if layouts.computed:
            evaluated = self._everywhere if layouts.differ else self._at_small_sizes
            proof = evaluated(name, region)
            if proof.method != "proved":
                return proof
            reason = "it depends on sizes that the graph computes: compared at small ones"
            return dataclasses.replace(proof, method=self._unproved, reason=reason)
        if layouts.differ or depends:
            return self._everywhere(name, region)
        return self._at_small_sizes(name, region)

    def _at_small_sizes(self, name: str, region: Region) -> SiteProof:
        """Evaluate at the smallest sizes that fit. Raises Violation."""
        reason: Exception | str | None = None
        wanted = 2 if depends_on_sizes(region) else 1
        marks: list[SiteProof] = []
        differs = unrelated = False
        for chosen in candidates(region, self._sides[0], self._shapes):
            declared = keeps_declared(chosen, region, self._shapes)
            if differs and not declared:
                continue
            if not marks and reason is None and (wanted == 1 or declared):
                self._screen(region, chosen)
            try:
                marks.append(self._at(name, region, chosen))
            except BnexportError as error:
                reason = error
                unrelated |= declared and isinstance(error, NotRelated)
            except Violation:
                if wanted == 1 or declared:
                    raise
                # A constant shape may be meant for the declared sizes alone: then they decide.
                reason = "it differs at other sizes than the declared ones, at which it cannot be evaluated"
                differs, marks = True, []
            if len(marks) == wanted:
                break
        if not marks or (unrelated and len(marks) < wanted):
            text = "the sizes of its inputs are not known" if reason is None else str(reason)
            return SiteProof(name, "not_run", reason=f"{_where(region)}: {text}")
        if depends_on_sizes(region):
            self._check_ones(name, region)
        return functools.reduce(worse, marks)

    def _screen(self, region: Region, chosen: list[tuple[int, ...]]) -> None:
        """Raise Violation or NotRelated where a guess fails in one direction already: most guesses do."""
        if self._claimed:
            return
        try:
            evaluate(region, self._sides, chosen, directions=1, unchanged=False)
        except NotRelated:
            raise
        except BnexportError:
            return

    def _everywhere(self, name: str, region: Region) -> SiteProof:
        """Evaluate at each size that may matter. Raises Violation, or what cannot be run."""
        tried = residues(region, self._sides, self._shapes)
        if not tried:
            raise UnsupportedModelError(
                "the two parts move over their data in different ways, at too many sizes to try"
            )
        self._screen(region, tried[0])
        marks = self._shrunk(name, region) if total(tried[0]) > MOST_VARIABLES else []
        reason: Misfit | None = None
        for chosen in () if marks else tried:
            try:
                marks.append(self._at(name, region, chosen))
            except Misfit as error:  # of the original, which does not run at these sizes
                reason = error
        if not marks and reason is not None:
            raise reason
        if depends_on_sizes(region):
            self._check_ones(name, region)
        return functools.reduce(worse, marks)

    def _shrunk(self, name: str, region: Region) -> list[SiteProof]:
        """Prove at sizes below the declared ones, which are too many variables. Empty where that is not possible."""
        tried = residues(region, self._sides, self._shapes, shrink=True)
        try:
            marks = [self._at(name, region, chosen) for chosen in tried]
        except (Violation, NotRelated, BnexportError):
            return []
        return marks if all(mark.method == "proved" for mark in marks) else []

    def _check_ones(self, name: str, region: Region) -> None:
        """Compare where sizes that may be anything are 1: such axes are squeezed and broadcast. Raises Violation."""
        for several in ones(region, self._sides[0], self._shapes):
            for chosen in several:
                try:
                    self._at(name, region, chosen)
                except BnexportError:
                    continue
                except Violation:
                    if keeps_declared(chosen, region, self._shapes):
                        raise
                    continue
                break

    def _at(self, name: str, region: Region, chosen: list[tuple[int, ...]]) -> SiteProof:
        """Evaluate at these sizes, in directions where variables are too many. Raises Violation, or what cannot be run."""
        try:
            if total(chosen) <= MOST_VARIABLES:
                with contextlib.suppress(TooLarge):
                    return self._mark(name, region, self._equal(region, chosen, None))
            return _compared(name, self._equal(region, chosen, DIRECTIONS), chosen)
        except Misfit as error:
            if self._original_runs(region, chosen):
                raise Violation(f"the original can be evaluated, the folded model cannot: {error}") from error
            raise

    def _equal(self, region: Region, chosen: list[tuple[int, ...]], directions: int | None) -> Proof:
        """Compare the region, first with numbers that are the original's as exact ones.

        They may have been changed all the same, by less than rounding shows.
        """
        try:
            return evaluate(region, self._sides, chosen, directions=directions)
        except (Violation, NotRelated) as error:
            with contextlib.suppress(Violation, NotRelated):
                return evaluate(region, self._sides, chosen, directions=directions, unchanged=False)
            raise error

    def _original_runs(self, region: Region, chosen: list[tuple[int, ...]]) -> bool:
        """Whether the original's region equals itself when it is evaluated."""
        entering = [(value, value) for value, _ in region.entering]
        same = Region((region.output[0],) * 2, (region.nodes[0], region.nodes[0]), list(entering), region.number)
        try:
            evaluate(same, (self._sides[0], self._sides[0]), chosen)
        except (Violation, BnexportError):
            return False
        return True


def _where(region: Region) -> str:
    node = region.output[0].producer()
    return f"at {printable(name_of(node))}" if node is not None else "at an input"


_ORDER = ("proved", "compared", "not_run", "failed")


def worse(first: SiteProof, second: SiteProof) -> SiteProof:
    """Return the mark of a site with two outputs."""
    worst = max(first, second, key=lambda proof: _ORDER.index(proof.method))
    return dataclasses.replace(worst, error=max(first.error, second.error), bound=max(first.bound, second.bound))


def _compared(name: str, proof: Proof, chosen: Sequence[tuple[int, ...]]) -> SiteProof:
    elements = total(chosen)
    reason = f"{elements:,} elements enter, too many for a variable each; compared in {DIRECTIONS} directions"
    return SiteProof(name, "compared", proof.error, proof.bound, reason)
