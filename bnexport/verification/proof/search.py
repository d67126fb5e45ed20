"""Walk two models in step, and relate each value of the changed one to values of the original.

The same operator with the same attributes and constants on equal values makes equal values (`numbering`). Where the changed
model goes on in another way, each value is written over the original's as a lemma tells (`lemmas`, `relations`), until it
is equal to one of them again: there a window ends, and with it a fold is proved. What is proved so rests on what was
proved above it. Copies are transparent; an operator without a lemma needs equal operands.

A value that is not related is taken for its counterpart, so that what lies below can be proved as well: the value that nodes
of its readers' names read in the original, or that is read alike. Its window is refuted where it is another function of the
same values, else open. A refuted window shows that two values differ. A later one may make up for it: where another one on
its path is not proved, none is called wrong, and whole models decide.

Claims name the windows of a report or a certificate: each gets the mark of the windows that it meets.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from bnexport.errors import BnexportError, UnsupportedModelError
from bnexport.graph.nodes import Refused, input_at
from bnexport.graph.shapes import Shape
from bnexport.model_io import walk
from bnexport.model_io.read import paused_collection
from bnexport.model_io.validate import printable
from bnexport.verification.proof.branches import CARRIERS, BranchSums
from bnexport.verification.proof.lemmas import LEMMAS, LINEAR, Lemma
from bnexport.verification.proof.movements import MOVEMENTS
from bnexport.verification.proof.numbering import Differences, Numbering, check_node, outputs_count
from bnexport.verification.proof.relations import (
    ONE,
    Agreement,
    Base,
    Bases,
    Couple,
    Form,
    NotPassed,
    Numbers,
    Reading,
    Relation,
    Unrelated,
    Violation,
)
from bnexport.verification.proof.sides import (
    FOREIGN,
    LOOSE,
    ROUNDING,
    ROUNDINGS,
    Mismatch,
    Side,
    cast_target,
    is_training,
    name_of,
)
from bnexport.verification.verdict import Claim, Mark, SiteProof, Status, Verification, WindowEnd

ENGINE = "local proof in float64"
# Characters of a name out of a report that a message repeats.
_SHOWN = 200
# Nodes of the original that one node is compared with, and values that one value is.
_CANDIDATES, _FAMILY = 16, 64
# Values that are taken for their counterparts; more, and the models are no fold of each other.
_DOUBTS = 64
# Nodes of a window, and of bodies within each other.
_LARGEST, _NESTED = 512, 64
# A coefficient that is off by more is proved where these are as many roundings of its type: a fold's arithmetic rounds some times.
_ROUNDINGS = 16
# Elements of a constant that is read as a map.
_ELEMENTS = 1 << 22
# Operators whose result has the rank, or the shape, of their data.
_SAME_SHAPE = ("Relu", "LeakyRelu", "Sigmoid", "Clip", "Tanh")
_SAME_RANK = (
    *(*_SAME_SHAPE, "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "Concat", "Split", "Slice", "Pad"),
    *("Transpose", "Resize", "Upsample", "DepthToSpace", "SpaceToDepth"),
)
_UNDECIDED = "other parts differ, too, and may make up for it"
_MAPS = ("BatchNormalization", "Mul", "Div", "Add", "Sub", "Sum", "Neg")
# What a lemma raises where it says nothing: nodes may have attributes of any length.
_NOTHING = (Unrelated, Refused, UnsupportedModelError, ValueError, IndexError, ArithmeticError)


@paused_collection()
@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def prove(
    original: ir.Model, changed: ir.Model, claims: Sequence[Claim] | None = None, seconds: float | None = None
) -> Verification:
    """Prove that `changed` computes what `original` does, for every input, up to the rounding of its weights.

    Both models are only read. "passed": all that differs is proved. "failed": a fold is wrong. "not_verified": a part is not
    related by any lemma, or `seconds` of processor time were not enough: by default two, and more for large models.

    claims: where folds are, a mark for each; everything else that differs has failed. None to search for the folds of batch
    norms and per-channel arithmetic: `sites` is empty where the graphs are the same, and other differences are "not_verified".
    Such a fold may have been computed in the type of its weights (`ROUNDINGS`).
    """
    try:
        sides = Side(original, 0, ROUNDINGS if claims is None else 0), Side(changed, 1)
        return _Proof(sides, claims, seconds).run()
    except BnexportError as error:
        return Verification("not_verified", str(error), engine=ENGINE, method="local")


class _TooMuch(Exception):
    """The walk has reached a limit."""


@dataclasses.dataclass(frozen=True)
class _Graphs:
    """Two graphs that have to do the same, and the original's values by how they are read, in their order."""

    graphs: tuple[ir.Graph, ir.Graph]
    by_readers: dict[Hashable, collections.deque[ir.Value]]
    by_name: dict[str, ir.Value]


@dataclasses.dataclass(frozen=True)
class _Window:
    """Nodes above two values that were not the same, the last one first, and what was found."""

    mine: list[ir.Node]
    theirs: list[ir.Node]
    value: ir.Value
    end: ir.Value
    proof: SiteProof
    another: str = ""


class _Proof:
    """See the head of this file. It is the `Context` of all lemmas."""

    def __init__(self, sides: tuple[Side, Side], claims: Sequence[Claim] | None, seconds: float | None) -> None:
        self._sides, self._claims = sides, claims
        self._numbers = Numbering(sides, exact=claims is not None)
        self._differences = Differences(sides, self._numbers)
        self._seconds = _allowed(sides[0]) if seconds is None else seconds
        self._end = time.thread_time() + self._seconds
        self.bases = Bases()
        # Forms of the original's values by their numbers, and of values of the changed model that have none.
        self._forms: dict[int, Form] = {}
        self._theirs: dict[ir.Value, Form] = {}
        self._families: dict[frozenset[int], list[int]] = {}
        self._nodes: dict[Hashable, list[Reading]] = {}
        self._cores: dict[Hashable, int] = {}
        self._readings: dict[int, Reading] = {}
        self._branches = BranchSums(self.bases, self._forms, self._readings)
        self._unread: collections.deque[ir.Node] = collections.deque()
        self._parameters: dict[ir.Value, Numbers] = {}
        self._proofs: list[_Window] = []
        self._doubts: list[_Window] = []
        # Nodes of the original that hold bodies, call functions or may be random, and those that have a counterpart.
        self._special: dict[Hashable, list[ir.Node]] = {}
        self._taken: dict[ir.Node, ir.Node] = {}
        self._bodies: dict[Hashable, _Graphs | None] = {}
        self._twins: dict[ir.Node, ir.Node] = {}
        self._outputs: dict[ir.Value, ir.Value] = {}
        self._named: dict[str, ir.Value] = {}
        # Whether a limit was reached, and whether equal weights count as rounded.
        self._is_cut = self._is_rounded = False

    def run(self) -> Verification:
        try:
            reason = self._missing() or self._compare(self._open(), 0)
        except Mismatch as error:
            reason = str(error)
        except _TooMuch as error:
            self._is_cut, reason = True, str(error)
        return self._verdict(reason or self._unread_constant())

    # What lemmas ask for.

    def parameter(self, side: Side, value: ir.Value) -> Numbers:
        found = self._parameters.get(value)
        if found is None:
            found = self._parameters[value] = _read_numbers(side, value)
        return found

    def core(self, node: Reading) -> int:
        key = ("core", self._key(node, LEMMAS[node.kind]))
        if key not in self._cores:
            if node.side.place:
                raise Unrelated("the original has no such normalisation")
            number = self._cores[key] = self._numbers.fresh()
            data = [form for form in node.forms if form is not None]
            self._add_base(number, node.node.outputs[0], self.bases.guess(data[0]))
        return self._cores[key]

    def scales_behind(self, node: Reading) -> list[Numbers]:
        number = self.made(node, 0)
        family = self._families.get(frozenset((number,)), ())[:_CANDIDATES]
        scales = (self._forms[each].terms[number] for each in family)
        return list({id(scale): scale for scale in scales}.values())[:2]  # a shift in between keeps the scale

    def same_constants(self, mine: Reading, theirs: Reading, places: tuple[int, ...]) -> bool:
        if self._is_rounded:
            return False
        for place in places:
            one, two = (input_at(each.node, place) for each in (mine, theirs))
            if mine.side.constants.has(one):
                return self._numbers.of(mine.side.place, one) == self._numbers.of(theirs.side.place, two)
        return False

    # The original, read when the changed model first differs.

    def _read_original(self) -> None:
        while self._unread:
            node = self._unread.popleft()
            self._check_time()
            numbers = [self._numbers.original(value) for value in node.outputs]
            if numbers[0] in self._forms:
                continue
            lemma = _lemma(node)
            is_read = lemma is not None and not self._is_special(0, node)
            forms = self._forms_of(node, lemma) if is_read else []  # type: ignore[arg-type]
            data = self._data(node)
            for place, (number, value) in enumerate(zip(numbers, node.outputs, strict=True)):
                if place < len(forms):
                    self._forms[number] = forms[place]
                    self._families.setdefault(forms[place].bases, []).append(number)
                else:
                    self._add_base(number, value, self._guess(node, data))

    def _forms_of(self, node: ir.Node, lemma: Lemma) -> list[Form]:
        """Return the original's values as maps of others, none where they are bases; a node is one to be compared with."""
        try:
            reading = self._reading(0, node, lemma)
            if lemma.maps is not None:
                with contextlib.suppress(*_NOTHING):
                    return [lemma.maps(reading)]
            if lemma.relates is None:
                return []
            alike = self._nodes.setdefault(self._key(reading, lemma), [])
            for other in alike[:_CANDIDATES]:
                with contextlib.suppress(*_NOTHING):
                    if not lemma.weights or self.same_constants(other, reading, lemma.weights[:2]):
                        return self._over(Couple(other, reading, self), lemma.relates)
            plain = None if lemma.weights else self._plain(reading, lemma.relates)
            alike.append(reading if plain is None else plain)
            if plain is not None:
                return self._over(Couple(plain, reading, self), lemma.relates)
            self._readings[self.made(reading, 0)] = reading
        except _NOTHING:
            pass
        return []

    def _over(self, pair: Couple, relates: Callable[[Couple], list[Relation]]) -> list[Form]:
        """Return the outputs of a node over those of another one. Raises Unrelated."""
        relations = relates(pair)
        return [
            self._forms[self.made(pair.mine, place)].scaled(scale).shifted(shift)
            for place, (scale, shift) in enumerate(relations)
        ]

    def _plain(self, reading: Reading, relates: Callable[[Couple], list[Relation]]) -> Reading | None:
        """Return a node on the bases of its data, if it passes the maps of these: its outputs are bases that no node makes."""
        forms = [
            form and (form if len(form.terms) > 1 else Form(dict.fromkeys(form.terms, ONE))) for form in reading.forms
        ]
        if all(
            one is None or one.terms == two.terms
            for one, two in zip(forms, reading.forms, strict=True)
            if two is not None
        ):
            return None
        plain = reading.over(forms)
        try:
            relates(Couple(plain, reading, self))
        except _NOTHING:
            return None
        data = self._data(reading.node)
        plain.made = [self._numbers.fresh() for _ in reading.node.outputs]
        for number, value in zip(plain.made, reading.node.outputs, strict=True):
            self._add_base(number, value, self._guess(reading.node, data))
        self._readings[plain.made[0]] = plain
        return plain

    def made(self, reading: Reading, place: int) -> int:
        """Return the number of an output of the original's node."""
        return reading.made[place] if reading.made else self._numbers.original(reading.node.outputs[place])

    def _add_base(self, number: int, value: ir.Value, guess: Shape | None = None) -> None:
        if number not in self._forms:
            self.bases.add(number, Base(number, value, self._sides[0].shapes, guess))
            self._forms[number] = Form({number: ONE})

    def _data(self, node: ir.Node) -> list[Form]:
        """Return what is known of the data of the original's node."""
        numbers = (self._numbers.of(0, value) for _, value in self._sides[0].data(node))
        return [self._forms[number] for number in numbers if number in self._forms]

    def _guess(self, node: ir.Node, data: Sequence[Form]) -> Shape | None:
        """Return the shape of a result as far as its operator tells, without inference."""
        if node.domain and _lemma(node) is None:  # the names of the standard mean nothing there
            return None
        if node.op_type in LINEAR and node.op_type not in ("MatMul", "Einsum"):
            sizes = self._constant_shape(node, LEMMAS[node.op_type].weights[0])
            if sizes is not None and len(sizes) > 1:
                return (None, sizes[0] if node.op_type == "Conv" else None, *[None] * (len(sizes) - 2))
        if node.op_type == "Reshape" and (sizes := self._constant_shape(node, 1)) is not None:
            return (None,) * math.prod(sizes)
        rank = self.bases.rank(data[0]) if data and node.op_type in _SAME_RANK else None
        if rank is None:
            return None
        shape = self.bases.guess(data[0]) if node.op_type in _SAME_SHAPE else None
        return shape if shape is not None else (None,) * rank

    def _constant_shape(self, node: ir.Node, place: int) -> tuple[int, ...] | None:
        constants, value = self._sides[0].constants, input_at(node, place)
        with contextlib.suppress(UnsupportedModelError):  # its numbers may overflow, or be too many
            return constants.shape(value) if constants.has(value) else None
        return None

    def _asked_shape(self, value: ir.Value) -> Shape | None:
        """Return the shape that convolutions ask of a value, past batch norms; None where there are none."""
        pending = [value]
        for each in pending:
            for use in each.uses() if len(pending) < _CANDIDATES else ():
                weight = input_at(use.node, 1)
                if use.idx == 0 and use.node.op_type == "Conv" and self._sides[0].constants.has(weight):
                    return (None,) * len(self._sides[0].constants.shape(weight))
                if use.idx == 0 and use.node.op_type == "BatchNormalization":
                    pending.append(use.node.outputs[0])
        return None

    def _reading(self, side: int, node: ir.Node, lemma: Lemma) -> Reading:
        """Read the operands of a node. Raises Unrelated where one is lost, or has to be equal and is not."""
        check_signature(node, self._sides[side])
        constants = self._sides[side].constants
        forms: list[Form | None] = []
        for index, value in enumerate(node.inputs):
            if value is None or not value.name or constants.has(value):
                forms.append(None)
                continue
            if lemma.data is not None and index not in lemma.data and self._numbers.of(side, value) is None:
                raise _Demand(value)
            forms.append(self._form(side, value))
        return Reading(self._sides[side], node, forms, self)

    def _known(self, number: int) -> Form:
        if number not in self._forms:
            raise Unrelated("it is constant in one model")
        return self._forms[number]

    def _form(self, side: int, value: ir.Value) -> Form:
        number = self._numbers.of(side, value)
        form = self._theirs.get(value) if number is None else self._forms.get(number)
        if form is None:
            raise Unrelated("its data are not known")
        return form

    def _key(self, node: Reading, lemma: Lemma) -> Hashable:
        """Return what two nodes that may be related have in common. Raises Unrelated."""
        place, constants = node.side.place, node.side.constants
        tokens: list[Hashable] = []
        for index, value in enumerate(node.node.inputs):
            form = node.forms[index]
            if lemma.unread is not None and index in lemma.unread(node):
                tokens.append(None)
            elif value is None or not value.name:
                # An absent bias is 0.
                tokens.append(("weight",) if index in lemma.weights[1:] else None)
            elif form is not None and (lemma.data is None or index in lemma.data):
                tokens.append(form.bases)
            elif index in lemma.weights and constants.has(value):
                is_first = index == lemma.weights[0] and not lemma.family
                tokens.append(("weight", constants.shape(value)) if is_first or lemma.data is None else ("weight",))
            else:
                tokens.append(self._numbers.of(place, value))
        while tokens and tokens[-1] in (None, ("weight",)):
            tokens.pop()
        if node.kind == "Mul":
            tokens.sort(key=repr)
        attributes = self._numbers.attributes(place, node.node, lemma.own)
        made = outputs_count(node.node, node.version)
        more = lemma.more(node) if lemma.more is not None else None
        return (lemma.family or node.node.op_identifier(), node.version, attributes, made, more, tuple(tokens))

    # The changed model.

    def _compare(self, pair: _Graphs, depth: int) -> str:
        """Relate the values of the changed graph; why its outputs do not equal the original's, or an empty text."""
        if depth > _NESTED:
            raise Mismatch(f"bodies lie more than {_NESTED} deep")
        needed = _needed(pair.graphs[1])
        for node in pair.graphs[1]:
            self._check_time()
            if (
                node not in needed
                or self._sides[1].is_constant_node(node)
                or all(self._has(value) for value in node.outputs)
            ):
                continue
            if self._copy(1, node):
                continue
            if self._is_special(1, node):
                for _, value in self._sides[1].data(node):
                    if value in self._theirs and not self._has(value):
                        self._settle(value, pair, None)
                self._match(node, depth)
            elif self._numbers.number(1, node):
                continue
            else:
                self._relate(node, pair)
            for value in node.outputs:
                if not (self._has(value) or value in self._theirs) and (value.uses() or value.is_graph_output()):
                    self._settle(value, pair, Unrelated("the original has no counterpart of it"))
        if len(pair.graphs[0].outputs) != len(pair.graphs[1].outputs):
            return f"the outputs of {pair.graphs[0].name or 'a body'!r} changed"
        for mine, theirs in zip(pair.graphs[0].outputs, pair.graphs[1].outputs, strict=True):
            if not self._is_equal(mine, theirs) and not self._settle(theirs, pair, None, self._source(mine)):
                return self._became(mine, theirs)
        return ""

    def _has(self, value: ir.Value) -> bool:
        return self._numbers.of(1, value) is not None

    def _relate(self, node: ir.Node, pair: _Graphs) -> None:
        """Write the outputs of a node over the original's values, or say why that is not possible."""
        self._read_original()
        self._reread(node)
        if self._numbers.number(1, node):
            return
        lemma = _lemma(node)
        for _ in range(len(node.inputs) + 1):
            try:
                if lemma is None:
                    raise self._demanded(node)
                return self._apply(node, lemma)
            except _Demand as demand:
                if not self._settle(demand.value, pair, None) or self._numbers.number(1, node):
                    return
            except _NOTHING as error:
                asked = self._asked_to_be_equal(node, error, pair)
                if asked is not None and self._settle(asked, pair, None):
                    if self._numbers.number(1, node):
                        return
                    continue
                for value in node.outputs:
                    if value.uses() or value.is_graph_output():
                        self._settle(value, pair, error)
                return

    def _reread(self, node: ir.Node) -> None:
        """Relate operands again that are other values than a node of the same name reads: a fold may round to the numbers that
        were there before.
        """
        twin = self._twins.get(node)
        for mine, theirs in zip(map(self._source, twin.inputs if twin is not None else ()), node.inputs, strict=False):
            if mine is not None and theirs is not None and not self._is_equal(mine, theirs):
                self._relate_again(mine, theirs)

    def _relate_again(self, mine: ir.Value, theirs: ir.Value) -> bool:
        """Relate a value again by its weights, as if these were rounded; whether it equals one of the original."""
        node, number = self._original_node(theirs), self._numbers.of(1, theirs)
        lemma = None if node is None else _lemma(node)
        if node is None or lemma is None or not lemma.weights or len(node.outputs) > 1:
            return False
        form = self._theirs.pop(node.outputs[0], None)
        if number is None and form is None:
            return False
        self._numbers.forget(node)
        known = len(self._proofs), len(self._doubts)
        self._is_rounded = True
        with contextlib.suppress(*_NOTHING, _Demand):
            self._apply(node, lemma)
        self._is_rounded = False
        is_equal = self._numbers.original(mine) == self._numbers.of(1, node.outputs[0])
        self._theirs.pop(node.outputs[0], None)
        if not is_equal:
            del self._proofs[known[0] :], self._doubts[known[1] :]
            if number is None:
                self._numbers.forget(node)
                self._theirs[node.outputs[0]] = form  # type: ignore[assignment]
                return False
        for each in self._copies(1, node.outputs[0]):
            self._numbers.set(1, each, self._numbers.original(mine) if is_equal else number)  # type: ignore[arg-type]
        return is_equal

    def _original_node(self, theirs: ir.Value) -> ir.Node | None:
        """Return the node that makes a value, past copies."""
        node = theirs.producer()
        while node is not None and is_copy(self._sides[1], node):
            node = node.inputs[0].producer() if node.inputs[0] is not None else None
        return node

    def _asked_to_be_equal(self, node: ir.Node, error: Exception, pair: _Graphs) -> ir.Value | None:
        """Return an operand that may be why a node is not related: it has a counterpart that it does not equal."""
        if not isinstance(error, NotPassed):
            return None
        for _, value in self._sides[1].data(node):
            if value in self._theirs and not self._has(value) and self._counterpart(value, pair) is not None:
                return value
        return None

    def _demanded(self, node: ir.Node) -> Exception:
        """Return what an operator without a lemma lacks: equal operands, or a counterpart."""
        value = next((each for _, each in self._sides[1].data(node) if each.name and not self._has(each)), None)
        return Unrelated("the original has no counterpart of it") if value is None else _Demand(value)

    def _apply(self, node: ir.Node, lemma: Lemma) -> None:
        """Apply a lemma to a node of the changed model. Raises Unrelated."""
        reading = self._reading(1, node, lemma)
        errors: list[Exception] = []
        if lemma.maps is not None:
            try:
                return self._found(node.outputs[0], lemma.maps(reading))
            except _NOTHING as error:
                errors.append(error)
        alike = self._nodes.get(self._key(reading, lemma), ()) if lemma.relates is not None else ()
        twin = self._twins.get(node)
        for other in sorted(alike, key=lambda each: (each.node is not twin, self._is_taken(each.node)))[:_CANDIDATES]:
            pair = Couple(other, reading, self)
            try:
                return self._write(pair, lemma.relates(pair))  # type: ignore[misc]
            except _NOTHING as error:
                if isinstance(error, Violation) and error.of is None:
                    error.of = self._forms[self.made(other, 0)]
                errors.append(error)
        if node.op_type in CARRIERS:
            try:
                found = self._branches.relate(reading, errors, self._targets(node))
                if found is not None:
                    form, fit = found
                    form = dataclasses.replace(form, share=max(form.share, fit.agreement.share))
                    return self._found(node.outputs[0], form, fit.agreement)
            except _NOTHING as error:
                errors.append(error)
        if any(isinstance(error, Violation) for error in errors):
            raise _Compared(errors)
        raise errors[-1] if errors else Unrelated("the original has no counterpart of it")

    def _targets(self, node: ir.Node) -> list[Form]:
        """Return what a value may be to which others are added: the rest of a sum that the original has in its place, mapped."""
        found: list[Form] = []
        value, rest, sign = node.outputs[0], Form({}), ONE
        with contextlib.suppress(*_NOTHING):
            while (
                len(uses := list(value.uses())) == 1
                and uses[0].node.op_type in ("Add", "Sub")
                and len(found) < _CANDIDATES
            ):
                use = uses[0]
                other, value = use.node.inputs[1 - use.idx], use.node.outputs[0]
                # value = sign times the asked one, plus rest.
                if use.node.op_type == "Sub" and use.idx == 1:
                    sign, rest = -sign, rest.scaled(-ONE)
                factor = -ONE if use.node.op_type == "Sub" and use.idx == 0 else ONE
                if self._sides[1].constants.has(other):
                    rest = rest.shifted(self.parameter(self._sides[1], other) * factor)
                else:
                    rest = rest.plus(self._form(1, other).scaled(factor))  # type: ignore[arg-type]
                mine = self._named.get(str(value.name))
                if mine is not None:
                    own = self._known(self._numbers.original(mine))
                    family = self._families.get(own.bases, ())[-_CANDIDATES:]
                    found += [self._forms[each].plus(rest.scaled(-ONE)).scaled(sign) for each in family]
        return [dataclasses.replace(each, span=()) for each in reversed(found)]

    def _write(self, pair: Couple, relations: Sequence[Relation]) -> None:
        """Write the outputs of a node as what they are of the original's."""
        theirs = pair.theirs.node
        shares = [form.share for form in pair.theirs.forms if form is not None]
        for place, (scale, shift) in enumerate(relations):
            if place < len(theirs.outputs) and pair.theirs.is_read(theirs.outputs[place]):
                number = self.made(pair.mine, place)
                if pair.sizes is not None:
                    self.bases[number].scale = pair.sizes
                form = self._forms[number].scaled(scale).shifted(shift)
                share = max(form.share, pair.agreement.share, *shares)
                self._found(theirs.outputs[place], dataclasses.replace(form, share=share), pair.agreement)

    def _is_taken(self, node: ir.Node) -> bool:
        return not self._is_open(node.outputs[0])

    def _found(self, value: ir.Value, form: Form, known: Agreement | None = None) -> None:
        """Give a value the number of the original's that it equals; else its form is known."""
        family = self._families.get(form.bases, ())[:_FAMILY]
        bases = sorted(form.bases) if len(form.terms) == 1 else ()
        for number in sorted((*family, *bases), key=lambda each: self._numbers.first(1, each) is not None):
            try:
                agreement = self.bases.compare(self._forms[number], form)
            except _NOTHING:
                continue
            mine = self._numbers.first(0, number)
            if mine is None:  # no node makes it
                continue
            self._end_window(mine, value, number, agreement if known is None else agreement.joined(known))
            return
        self._theirs[value] = form

    def _end_window(self, mine: ir.Value, theirs: ir.Value, number: int, agreement: Agreement) -> None:
        node = mine.producer()
        if node is not None and self._numbers.first(1, number) is None and node.op_type not in ("Shape", "Size"):
            nodes = self._window(0, mine), self._window(1, theirs)
            proof = self._proof(self._site(nodes[0]), agreement, mine, nodes[0])
            window = _Window(*nodes, mine, theirs, proof)
            (self._proofs if proof.method == "proved" else self._doubts).append(window)
        self._numbers.set(1, theirs, number)

    def _proof(self, name: str, agreement: Agreement, value: ir.Value, nodes: Sequence[ir.Node] = ()) -> SiteProof:
        """Return the mark of a window: no proof where numbers may be off by too much."""
        if agreement.share > LOOSE and agreement.share > _ROUNDINGS * self._roundoff(value, nodes):
            reason = f"what is computed for it in the graph may be off by {agreement.share:.2g} of an output's largest"
            return SiteProof(name, self._open_mark, agreement.error, agreement.bound, f"{reason} coefficient")
        return SiteProof(name, "proved", agreement.error, agreement.bound)

    def _roundoff(self, value: ir.Value, nodes: Sequence[ir.Node]) -> float:
        """Return the unit roundoff of a value's type; of the constants above it where inference does not know it."""
        dtype, constants = self._sides[0].shapes.dtype(value), self._sides[0].constants
        if dtype is not None:
            return ROUNDING[dtype][0] if dtype in ROUNDING else 0.0
        values = (each for node in nodes for each in node.inputs if constants.has(each))
        return max((constants.roundoff(each)[0] for each in values), default=0.0)

    @property
    def _open_mark(self) -> Mark:
        return "not_run" if self._claims is not None else "compared"

    def _settle(self, theirs: ir.Value, pair: _Graphs, error: Exception | None, mine: ir.Value | None = None) -> bool:
        """Take a value for its counterpart, and say how they differ. error: why it is not related. Whether there is one."""
        self._read_original()
        mine = mine or self._counterpart(theirs, pair, error)
        if mine is None:
            return False
        number = self._numbers.original(mine)
        is_open = self._numbers.of(1, theirs) is None or self._numbers.of(1, theirs) != number
        if error is None:
            try:
                agreement = self.bases.compare(self._known(number), self._form(1, theirs))
                self._end_window(mine, theirs, number, agreement)
                return True
            except _NOTHING as unequal:
                if self._relate_again(mine, theirs):
                    return True
                error = unequal
        if is_open:
            nodes = self._window(0, mine), self._window(1, theirs)
            if any(is_training(each, self._sides[0].constants.version(each)) for each in nodes[0]) and not any(
                is_training(each, self._sides[1].constants.version(each)) for each in nodes[1]
            ):
                error = Violation("the original normalises with the statistics of the batch, the other model does not")
            error, is_wrong = self._cause(error, number)
            is_wrong = is_wrong and (
                not isinstance(error, Violation)
                or error.of is None
                or self._readers(0, mine) == self._readers(1, theirs)
            )
            method = "failed" if (is_wrong and not self._is_guess(nodes)) or self._is_other(mine, theirs) else "not_run"
            text = (
                str(error)
                if theirs in self._theirs or isinstance(error, Violation | _Compared)
                else self._became(mine, theirs)
            )
            reason = f"{_where(mine)}: {text}"
            proof = SiteProof(self._site(nodes[0]), method, getattr(error, "error", 0.0), reason=reason)  # type: ignore[arg-type]
            another = "" if self._has(theirs) else self._another(*nodes)
            another = another or ("" if self._is_float_of_main(mine) else self._exchanged(*nodes))
            self._doubts.append(_Window(*nodes, mine, theirs, proof, another))
            if len(self._doubts) > _DOUBTS:
                raise _TooMuch("the models differ in more places than are tried")
        self._numbers.set(1, theirs, number)
        return True

    def _is_guess(self, nodes: tuple[list[ir.Node], list[ir.Node]]) -> bool:
        """Whether nobody says that a window is a fold, and it is none: its operators are the same, or it has no map."""
        first, second = (sorted(node.op_type for node in each) for each in self._in_order(*nodes))
        return self._claims is None and (first == second or not any(each in _MAPS for each in first))

    def _in_order(self, *windows: list[ir.Node]) -> list[list[ir.Node]]:
        """Return the nodes of a window in both models, the first one first, without copies."""
        return [
            [node for node in reversed(nodes) if not is_copy(side, node)]
            for side, nodes in zip(self._sides, windows, strict=True)
        ]

    def _is_other(self, mine: ir.Value, theirs: ir.Value) -> bool:
        """Whether a node outside of all claims does something else with equal operands."""
        node, other = mine.producer(), theirs.producer()
        if self._claims is None or node is None or other is None:
            return False
        scope = self._sides[0].scopes[node.graph]  # type: ignore[index]
        if any(
            claim.scope == scope and printable(name_of(node)) in map(printable, claim.nodes) for claim in self._claims
        ):
            return False
        return all(self._has(value) for _, value in self._sides[1].data(other))

    def _cause(self, error: Exception, number: int) -> tuple[Exception, bool]:
        """Return why a value is not that of a number, and whether it certainly is another one.

        A weight that is none of a single operator may be that of several.
        """
        if isinstance(error, Violation):
            return error, True
        if not isinstance(error, _Compared):
            return error, False
        for each in error.errors:
            if isinstance(each, Violation) and each.of is not None and number in self._forms:
                with contextlib.suppress(*_NOTHING):
                    self.bases.ratio(each.of, dataclasses.replace(self._forms[number], span=each.of.span))
                    return each, True
        return error, False

    def _another(self, mine: list[ir.Node], theirs: list[ir.Node]) -> str:
        """Return how a window differs in constants or attributes alone: another model, not a fold."""
        first, second = self._in_order(mine, theirs)
        for one, two in zip(first, second, strict=False):
            if one.op_identifier() != two.op_identifier() or len(one.inputs) != len(two.inputs):
                return ""
            text = self._differences.between(one, two)
            if text:
                same = sorted(node.op_type for node in first) == sorted(node.op_type for node in second)
                rest, others = (
                    sorted(node.op_type for node in each if node.op_type not in _MAPS) for each in (first, second)
                )
                is_kept = rest == others and not self._is_in_front_of_a_map(one.outputs[0])
                return text if same or is_kept else ""
        return ""

    def _is_float_of_main(self, mine: ir.Value) -> bool:
        """Whether a run can compare a value of the original closely."""
        dtype = self._sides[0].shapes.dtype(mine)
        return mine.graph is self._sides[0].model.graph and dtype is not None and dtype.is_floating_point()

    def _exchanged(self, mine: list[ir.Node], theirs: list[ir.Node]) -> str:
        """Return which operator of a window became another one that reads the same, where nothing else differs in it."""
        nodes = self._in_order(mine, theirs)
        if len(nodes[0]) != len(nodes[1]):
            return ""
        made = [
            {value: (place, index) for place, node in enumerate(each) for index, value in enumerate(node.outputs)}
            for each in nodes
        ]
        text = ""
        for one, two in zip(*nodes, strict=True):
            reads = [
                [
                    None if value is None else made[side].get(value, self._numbers.of(side, value))
                    for value in node.inputs
                ]
                for side, node in enumerate((one, two))
            ]
            if reads[0] != reads[1] or dict(one.attributes) != dict(two.attributes):
                return ""
            if one.op_identifier() != two.op_identifier():
                text = text or f"{printable(name_of(one))} ({one.op_type}) became {two.op_type}"
        return text

    def _ends(self, doubts: Sequence[_Window]) -> tuple[WindowEnd, ...]:
        """Return where windows end in the main graphs, for runs that compare the values there."""
        main = [window for window in doubts if window.value.graph is self._sides[0].model.graph]
        return tuple(
            WindowEnd(
                str(window.value.name),
                str(window.end.name),
                self._became(window.value, window.end),
                self._windows_behind(window.value, main),
            )
            for window in main
        )

    def _windows_behind(self, value: ir.Value, windows: Sequence[_Window]) -> tuple[int, ...]:
        """Return the windows that read a value, perhaps moved; none where something else reads it, too."""
        pending, found = [value], set[int]()
        while pending:
            each = pending.pop()
            if each.is_graph_output():
                return ()
            for use in each.uses():
                places = {place for place, window in enumerate(windows) if use.node in window.mine}
                found |= places
                if not places and not (use.node.op_type in MOVEMENTS or is_copy(self._sides[0], use.node)):
                    return ()
                pending += [] if places else use.node.outputs
        return tuple(sorted(found))

    def _other_model(self, doubts: Sequence[_Window]) -> str:
        """Return what makes the changed model another one, and no window behind it makes up for."""
        return next(
            (each.another for each in doubts if each.another and not self._windows_behind(each.value, doubts)), ""
        )

    def _is_in_front_of_a_map(self, mine: ir.Value) -> bool:
        """Whether nothing but movements lies between a value of the original and a map."""
        pending, seen = [mine], 0
        while pending and seen < _CANDIDATES:
            seen += 1
            for use in pending.pop().uses():
                if use.node.op_type in _MAPS:
                    return True
                if use.node.op_type in MOVEMENTS or is_copy(self._sides[0], use.node):
                    pending.append(use.node.outputs[0])
        return False

    def _is_equal(self, mine: ir.Value, theirs: ir.Value) -> bool:
        return self._numbers.original(mine) == self._numbers.of(1, theirs)

    def _became(self, mine: ir.Value, theirs: ir.Value) -> str:
        """Tell the first difference that was found, or that of two outputs."""
        made = [value.producer() for value in (mine, theirs)]
        names = [
            f"{printable(str(value.name))} ({'input' if node is None else node.op_type})"
            for value, node in zip((mine, theirs), made, strict=True)
        ]
        return f"{names[0]} became {names[1]}" if names[0] != names[1] else f"{names[0]} is computed in another way"

    # Windows, and the counterparts of values.

    def _window(self, side: int, value: ir.Value) -> list[ir.Node]:
        """Return the nodes above a value up to values that both models have, the last one first."""
        found: dict[ir.Node, None] = {}
        pending = [value]
        while pending and len(found) < _LARGEST:
            each = pending.pop()
            node = each.producer()
            if node is None or node in found or node.graph is not value.graph or node not in self._sides[side].order:
                continue
            if each is not value and self._is_shared(side, each):
                continue
            found[node] = None
            pending += [operand for _, operand in self._sides[side].data(node)]
        return sorted(found, key=self._sides[side].order.__getitem__, reverse=True)

    def _is_shared(self, side: int, value: ir.Value) -> bool:
        number = self._numbers.of(side, value)
        return number is not None and (side == 1 or self._numbers.first(1, number) is not None)

    def _counterpart(self, theirs: ir.Value, pair: _Graphs, error: Exception | None = None) -> ir.Value | None:
        """Return the value of the original that nodes of the same names read, or that has its name or is read alike.

        Of several it is one that depends on the same bases. error: from which these are known.
        """
        bases = {self._theirs[theirs].bases} if theirs in self._theirs else set()
        if isinstance(error, _Compared):
            bases = {each.of.bases for each in error.errors if isinstance(each, Violation) and each.of is not None}
        alike = pair.by_readers.get(self._readers(1, theirs))
        while alike and not self._is_open(alike[0]):
            alike.popleft()
        named = pair.by_name.get(str(theirs.name))
        if named is not None and self._readers(0, named) != self._readers(1, theirs):
            named = None
        found = [
            mine
            for mine in dict.fromkeys(
                (*self._read_by_twins(theirs), named, *itertools.islice(alike or (), _CANDIDATES))
            )
            if mine is not None and self._is_open(mine) and _fits(mine, theirs)
        ]
        return next((mine for mine in found if self._bases_of(mine) in bases), found[0] if found else None)

    def _bases_of(self, mine: ir.Value) -> frozenset[int] | None:
        form = self._forms.get(self._numbers.original(mine))
        return None if form is None else form.bases

    def _read_by_twins(self, theirs: ir.Value) -> Iterator[ir.Value | None]:
        """Yield what nodes of the same names, or outputs, have in the original in the place of a value."""
        for each in self._copies(1, theirs):
            for use in each.uses():
                twin = None if is_copy(self._sides[1], use.node) else self._twins.get(use.node)
                if twin is not None and twin.op_type == use.node.op_type and use.idx < len(twin.inputs):
                    yield self._source(twin.inputs[use.idx])
            if each in self._outputs:
                yield self._source(self._outputs[each])

    def _is_open(self, mine: ir.Value) -> bool:
        """Whether no value of the changed model is known to equal this one."""
        return self._numbers.first(1, self._numbers.original(mine)) is None

    def _source(self, mine: ir.Value | None) -> ir.Value | None:
        """Return what a value of the original is a copy of."""
        while mine is not None and (node := mine.producer()) is not None and is_copy(self._sides[0], node):
            mine = node.inputs[0]
        return mine

    def _copies(self, side: int, value: ir.Value) -> Iterator[ir.Value]:
        """Yield a value and the copies of it."""
        pending = [value]
        while pending:
            each = pending.pop()
            yield each
            pending += [use.node.outputs[0] for use in each.uses() if is_copy(self._sides[side], use.node)]

    def _readers(self, side: int, value: ir.Value) -> tuple[tuple[str, ...], ...]:
        """Return the operators that read a value, and its places among the outputs: folds leave both as they are."""
        found: list[tuple[str, ...]] = []
        for each in self._copies(side, value):
            found += [
                (*use.node.op_identifier(), str(use.idx))
                for use in each.uses()
                if not is_copy(self._sides[side], use.node)
            ]
            if each.is_graph_output() and each.graph is not None:
                found += [("output", str(index)) for index, output in enumerate(each.graph.outputs) if output is each]
        return tuple(sorted(found))

    def _site(self, nodes: list[ir.Node]) -> str:
        """Name the batch norms of a window, or else its last node."""
        norms = [node for node in reversed(nodes) if node.op_type == "BatchNormalization"]
        return " + ".join(printable(name_of(node)) for node in norms or nodes[:1])

    # Graphs, bodies and functions.

    def _open(self) -> _Graphs:
        """Couple the main graphs by the names of their inputs and outputs. Raises Mismatch."""
        models = [side.model for side in self._sides]
        mine, theirs = (opsets(model) for model in models)
        for domain, version in mine.items():
            if theirs.get(domain, version) != version:
                raise Mismatch(f"the opset {domain!r} changed from {version} to {theirs[domain]}")
        graphs = models[0].graph, models[1].graph
        for what, first, second in (
            ("input", self._given(0, graphs[0]), self._given(1, graphs[1])),
            ("output", list(graphs[0].outputs), list(graphs[1].outputs)),
        ):
            if [value.name for value in first] != [value.name for value in second]:
                raise Mismatch(f"the {what}s of the model changed")
            for one, two in zip(first, second, strict=True):
                if one.type != two.type or (what == "input" and one.shape != two.shape):
                    raise Mismatch(f"the {what} {one.name!r} changed")
        return self._pair(*graphs)

    def _given(self, side: int, graph: ir.Graph) -> list[ir.Value]:
        constants = self._sides[side].constants
        is_main = graph is self._sides[side].model.graph
        return [value for value in graph.inputs if not (is_main and constants.has(value))]

    def _pair(self, mine: ir.Graph, theirs: ir.Graph) -> _Graphs:
        """Give numbers to the original's graph, and the inputs of the other one alike."""
        self._twins.update(_twins(self._sides, (mine, theirs)))
        self._outputs.update(zip(theirs.outputs, mine.outputs, strict=False))
        for one, two in zip(self._given(0, mine), self._given(1, theirs), strict=True):
            number = self._numbers.fresh()
            self._numbers.set(0, one, number)
            self._numbers.set(1, two, number)
            self._add_base(number, one, self._asked_shape(one))
        by_readers: dict[Hashable, collections.deque[ir.Value]] = {}
        by_name: dict[str, ir.Value] = {}
        for node in mine:
            if self._sides[0].is_constant_node(node) or self._copy(0, node):
                continue
            self._unread.append(node)
            if self._is_special(0, node):
                for value in node.outputs:
                    self._numbers.set(0, value, self._numbers.fresh())
                self._special.setdefault(self._numbers.key(0, node), []).append(node)
            else:
                self._numbers.number(0, node)
            for value in node.outputs:
                by_readers.setdefault(self._readers(0, value), collections.deque()).append(value)
                by_name[str(value.name)] = self._named[str(value.name)] = value
        return _Graphs((mine, theirs), by_readers, by_name)

    def _is_special(self, side: int, node: ir.Node) -> bool:
        model = self._sides[side]
        return bool(walk.node_bodies(node)) or node.op_identifier() in model.model.functions or model.is_random(node)

    def _copy(self, side: int, node: ir.Node) -> bool:
        """Let the output of an operator that copies its input count as that; whether it does."""
        if not is_copy(self._sides[side], node):
            return False
        source, target = node.inputs[0], node.outputs[0]
        number = self._numbers.of(side, source)
        if number is not None:
            self._numbers.set(side, target, number)
        elif source in self._theirs:
            self._theirs[target] = self._theirs[source]
        return True

    def _match(self, node: ir.Node, depth: int) -> None:
        """Give its numbers to a node with bodies, a call, or a random node, if the original has its counterpart."""
        self._read_original()
        key = self._numbers.key(1, node)
        for mine in self._special.get(key, ()) if key is not None else ():
            if self._taken.setdefault(mine, node) is node and self._same_bodies(mine, node, depth):
                for one, two in zip(mine.outputs, node.outputs, strict=False):
                    self._numbers.set(1, two, self._numbers.original(one))
                return

    def _same_bodies(self, mine: ir.Node, theirs: ir.Node, depth: int) -> bool:
        """Whether the bodies of two nodes, or the functions that they call, do the same."""
        first, second = (side.model.functions.get(mine.op_identifier()) for side in self._sides)
        if first is not None or second is not None:
            return first is not None and second is not None and self._same_function(first, second, depth)
        bodies = _paired_bodies(mine, theirs)
        return bodies is not None and all(self._same_graph(("body", one, two), one, two, depth) for one, two in bodies)

    def _same_function(self, mine: ir.Function, theirs: ir.Function, depth: int) -> bool:
        own, others = ({name: self._numbers.token(each) for name, each in f.attributes.items()} for f in (mine, theirs))
        is_called_alike = opsets(mine) == opsets(theirs) and own == others
        return is_called_alike and self._same_graph(("function", mine.identifier()), mine.graph, theirs.graph, depth)

    def _same_graph(self, key: Hashable, mine: ir.Graph, theirs: ir.Graph, depth: int) -> bool:
        if key not in self._bodies:
            fits = len(mine.inputs) == len(theirs.inputs)
            self._bodies[key] = self._pair(mine, theirs) if fits else None
        pair = self._bodies[key]
        return pair is not None and not self._compare(pair, depth + 1)

    def _check_time(self) -> None:
        if time.thread_time() > self._end:
            raise _TooMuch(f"the {self._seconds:.3g} seconds for a proof are over (--proof-seconds allows more)")

    def _unread_constant(self) -> str:
        """Return which stored tensor that nothing reads is not the original's."""
        if self._claims is None:
            return ""
        mine, theirs = (side.model.graph.initializers for side in self._sides)
        for name, value in theirs.items():
            if value.const_value is None or value.uses() or value.is_graph_output():
                continue
            if name not in mine or self._numbers.of(0, mine[name]) != self._numbers.of(1, value):
                return f"the constant {name!r}, which nothing reads, is not the original's"
        return ""

    # The verdict.

    def _missing(self) -> str:
        """Return which claim names a node that is not there."""
        if self._claims is None:
            return ""
        names = {(scope, printable(name_of(node))) for graph, scope in self._sides[0].scopes.items() for node in graph}
        for claim in self._claims:
            for name in claim.nodes:
                if (claim.scope, printable(name)) not in names:
                    site, text, scope = (printable(each)[:_SHOWN] for each in (claim.site, name, claim.scope))
                    return f"the report's site {site} names {text!r}, which is no node of the original's {scope}"
        return ""

    def _verdict(self, mismatch: str) -> Verification:
        """Return the verdict. mismatch: why the walk ended early, or what differs beside all windows."""
        if self._claims is not None:
            return self._claimed(self._claims, mismatch)
        doubts = self._decided(mismatch)
        # Else what differs there may be made up for elsewhere.
        another = "" if mismatch else self._other_model(doubts)
        sites = _merged([window.proof for window in (*self._proofs, *(() if another else doubts))])
        failed = next((window.proof for window in doubts if window.proof.method == "failed"), None)
        left = next((window.proof for window in doubts), None)
        status: Status = "passed"
        reason = ""
        if another:
            status, reason = (
                "not_verified",
                f"the graphs differ in another way than by folds: {another}, and nothing was folded there",
            )
        elif failed is not None:
            status, reason = "failed", f"the fold of {failed.site} is wrong {failed.reason}"
        elif mismatch or left is not None:
            status = "not_verified"
            what = "is not proved: " if left is not None and left.method == "compared" else ""
            reason = f"the graphs differ in another way than by folds: {mismatch}" if mismatch else ""
            reason = reason or f"the fold of {left.site} {what}{left.reason}"  # type: ignore[union-attr]
        return Verification(
            status, reason, engine=ENGINE, sites=tuple(sites), method="local", another=another, ends=self._ends(doubts)
        )

    def _decided(self, mismatch: str = "") -> list[_Window]:
        """Return what is not proved. A guess is refuted only if nothing else on its path is open, a claim if all others are refuted."""
        others = [each for each in self._doubts if self._claims is None or each.proof.method != "failed"]
        found = []
        for window in self._doubts:
            proof = window.proof
            values = [window.value, *(each.value for each in others if each is not window)]
            if proof.method == "failed" and (mismatch or window.value in self._related(values)):
                proof = dataclasses.replace(proof, method="not_run", reason=f"{proof.reason}; {_UNDECIDED}")
            found.append(dataclasses.replace(window, proof=proof))
        return found

    def _related(self, values: Sequence[ir.Value]) -> set[ir.Value]:
        """Return those above or below another one."""
        if len(values) < 2:
            return set()
        wanted, related = set(values), set[ir.Value]()
        below: dict[ir.Value, set[ir.Value]] = {}
        for node in self._sides[0].order:
            above = set[ir.Value]().union(*(below.get(value, ()) for value in node.inputs if value is not None))
            for value in node.outputs:
                if value in wanted and above:
                    related |= above | {value}
                found = above | ({value} & wanted)
                if found:
                    below[value] = found
        return related

    def _claimed(self, claims: Sequence[Claim], mismatch: str) -> Verification:
        """Return the verdict on claims, each with the mark of the windows that have a node of it."""
        owners: dict[tuple[str, str], list[int]] = {}
        for index, claim in enumerate(claims):
            for name in claim.nodes:
                owners.setdefault((claim.scope, printable(name)), []).append(index)
        marks: dict[int, SiteProof] = {}
        doubts = self._decided()
        for window in (*self._proofs, *doubts):
            for node in window.mine:
                for index in owners.get((self._sides[0].scopes[node.graph], printable(name_of(node))), ()):  # type: ignore[index]
                    marks[index] = window.proof if index not in marks else worse(marks[index], window.proof)
        wrong, left = (
            next((f"site {each.proof.site}: {each.proof.reason}" for each in doubts if each.proof.method == method), "")
            for method in ("failed", "not_run")
        )
        mismatch = mismatch or self._beside(owners)
        is_over = bool(mismatch)
        rest = SiteProof("", "not_run", reason=mismatch or left) if is_over or left else SiteProof("", "proved")
        sites = tuple(
            dataclasses.replace(marks.get(index, rest), site=claim.site) for index, claim in enumerate(claims)
        )
        is_wrong = wrong or (mismatch and not self._is_cut)
        status: Status = "failed" if is_wrong else "not_verified" if left or mismatch else "passed"
        return Verification(
            status, wrong or mismatch or left, engine=ENGINE, sites=sites, method="local", ends=self._ends(doubts)
        )

    def _beside(self, owners: Mapping[tuple[str, str], Sequence[int]]) -> str:
        """Return which node has another result though no claim names it. Behind a fold that ends in adding zero, which is
        equal on both sides of it, one without parameters may stand in a window of its own.
        """
        has = self._sides[0].constants.has
        for window in self._proofs:
            for node in window.mine:
                scope = self._sides[0].scopes[node.graph]  # type: ignore[index]
                if is_copy(self._sides[0], node) or (scope, printable(name_of(node))) in owners:
                    continue
                if window.proof.error or any(map(has, node.inputs)):
                    return f"{printable(name_of(node))} ({node.op_type}) is computed in another way, and belongs to no site"
        return ""


class _Compared(Unrelated):
    """A node was compared with several of the original."""

    def __init__(self, errors: Sequence[Exception]) -> None:
        super().__init__(str(next(error for error in errors if isinstance(error, Violation))))
        self.errors = errors


def _allowed(original: Side) -> float:
    """Return the seconds for a proof: two, one more for each 500 nodes, and one for each 100 MB of weights in other files."""
    return 2.0 + len(original.order) / 500 + original.constants.bytes_outside / 1e8


class _Demand(Exception):
    """An operator needs an operand that equals one of the original."""

    def __init__(self, value: ir.Value) -> None:
        self.value = value


def _lemma(node: ir.Node) -> Lemma | None:
    is_known = node.domain == "" or (node.domain, node.op_type) in FOREIGN
    return LEMMAS.get(node.op_type) if is_known else None


def check_signature(node: ir.Node, side: Side) -> None:
    """Raise UnsupportedModelError where a node of the standard is not as its schema says."""
    if node.domain == "":
        check_node(node, side.constants.version(node))


def _read_numbers(side: Side, value: ir.Value) -> Numbers:
    """Read a constant with its errors. Raises Unrelated where it holds no floats, is not finite or too large."""
    leaf = side.constants.leaf(value)
    if leaf is not None and math.prod(side.constants.shape(value)) > _ELEMENTS:
        raise Unrelated(f"the constant {value.name!r} is too large for a map")
    array = np.asarray(side.constants.array(value))
    if array.dtype != np.float64:
        raise Unrelated(f"the constant {value.name!r} holds no floats")
    if side.place == 0 and not np.isfinite(array).all():
        raise Unrelated(f"the constant {value.name!r} of the original is not finite")
    share, tiny = side.stored_error(value)
    error = share * np.abs(array) + tiny if share or tiny else np.zeros(())
    computed = side.constants.error(value)
    return Numbers(array, error if computed is None else error + computed)


def _where(value: ir.Value) -> str:
    node = value.producer()
    return f"at {printable(name_of(node))}" if node is not None else "at an input"


_ORDER = ("proved", "compared", "not_run", "failed")


def worse(first: SiteProof, second: SiteProof) -> SiteProof:
    """Return the mark of a site with two windows."""
    worst = max(first, second, key=lambda proof: _ORDER.index(proof.method))
    return dataclasses.replace(worst, error=max(first.error, second.error), bound=max(first.bound, second.bound))


def _merged(proofs: Iterable[SiteProof]) -> list[SiteProof]:
    """Return one mark for each site."""
    found: dict[str, SiteProof] = {}
    for proof in proofs:
        found[proof.site] = proof if proof.site not in found else worse(found[proof.site], proof)
    return list(found.values())


def _fits(mine: ir.Value, theirs: ir.Value) -> bool:
    """Whether the declared shapes and types of two values allow that they are equal."""
    if mine.dtype is not None and theirs.dtype is not None and mine.dtype != theirs.dtype:
        return False
    if mine.shape is None or theirs.shape is None:
        return True
    return len(mine.shape) == len(theirs.shape) and all(
        not (isinstance(one, int) and isinstance(two, int)) or one == two
        for one, two in zip(mine.shape, theirs.shape, strict=True)
    )


def is_copy(side: Side, node: ir.Node) -> bool:
    """Whether the first output of an operator of the standard is its first input."""
    if node.op_type not in ("Identity", "Cast", "Dropout") or node.domain != "":
        return False
    source = node.inputs[0] if node.inputs else None
    if source is None or side.constants.has(source) or any(value.name and value.uses() for value in node.outputs[1:]):
        return False
    if node.op_type == "Cast":
        return source.dtype is not None and source.dtype is cast_target(node)
    return node.op_type == "Identity" or side.is_inference_dropout(node)


def _needed(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes that outputs of a graph depend on."""
    found: set[ir.Node] = set()
    pending = list(graph.outputs)
    while pending:
        node = pending.pop().producer()
        if node is not None and node not in found:
            found.add(node)
            pending += [each for each in node.inputs if each is not None]
            pending += [each for inner in walk.inner_nodes(node) for each in inner.inputs if each is not None]
    return found


def _twins(sides: tuple[Side, Side], graphs: tuple[ir.Graph, ir.Graph]) -> dict[ir.Node, ir.Node]:
    """Return the nodes of the original's graph that have the names of the other one's."""
    names: dict[str, tuple[list[ir.Node], list[ir.Node]]] = {}
    for index, (side, graph) in enumerate(zip(sides, graphs, strict=True)):
        for node in graph:
            if node in side.order:
                names.setdefault(name_of(node), ([], []))[index].append(node)
    return {
        theirs: mine
        for pair in names.values()
        if len(pair[0]) == len(pair[1])
        for mine, theirs in zip(*pair, strict=True)
    }


def opsets(holder: ir.Model | ir.Function) -> dict[str, int]:
    """Return the versions by domain; the standard's has two names. Raises Mismatch."""
    found: dict[str, int] = {}
    for domain, version in holder.opset_imports.items():
        if found.setdefault(domain or "ai.onnx", version) != version:
            raise Mismatch(f"two versions of the domain {domain or 'ai.onnx'!r} are imported")
    return found


def _paired_bodies(mine: ir.Node, theirs: ir.Node) -> list[tuple[ir.Graph, ir.Graph]] | None:
    """Couple the bodies of two nodes by the names of their attributes, which a file may hold in any order; None where they do not fit."""
    held = [
        [
            (name, list(walk.bodies(each)))
            for name, each in sorted(node.attributes.items())
            if each.type in walk.GRAPH_TYPES
        ]
        for node in (mine, theirs)
    ]
    if [(name, len(bodies)) for name, bodies in held[0]] != [(name, len(bodies)) for name, bodies in held[1]]:
        return None
    return [pair for (_, first), (_, second) in zip(*held, strict=True) for pair in zip(first, second, strict=True)]
