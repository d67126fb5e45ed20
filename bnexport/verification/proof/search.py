"""Find the folds between two models, and prove each.

Both models are read from their inputs downwards. The same operator with the same attributes and constants on equal values
makes equal values (`numbering`). Where the changed model goes on in another way, each of its values is compared with
values of the original that are read alike: a region ends in both, and begins at values that are equal. If it is proved,
the two are equal as well, and the search goes on below. What is proved so rests on what was proved above it.

Claims say which nodes belong to a fold: then regions hold these alone, and a value that is read by a node of the same name
has to be equal. If it is not, that fold is wrong, and so is everything else that differs.

Without them a part that nothing proves is refuted at its likeliest region, or stays open, and the rest is compared as
if it were right. A refuted region shows that two values differ. A later region may make up for it only if it differs as
well: so where another one on its path is not proved, none is called wrong, and whole models decide.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import onnx_ir as ir

from bnexport.errors import BnexportError
from bnexport.model_io import walk
from bnexport.model_io.read import paused_collection
from bnexport.model_io.validate import printable
from bnexport.verification.proof.attributes import same_attribute, same_attributes
from bnexport.verification.proof.numbering import Counterparts, Numbering
from bnexport.verification.proof.prover import Prover, worse
from bnexport.verification.proof.regions import ROUNDINGS, Mismatch, Region, Side, cone, name_of
from bnexport.verification.verdict import Claim, SiteProof, Status, Verification

# What a report or a certificate tells of: which nodes of the original belong to one fold.

# Characters of a name out of a report that a message repeats.
_SHOWN = 200


class Claims:
    """The claims of each node; those that share a node are one group. missing: why one is about no node."""

    def __init__(self, original: Side, claims: Sequence[Claim]) -> None:
        self._claims = claims
        self._owners: dict[ir.Node, list[int]] = {}
        self.missing = ""
        self._parents = list(range(len(claims)))
        named: dict[tuple[str, str], list[ir.Node]] = {}
        for graph, scope in original.scopes.items():
            for node in graph:
                named.setdefault((scope, printable(name_of(node))), []).append(node)
        for index, claim in enumerate(claims):
            for name in claim.nodes:
                nodes = named.get((claim.scope, printable(name)))
                if nodes is None:
                    site, text, scope = (printable(each)[:_SHOWN] for each in (claim.site, name, claim.scope))
                    self.missing = (
                        f"the report's site {site} names {text!r}, which is no node of the original's {scope}"
                    )
                    return
                for node in filter(original.order.__contains__, nodes):
                    self._owners.setdefault(node, []).append(index)
                    self._parents[self._root(index)] = self._root(self._owners[node][0])

    def _root(self, index: int) -> int:
        while self._parents[index] != index:
            self._parents[index] = self._parents[self._parents[index]]
            index = self._parents[index]
        return index

    def group(self, node: ir.Node | None) -> int | None:
        """Return a number of the claims around a node, None where there is none."""
        owners = self._owners.get(node) if node is not None else None
        return None if owners is None else self._root(owners[0])

    def holds(self, node: ir.Node | None) -> bool:
        return node in self._owners

    def leaves(self, value: ir.Value) -> bool:
        """Whether what reads a value is not all in its group."""
        group = self.group(value.producer())
        return group is not None and (
            value.is_graph_output() or any(self.group(use.node) != group for use in value.uses())
        )

    def _sites_of(self, region: Region) -> Iterable[int]:
        return dict.fromkeys(index for node in region.nodes[0] for index in self._owners.get(node, ()))

    def name(self, region: Region) -> str:
        """Return the sites that a region belongs to."""
        return ", ".join(self._claims[index].site for index in self._sites_of(region))

    def marks(
        self, proofs: Sequence[tuple[Region, SiteProof]], is_open: Callable[[ir.Value], bool], reason: str
    ) -> list[SiteProof]:
        """Return a mark for each claim. is_open: whether a value has no counterpart. reason: for what was not reached."""
        marks: dict[int, SiteProof] = {}
        for region, proof in proofs:
            for index in self._sites_of(region):
                marks[index] = proof if index not in marks else worse(marks[index], proof)
        exits = [value for node in self._owners for value in node.outputs if self.leaves(value)]
        same, changed = (
            {self.group(value.producer()) for value in exits if is_open(value) == wanted} for wanted in (False, True)
        )
        rest = SiteProof("", "not_run", reason=reason or "nothing that an output needs")
        for index in range(len(self._claims)):
            is_same = not reason and self._root(index) in same - changed
            marks.setdefault(index, SiteProof("", "proved") if is_same else rest)
        return [dataclasses.replace(marks[index], site=claim.site) for index, claim in enumerate(self._claims)]


ENGINE = "local proof in float64"
_LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")
# Nodes of one region in each model; a fold has a few. That of several claims may have more.
_LARGEST, _LARGEST_CLAIMED = 40, 512
# Values of the original that one value is compared with, and parts that are taken for right though they are not proved.
_CANDIDATES, _ASSUMED = 4, 8
# Guesses that may fail: in one reading of the changed graph, in all, and more for each that is proved; a fold takes two.
_FAILED, _FAILED_IN_ALL, _FAILED_EACH = 12, 72, 4
# Nodes that differ from their counterparts in one other model.
_CHANGED = 64
_UNDECIDED = "other parts differ, too, and may make up for it"


@paused_collection()
def prove(original: ir.Model, changed: ir.Model, claims: Sequence[Claim] | None = None) -> Verification:
    """Prove that `changed` computes what `original` does, for every input, up to the rounding of its weights.

    Both models are only read. "passed": everything outside the folds is the same, and each fold is proved or, as its
    mark says, compared. "failed": a fold is wrong. "not_verified": a region could not be evaluated.

    claims: where the folds are, a mark for each; everything else that differs has failed. None to search for the folds
    of batch norms and per-channel arithmetic: `sites` is empty where the graphs are the same, "compared" is no proof, and
    other differences are "not_verified". Such a fold may have been computed in the type of its weights
    (`parameters.ROUNDINGS`).
    """
    try:
        return _DifferenceSearch((Side(original, ROUNDINGS if claims is None else 0), Side(changed)), claims).run()
    except BnexportError as error:
        return Verification("not_verified", str(error), engine=ENGINE, method="local")


@dataclasses.dataclass(frozen=True)
class _Graphs:
    """Two graphs that have to do the same, and the original's values by how they are read, in their order."""

    graphs: tuple[ir.Graph, ir.Graph]
    by_readers: dict[Hashable, collections.deque[ir.Value]]
    by_name: dict[str, ir.Value]


class _TooManyDifferences(Exception):
    """Most guesses fail: the models are no fold of each other."""


class _DifferenceSearch:
    def __init__(self, sides: tuple[Side, Side], claims: Sequence[Claim] | None) -> None:
        self._sides = sides
        self._claims = None if claims is None else Claims(sides[0], claims)
        self._numbers = Numbering(sides, exact=claims is not None)
        self._prover = Prover(sides, claimed=claims is not None)
        # Every comparison of two values, by what it was made of, in the order of the changed model.
        self._tried: dict[Hashable, tuple[Region, SiteProof]] = {}
        self._failed = 0
        self._is_given_up = False
        self._proofs: list[tuple[Region, SiteProof]] = []
        self._doubtful: list[tuple[Region, SiteProof]] = []
        # Pairs of values that are proved, or taken for equal.
        self._equal: set[tuple[ir.Value, ir.Value]] = set()
        # Nodes of the original that hold bodies, call functions or may be random, and those that have a counterpart.
        self._special: dict[Hashable, list[ir.Node]] = {}
        self._taken: dict[ir.Node, ir.Node] = {}
        self._functions: dict[Hashable, _Graphs | None] = {}
        self._counterparts = Counterparts(sides, self._numbers)
        self._twins = _twins(sides)
        self._paired: dict[ir.Graph, ir.Graph] = {}
        # Nodes of the changed graph by what they do with which values.
        self._alike: dict[Hashable, ir.Node] = {}

    def run(self) -> Verification:
        try:
            pair = self._open()
        except Mismatch as difference:
            return self._verdict(str(difference))
        try:
            reason = self._first_compared(pair)
            if self._claims is not None:
                return self._verdict(reason or self._unread())
            if reason:
                other = self._other_constants(pair)
                if other:
                    verdict = self._verdict(f"{other}, and nothing was folded there")
                    return dataclasses.replace(verdict, another=other)
            for _ in range(_ASSUMED):
                if not reason or self._is_given_up or not self._assume():
                    break
                reason = self._compare(pair)
        except _TooManyDifferences as error:
            reason = str(error)
        return self._verdict(reason)

    def _unread(self) -> str:
        """Return which stored tensor that nothing reads is not the original's."""
        mine, theirs = (side.model.graph.initializers for side in self._sides)
        for name, value in theirs.items():
            if value.const_value is None or value.uses() or value.is_graph_output():
                continue
            if name not in mine or self._numbers.of(0, mine[name]) != self._numbers.of(1, value):
                return f"the constant {name!r}, which nothing reads, is not the original's"
        return ""

    def _first_compared(self, pair: _Graphs) -> str:
        """Compare the graphs; most guesses fail where all constants differ, which is a reason as well."""
        try:
            return self._compare(pair)
        except _TooManyDifferences as error:
            self._is_given_up = True
            return str(error)

    def _other_constants(self, pair: _Graphs) -> str:
        """Return the first difference if the models correspond node by node, but for constants and attributes: another model."""
        numbers, proved = self._numbers.snapshot(), len(self._proofs)
        tried, equal = dict(self._tried), set(self._equal)
        first = ""
        for _ in range(_CHANGED):
            found = self._take_counterpart(pair)
            if found is None:
                break
            first = first or found
            if not self._first_compared(pair):
                return first
        # What was compared meanwhile rests on parts that are not equal.
        self._numbers.restore(numbers)
        self._tried, self._equal = tried, equal
        del self._proofs[proved:]
        return ""

    def _take_counterpart(self, pair: _Graphs) -> str | None:
        """Take a node for equal to its counterpart; return how it differs, None where no node has one."""
        for mine, theirs in self._counterparts.of(pair.graphs):
            inner = self._unequal_bodies(mine, theirs)
            if inner:
                steps = (self._take_counterpart(each) for each in inner)
                found = next((text for text in steps if text is not None), None)
                if found is not None:
                    return found
            elif inner is not None:
                for one, two in zip(mine.outputs, theirs.outputs, strict=False):
                    if not self._has(two):
                        self._numbers.set(1, two, self._numbers.of(0, one))  # type: ignore[arg-type]
                return self._counterparts.difference(mine, theirs)
        return None

    def _unequal_bodies(self, mine: ir.Node, theirs: ir.Node) -> list[_Graphs] | None:
        """Return the bodies of two nodes, or of the functions that they call, that are not the same; None where they do not fit."""
        first, second = (side.model.functions.get(mine.op_identifier()) for side in self._sides)
        if first is not None and second is not None:
            if self._same_function(first, second):
                return []
            pairs = [self._functions.get(("function", first.identifier()))]
        else:
            bodies = _paired_bodies(mine, theirs)
            if bodies is None:
                return None
            keys = [(("body", one, two), one, two) for one, two in bodies]
            pairs = [self._functions[key[0]] for key in keys if not self._same_graph(*key)]
        return None if None in pairs else pairs  # type: ignore[return-value]

    def _open(self) -> _Graphs:
        """Pair the main graphs by the names of their inputs and outputs. Raises Mismatch."""
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
        self._paired[theirs] = mine
        for one, two in zip(self._given(0, mine), self._given(1, theirs), strict=True):
            number = self._numbers.fresh()
            self._numbers.set(0, one, number)
            self._numbers.set(1, two, number)
        by_readers: dict[Hashable, collections.deque[ir.Value]] = {}
        by_name: dict[str, ir.Value] = {}
        for node in mine:
            if self._sides[0].is_constant_node(node) or self._copy(0, node):
                continue
            if self._is_special(0, node):
                for value in node.outputs:
                    self._numbers.set(0, value, self._numbers.fresh())
                self._special.setdefault(self._numbers.key(0, node), []).append(node)
            else:
                self._numbers.number(0, node)
            for value in node.outputs:
                by_readers.setdefault(self._readers(0, value), collections.deque()).append(value)
                by_name[str(value.name)] = value
        return _Graphs((mine, theirs), by_readers, by_name)

    def _is_special(self, side: int, node: ir.Node) -> bool:
        model = self._sides[side]
        return bool(walk.node_bodies(node)) or node.op_identifier() in model.model.functions or model.is_random(node)

    def _copy(self, side: int, node: ir.Node) -> bool:
        """Give numbers to the output of an operator that copies its input; whether it does."""
        if not is_copy(self._sides[side], node):
            return False
        number = self._numbers.of(side, node.inputs[0])  # type: ignore[arg-type]
        if number is not None:
            self._numbers.set(side, node.outputs[0], number)
        return True

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
            graph = each.graph
            if each.is_graph_output() and graph is not None:
                found += [("output", str(index)) for index, output in enumerate(graph.outputs) if output is each]
        return tuple(sorted(found))

    def _compare(self, pair: _Graphs) -> str:
        """Give numbers to the changed graph as far as it equals the original; why its outputs do not, or an empty text."""
        failed = self._failed - _FAILED_EACH * len(self._proofs)
        for node in pair.graphs[1]:
            if self._is_lost(failed, _FAILED):
                break
            if self._sides[1].is_constant_node(node) or all(self._has(value) for value in node.outputs):
                continue
            if self._copy(1, node):
                continue
            self._follow(node)
            if self._is_special(1, node):
                self._match(node)
            elif self._numbers.number(1, node) or self._repeats(node):
                continue
            for value in node.outputs:
                if not self._has(value) and (value.uses() or value.is_graph_output()):
                    self._try(value, pair)
        if len(pair.graphs[0].outputs) != len(pair.graphs[1].outputs):
            return f"the outputs of {pair.graphs[0].name or 'a body'!r} changed"
        for output, theirs in zip(pair.graphs[0].outputs, pair.graphs[1].outputs, strict=True):
            mine = self._source(output) or output
            if not self._is_equal(mine, theirs):
                return self._became(mine, theirs)
        return ""

    def _repeats(self, node: ir.Node) -> bool:
        """Give a node of the changed graph the numbers of one before it that does the same with the same values, which have
        no numbers of their own: the sizes of one value are asked for twice. Whether there is one.
        """
        key = (node.op_identifier(), *node.inputs)
        before = self._alike.setdefault(key, node)
        if before is node or not all(self._has(value) for value in before.outputs if value.name):
            return False
        version = self._sides[1].constants.version(node)
        if not same_attributes(before, node, version) or len(before.outputs) != len(node.outputs):
            return False
        for one, two in zip(before.outputs, node.outputs, strict=True):
            number = self._numbers.of(1, one)
            if number is not None:
                self._numbers.set(1, two, number)
        return True

    def _is_lost(self, failed: int, most: int) -> bool:
        """Whether more guesses have failed than `most`, and some for each that was proved. failed: those that do not count."""
        is_searched = self._claims is None and not self._is_given_up
        return is_searched and self._failed - _FAILED_EACH * len(self._proofs) - failed > most

    def _has(self, value: ir.Value) -> bool:
        return self._numbers.of(1, value) is not None

    def _follow(self, node: ir.Node) -> None:
        """Prove what a node reads that a claimed fold made equal to a value above it: nothing but what it reads is left of it."""
        twin = self._twins.get(node)
        if self._claims is None or twin is None or self._claims.holds(twin):
            return
        for index, (mine, theirs) in enumerate(zip(map(self._source, twin.inputs), node.inputs, strict=False)):
            if mine is None or theirs is None or not self._claims.leaves(mine) or not self._has(theirs):
                continue
            if self._is_equal(mine, theirs):
                self._numbers.read(node, index, self._numbers.of(0, mine))  # type: ignore[arg-type]

    def _is_equal(self, mine: ir.Value, theirs: ir.Value) -> bool:
        """Whether two outputs are equal. What leaves nothing but what it reads has no value to be tried before."""
        is_known = (mine, theirs) in self._equal or self._sides[0].constants.has(mine)
        if not is_known and self._has(theirs) and self._is_open(mine):
            self._prove(mine, theirs, is_sure=True)
        number = self._numbers.of(0, mine)
        return (mine, theirs) in self._equal or (number is not None and number == self._numbers.of(1, theirs))

    def _became(self, mine: ir.Value, theirs: ir.Value) -> str:
        """Tell the first difference that was found, or that of two outputs."""
        seen = (region.output for region, _ in self._tried.values() if not self._has(region.output[1]))
        pair = next(seen, (mine, theirs))
        made = [value.producer() for value in pair]
        names = [
            f"{printable(str(value.name))} ({'input' if node is None else node.op_type})"
            for value, node in zip(pair, made, strict=True)
        ]
        return f"{names[0]} became {names[1]}" if names[0] != names[1] else f"{names[0]} is computed in another way"

    def _match(self, node: ir.Node) -> None:
        """Give its numbers to a node with bodies, a call, or a random node, if the original has its counterpart."""
        key = self._numbers.key(1, node)
        for mine in self._special.get(key, ()) if key is not None else ():
            if self._taken.setdefault(mine, node) is node and self._same_bodies(mine, node):
                for one, two in zip(mine.outputs, node.outputs, strict=False):
                    self._numbers.set(1, two, self._numbers.of(0, one))  # type: ignore[arg-type]
                return

    def _same_bodies(self, mine: ir.Node, theirs: ir.Node) -> bool:
        """Whether the bodies of two nodes, or the functions that they call, do the same."""
        first, second = (side.model.functions.get(mine.op_identifier()) for side in self._sides)
        if first is not None or second is not None:
            return first is not None and second is not None and self._same_function(first, second)
        bodies = _paired_bodies(mine, theirs)
        return bodies is not None and all(self._same_graph(("body", one, two), one, two) for one, two in bodies)

    def _same_function(self, mine: ir.Function, theirs: ir.Function) -> bool:
        if opsets(mine) != opsets(theirs) or set(mine.attributes) != set(theirs.attributes):
            return False
        if not all(same_attribute(attribute, theirs.attributes[name]) for name, attribute in mine.attributes.items()):
            return False
        return self._same_graph(("function", mine.identifier()), mine.graph, theirs.graph)

    def _same_graph(self, key: Hashable, mine: ir.Graph, theirs: ir.Graph) -> bool:
        if key not in self._functions:
            fits = len(mine.inputs) == len(theirs.inputs)
            self._functions[key] = self._pair(mine, theirs) if fits else None
        pair = self._functions[key]
        return pair is not None and not self._compare(pair)

    def _try(self, theirs: ir.Value, pair: _Graphs) -> None:
        """Look for the value of the original that a value equals. One that is proved gets its number."""
        if self._is_given_up:
            return
        sure, others = self._candidates(theirs, pair)
        for mine in (*sure, *others):
            if self._prove(mine, theirs, is_sure=mine in sure):
                self._numbers.prove(theirs, self._numbers.of(0, mine))  # type: ignore[arg-type]
                return

    def _prove(self, mine: ir.Value, theirs: ir.Value, *, is_sure: bool) -> bool:
        """Whether two values are equal, by what lies between them and values that are. is_sure: claims say so."""
        last = None
        for region in self._regions(mine, theirs):
            key = (mine, theirs, *(one for one, _ in region.entering))
            if key not in self._tried:
                proof = self._prover.prove(_site(region) if self._claims is None else self._claims.name(region), region)
                if (
                    self._claims is None
                    and proof.method == "failed"
                    and any(theirs is None for _, theirs in region.entering)
                ):
                    # What enters may depend on each other, in a way that makes them equal.
                    proof = dataclasses.replace(proof, method="not_run")
                self._tried[key] = region, proof
                self._failed += proof.method not in ("proved", "compared")
                if self._is_lost(0, _FAILED_IN_ALL):
                    raise _TooManyDifferences("in more places than are tried")
            last = last or self._tried[key]
            if self._tried[key][1].method in ("proved", "compared"):
                self._proofs.append(self._tried[key])
                self._equal.add((mine, theirs))
                return True
        if self._claims is None or last is None or not is_sure:
            return False
        self._doubtful.append(last)
        self._equal.add((mine, theirs))
        return True

    def _candidates(self, theirs: ir.Value, pair: _Graphs) -> tuple[list[ir.Value], list[ir.Value]]:
        """Return values of the original that may be equal: those that nodes of the same names read, then that of its name and
        those that are read alike.
        """
        sure = [mine for mine in dict.fromkeys(self._read_by_twins(theirs)) if self._may_equal(mine, theirs)]
        named = pair.by_name.get(str(theirs.name))
        alike = (mine for mine in self._read_alike(theirs, pair) if mine is not named)
        others = (
            mine for mine in itertools.chain([named], alike) if mine not in sure and self._may_equal(mine, theirs)
        )
        return sure[:_CANDIDATES], list(itertools.islice(others, _CANDIDATES))  # type: ignore[arg-type, return-value]

    def _read_alike(self, theirs: ir.Value, pair: _Graphs) -> Iterator[ir.Value]:
        """Yield the values of the original that are read as `theirs` is. Those at the front that are taken leave for good:
        of a thousand equal layers each would look at all before it.
        """
        alike = pair.by_readers.get(self._readers(1, theirs))
        while alike and self._is_taken(alike[0]):
            alike.popleft()
        yield from alike or ()

    def _is_taken(self, mine: ir.Value) -> bool:
        """Whether a value can never equal one that is still to be found."""
        number = self._numbers.of(0, mine)
        is_equal = number is not None and self._numbers.first(1, number) is not None
        return is_equal or (self._claims is not None and not self._claims.leaves(mine))

    def _may_equal(self, mine: ir.Value | None, theirs: ir.Value) -> bool:
        is_told = mine is not None and (self._claims is None or self._claims.leaves(mine))
        return is_told and self._is_open(mine) and _fits(mine, theirs)  # type: ignore[arg-type]

    def _read_by_twins(self, theirs: ir.Value) -> Iterator[ir.Value | None]:
        """Yield what nodes outside of claims read in the original, in the place of a value."""
        for each in self._copies(1, theirs):
            for use in each.uses():
                twin = None if is_copy(self._sides[1], use.node) else self._twins.get(use.node)
                if twin is not None and use.idx < len(twin.inputs) and not (self._claims and self._claims.holds(twin)):
                    yield self._source(twin.inputs[use.idx])
            mine = self._paired.get(each.graph) if each.is_graph_output() and each.graph is not None else None
            if mine is not None:
                outputs = zip(each.graph.outputs, mine.outputs, strict=False)  # type: ignore[union-attr]
                yield from (self._source(one) for output, one in outputs if output is each)

    def _source(self, mine: ir.Value | None) -> ir.Value | None:
        """Return what a value of the original is a copy of."""
        while mine is not None and (node := mine.producer()) is not None and is_copy(self._sides[0], node):
            if self._claims is not None and self._claims.holds(node):
                break
            mine = node.inputs[0]
        return mine

    def _is_open(self, mine: ir.Value) -> bool:
        """Whether no value of the changed model is known to equal this one."""
        number = self._numbers.of(0, mine)
        return number is not None and self._numbers.first(1, number) is None

    def _regions(self, mine: ir.Value, theirs: ir.Value) -> Iterator[Region]:
        """Yield the regions above two values: from the nearest values that are equal, then from those that one side needs."""

        def is_claimed(value: ir.Value) -> bool:
            return self._claims is None or self._claims.holds(value.producer())

        def is_new(value: ir.Value) -> bool:
            twin = self._twins.get(value.producer())  # type: ignore[arg-type]
            return self._claims is None or twin is None or self._claims.holds(twin)

        try:
            others, needed = self._cone(1, theirs, lambda value: is_new(value) and not self._has(value))
            nodes, entering = self._cone(0, mine, lambda value: is_claimed(value) and self._is_open(value))
            yield from self._region((mine, theirs), (nodes, others), (entering, needed))
            first, second = (
                {self._numbers.of(side, value) for value in cut} for side, cut in enumerate((entering, needed))
            )
            if not first <= second:
                wider, above = self._cone(
                    0, mine, lambda value: is_claimed(value) and self._numbers.of(0, value) not in second
                )
                yield from self._region((mine, theirs), (wider, others), (above, needed))
            if not second <= first:
                wider, above = self._cone(
                    1, theirs, lambda value: is_new(value) and self._numbers.of(1, value) not in first
                )
                yield from self._region((mine, theirs), (nodes, wider), (entering, above))
            if self._claims is not None and self._has(theirs):
                # A fold may round to the numbers that were there before.
                nodes, entering = self._cone(0, mine, is_claimed)
                others, needed = self._cone(1, theirs, is_new)
                yield from self._region((mine, theirs), (nodes, others), (entering, needed))
        except Mismatch:
            return

    def _cone(
        self, side: int, value: ir.Value, is_inside: Callable[[ir.Value], bool]
    ) -> tuple[list[ir.Node], list[ir.Value]]:
        most = _LARGEST if self._claims is None else _LARGEST_CLAIMED
        return cone(value, self._sides[side], _limited(is_inside, self._sides[side], most))

    def _region(
        self,
        output: tuple[ir.Value, ir.Value],
        nodes: tuple[list[ir.Node], list[ir.Node]],
        entering: tuple[list[ir.Value], list[ir.Value]],
    ) -> Iterator[Region]:
        by_number: dict[int | None, ir.Value] = {}
        for value in entering[1]:
            by_number.setdefault(self._numbers.of(1, value), value)
        if None in by_number or not nodes[0]:
            return
        pairs = [(value, by_number.get(self._numbers.of(0, value))) for value in entering[0]]
        for number in by_number.keys() - {self._numbers.of(0, value) for value in entering[0]}:
            mine = self._numbers.first(0, number)  # type: ignore[arg-type]
            if mine is None:
                return
            pairs.append((mine, by_number[number]))
        told = {number: mine for mine, _ in pairs if (number := self._numbers.of(0, mine)) is not None}
        pairs += [
            (told[number], value)  # type: ignore[index]
            for value in entering[1]
            if by_number[number := self._numbers.of(1, value)] is not value
        ]
        yield Region(output, nodes, pairs, len(self._tried))

    def _assume(self) -> bool:
        """Take the first part that is not proved for right, so that what lies below can be compared; whether there is one."""
        found = next(self._open_parts("failed"), None) or next(self._open_parts("not_run"), None)
        if found is None or not _has_map(found[0]):
            return False
        self._doubtful.append(found)
        self._accept(found[0])
        return True

    def _accept(self, region: Region) -> None:
        mine, theirs = region.output
        self._equal.add((mine, theirs))
        if not self._has(theirs):
            self._numbers.set(1, theirs, self._numbers.of(0, mine))  # type: ignore[arg-type]

    def _open_parts(self, method: str) -> Iterator[tuple[Region, SiteProof]]:
        """Yield the parts with this mark that may be folds."""
        for region, proof in self._tried.values():
            mine, theirs = region.output
            is_open = self._is_open(mine) and (not self._has(theirs) or theirs.is_graph_output())
            if proof.method != method or not is_open or (mine, theirs) in self._equal or not self._is_needed(mine):
                continue
            is_fold = method == "not_run" or (_is_likely(region) and _has_map(region))
            if is_fold and not _same_operators(region):
                yield region, proof

    def _is_needed(self, mine: ir.Value) -> bool:
        """Whether a path leads from a value of the original to an output past none that has a counterpart.

        Else what reads it is proved: a guess about the value itself says nothing.
        """
        seen, pending = {mine}, [mine]
        while pending:
            value = pending.pop()
            if value.is_graph_output():
                return True
            below = {output for use in value.uses() for output in use.node.outputs} - seen
            pending += filter(self._is_open, below)
            seen |= below
        return False

    def _claimed(self, claims: Claims, mismatch: str) -> Verification:
        """Return the verdict on claims."""
        # Where anything else differs, no fold is said to be right.
        done = [each for each in (*self._proofs, *self._doubtful) if not mismatch or each[1].method == "failed"]
        sites = tuple(claims.marks(done, self._is_open, mismatch))
        wrong, left = (
            next((f"site {proof.site}: {proof.reason}" for _, proof in done if proof.method == method), "")
            for method in ("failed", "not_run")
        )
        status: Status = "failed" if wrong or mismatch else "not_verified" if left else "passed"
        return Verification(status, wrong or mismatch or left, engine=ENGINE, sites=sites, method="local")

    def _verdict(self, mismatch: str) -> Verification:
        """Return the verdict. mismatch: why the search ended early."""
        if self._claims is not None:
            return self._claimed(self._claims, self._claims.missing or mismatch)
        proofs = [proof for _, proof in self._proofs] + self._decided(mismatch)
        failed = next((proof for proof in proofs if proof.method == "failed"), None)
        # Nobody says that a guess is right: in random directions the bound of a sum hides a small change of one weight.
        left = next((proof for proof in proofs if proof.method in ("not_run", "compared")), None)
        status, reason = "passed", ""
        if failed is not None:
            status, reason = "failed", f"the fold of {failed.site} is wrong {failed.reason}"
        elif mismatch or left is not None:
            reason = f"the graphs differ in another way than by folds: {mismatch}" if mismatch else ""
            what = "is not proved: " if left is not None and left.method == "compared" else ""
            reason = reason or f"the fold of {left.site} {what}{left.reason}"  # type: ignore[union-attr]
            status = "not_verified"
        return Verification(status, reason, engine=ENGINE, sites=tuple(proofs), method="local")  # type: ignore[arg-type]

    def _decided(self, mismatch: str) -> list[SiteProof]:
        """Return the marks of what is not proved: refuted only if nothing else on its path is open."""
        values = {region.output[0] for region, _ in self._doubtful}
        related = values if mismatch else self._related(values)
        return [
            dataclasses.replace(proof, method="not_run", reason=f"{proof.reason}; {_UNDECIDED}")
            if proof.method == "failed" and region.output[0] in related
            else proof
            for region, proof in self._doubtful
        ]

    def _related(self, values: set[ir.Value]) -> set[ir.Value]:
        """Return those above or below another one."""
        if len(values) < 2:
            return set()
        below: dict[ir.Value, set[ir.Value]] = {}
        for node in self._sides[0].order:
            above = set[ir.Value]().union(*(below.get(value, ()) for value in node.inputs if value is not None))
            for value in node.outputs:
                found = above | ({value} & values)
                if found:
                    below[value] = found
        related: set[ir.Value] = set()
        for value in values:
            others = below.get(value, set()) - {value}
            if others:
                related |= others | {value}
        return related


def _limited(is_inside: Callable[[ir.Value], bool], side: Side, most: int) -> Callable[[ir.Value], bool]:
    """Return the condition of a cone: what is inside, and what copies. It raises Mismatch when a region gets too large."""
    seen: set[ir.Value] = set()

    def check(value: ir.Value) -> bool:
        node = value.producer()
        if node is not None and is_copy(side, node):
            return True
        if not is_inside(value):
            return False
        seen.add(value)
        if len(seen) > most:
            raise Mismatch("the region is too large")
        return True

    return check


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


def _is_likely(region: Region) -> bool:
    """Whether both parts have a linear operator, or neither has: what was folded stays in its place."""
    one, two = (any(node.op_type in _LINEAR for node in nodes) for nodes in region.nodes)
    return one == two


def _has_map(region: Region) -> bool:
    """Whether the original's part has a batch norm or per-channel arithmetic."""
    return any(
        node.op_type in ("BatchNormalization", "Mul", "Div", "Add", "Sub", "Sum", "Neg") for node in region.nodes[0]
    )


def _same_operators(region: Region) -> bool:
    """Whether only constants differ: another model, not a fold."""
    one, two = (sorted(node.op_type for node in nodes if node.op_type != "Identity") for nodes in region.nodes)
    return one == two


def is_copy(side: Side, node: ir.Node) -> bool:
    """Whether the first output of an operator of the standard is its first input."""
    source = node.inputs[0] if node.inputs else None
    if node.domain != "" or source is None or side.constants.has(source):
        return False
    if any(value.name and value.uses() for value in node.outputs[1:]):
        return False
    if node.op_type == "Cast":
        return (
            "to" in node.attributes
            and source.dtype is not None
            and node.attributes["to"].as_int() == source.dtype.value
        )
    if node.op_type == "Dropout":
        return side.is_inference_dropout(node)
    return node.op_type == "Identity"


def _site(region: Region) -> str:
    """Name the batch norms of a region, or else its last node."""
    norms = [node for node in region.nodes[0] if node.op_type == "BatchNormalization"]
    return " + ".join(printable(name_of(node)) for node in norms or region.nodes[0][-1:])


def _twins(sides: tuple[Side, Side]) -> dict[ir.Node, ir.Node]:
    """Return the nodes of the original that have the names of the changed model's."""
    names: dict[tuple[str, str], tuple[list[ir.Node], list[ir.Node]]] = {}
    for index, side in enumerate(sides):
        for node in side.order:
            names.setdefault((side.scopes[node.graph], name_of(node)), ([], []))[index].append(node)  # type: ignore[index]
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
    """Pair the bodies of two nodes by the names of their attributes, which a file may hold in any order; None where they do not fit."""
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
