"""Find the folds between two models without a report, and prove each.

Values are paired from the outputs upwards, by what computes them: names only tell which cut to try first. Where the same
operator with the same constants makes both values, its inputs are paired. Elsewhere both models are followed upwards
through per-channel arithmetic, operators that move elements, and one linear operator; the part between two cuts is a
region if it can be proved, or else the likeliest one is refuted. What differs in another way is no fold, and nothing
is said about it.

A region that is refuted shows that two values differ. A later region may make up for it only if it differs as well;
so of refuted regions on one path none is called wrong, whole models decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

import numpy as np
import onnx_ir as ir

from bnexport.errors import BnexportError
from bnexport.model_io.collection import paused_collection
from bnexport.model_io.validate import printable
from bnexport.verification.local import attributes
from bnexport.verification.local.check import ENGINE
from bnexport.verification.local.pairing import SIZES, Mismatch, Pairing
from bnexport.verification.local.parameters import ROUNDINGS
from bnexport.verification.local.prover import Prover
from bnexport.verification.local.regions import Region, Side, is_training, name_of
from bnexport.verification.verdict import SiteProof, Verification

_LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_PASSED = (
    *("BatchNormalization", "Add", "Sub", "Mul", "Div", "Neg", "Identity", "Dropout", "Pad", "Cast"),
    *("Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze"),
)
# Nodes of one path; a fold has a few.
_LONGEST = 16
_UNDECIDED = "other parts differ, too, and may make up for it"
_BETTER = ("proved", "compared", "failed", "not_run")


@paused_collection()
def prove_differences(original: ir.Model, changed: ir.Model) -> Verification:
    """Find where `changed` folds batch norms or per-channel arithmetic of `original`, and prove each fold.

    Both models are only read. "passed": everything else is the same and each fold is proved; `sites` is empty where the
    graphs are the same. "failed": a fold is wrong. "not_verified": the graphs differ in another way, or a region could not
    be evaluated. A fold may have been computed in the type of its weights (`parameters.ROUNDINGS`).
    """
    try:
        sides = Side(original, ROUNDINGS), Side(changed)
        search = _DifferencePairing(sides, Prover(sides))
        try:
            search.run()
        except Mismatch as difference:
            reason = f"the graphs differ in another way than by folds: {difference}"
            return search.verdict(reason)
        return search.verdict("")
    except BnexportError as error:
        return Verification("not_verified", str(error), engine=ENGINE, method="local")


@dataclasses.dataclass(frozen=True)
class _Path:
    """The nodes above a value, nearest first, and the value before each of them. linear: nodes up to the linear one."""

    cuts: tuple[ir.Value, ...]
    nodes: tuple[ir.Node, ...]
    linear: int | None


class _DifferencePairing(Pairing):
    """Pairs of values that have to be equal, and the regions between them."""

    def __init__(self, sides: tuple[Side, Side], prover: Prover) -> None:
        super().__init__(*sides, {})
        self._prover = prover
        self._proofs: list[tuple[Region, SiteProof]] = []

    def _match_names(self) -> None:
        """Match nothing: pairs do not rest on names here."""

    def _unread(self) -> None:
        """Pass over what a tool leaves behind: it is of no effect."""

    def verdict(self, mismatch: str) -> Verification:
        """Return the verdict. mismatch: where the search ended."""
        proofs = self._decided(mismatch)
        failed = next((proof for proof in proofs if proof.method == "failed"), None)
        left = next((proof for proof in proofs if proof.method == "not_run"), None)
        status, reason = "passed", ""
        if failed is not None:
            status, reason = "failed", f"the fold of {failed.site} is wrong {failed.reason}"
        elif mismatch or left is not None:
            reason = mismatch or f"the fold of {left.site} {left.reason}"  # type: ignore[union-attr]
            status = "not_verified"
        return Verification(status, reason, engine=ENGINE, sites=tuple(proofs), method="local")  # type: ignore[arg-type]

    def _decided(self, mismatch: str) -> list[SiteProof]:
        """Return the marks. A refuted region is not decided where another one that is not proved lies above or below it,
        or the search ended early."""
        refuted = {region.output[0] for region, proof in self._proofs if proof.method == "failed"}
        doubtful = {region.output[0] for region, proof in self._proofs if proof.method in ("failed", "not_run")}
        related = refuted if mismatch else refuted & self._related(doubtful)
        return [
            dataclasses.replace(proof, method="not_run", reason=f"{proof.reason}; {_UNDECIDED}")
            if region.output[0] in related
            else proof
            for region, proof in self._proofs
        ]

    def _related(self, values: set[ir.Value]) -> set[ir.Value]:
        """Return those above or below another one."""
        if len(values) < 2:
            return set()
        below: dict[ir.Value, set[ir.Value]] = {}
        for node in self.original.order:
            above = set[ir.Value]().union(*(below.get(value, ()) for value in _operands(node)))
            for value in node.outputs:
                mine = above | ({value} & values)
                if mine:
                    below[value] = mine
        related: set[ir.Value] = set()
        for value in values:
            others = below.get(value, set()) - {value}
            if others:
                related |= others | {value}
        return related

    def _value(self, mine: ir.Value, theirs: ir.Value) -> None:
        mine, theirs = _behind_copies(self.original, mine), _behind_copies(self.folded, theirs)
        if self._given.get(theirs) is mine:
            return
        constant = self.original.constants.has(mine), self.folded.constants.has(theirs)
        if constant[0] and constant[1]:
            if not self._same_constant(mine, theirs):
                raise Mismatch(f"the constant {mine.name!r} changed")
            return
        node, other = mine.producer(), theirs.producer()
        if node is not None and other is not None and self._alike(mine, theirs, node, other):
            self._node(node, other)
            return
        self._differ(mine, theirs)

    def _alike(self, mine: ir.Value, theirs: ir.Value, node: ir.Node, other: ir.Node) -> bool:
        """Whether the same operator with the same attributes and constants makes both."""
        if node.op_identifier() != other.op_identifier() or mine.index() != theirs.index():
            return False
        if self.attributes(node, other):
            return False
        inputs = _operands(node), _operands(other)
        if len(inputs[0]) != len(inputs[1]) or _missing(node) != _missing(other):
            return False
        for one, two in zip(*inputs, strict=True):
            constant = self.original.constants.has(one), self.folded.constants.has(two)
            if constant[0] != constant[1] or (constant[0] and not self._same_constant(one, two)):
                return False
        return True

    def attributes(self, mine: ir.Node, theirs: ir.Node, ignored: Collection[str] = ()) -> str:
        """Compare as `Pairing.attributes` does, but an absent attribute is equal to its default."""
        version = self.original.constants.version(mine)
        absent = {
            name
            for side, node in ((self.original, mine), (self.folded, theirs))
            for name, attribute in node.attributes.items()
            if (name in mine.attributes) != (name in theirs.attributes)
            and attributes.is_default(
                node, attribute, version, kernel=_kernel(side, node), trains=is_training(node, version)
            )
        }
        return super().attributes(mine, theirs, {*ignored, *absent})

    def _same_numbers(self, mine: ir.Value, theirs: ir.Value, one: np.ndarray, two: np.ndarray) -> bool:
        """Whether both are equal, or equal within what an engine's arithmetic may have rounded."""
        if super()._same_numbers(mine, theirs, one, two):
            return True
        errors = [
            error
            for error in (self.original.constants.error(mine), self.folded.constants.error(theirs))
            if error is not None
        ]
        return bool(errors) and bool((np.abs(one - two) <= sum(errors)).all())

    def _differ(self, mine: ir.Value, theirs: ir.Value) -> None:
        """Choose the region above two values, and go on before it. Raises Mismatch."""
        best: tuple[Region, SiteProof] | None = None
        for region in self._regions(mine, theirs):
            proof = self._prover.prove(_site(region), region)
            if proof.method == "failed" and not _is_likely(region):
                continue
            if best is None or _BETTER.index(proof.method) < min(2, _BETTER.index(best[1].method)):
                best = region, proof
            if proof.method == "proved":
                break
        if best is None:
            node, other = mine.producer(), theirs.producer()
            names = [
                f"{printable(str(each.name))} ({'input' if maker is None else maker.op_type})"
                for each, maker in ((mine, node), (theirs, other))
            ]
            raise Mismatch(f"{names[0]} became {names[1]}", node)
        if best[1].method == "failed" and _same_operators(best[0]):
            raise Mismatch(f"{best[1].reason}, and nothing was folded there")
        self._proofs.append(best)
        for one, two in best[0].entering:
            if two is not None:
                self._push(one, two)

    def _regions(self, mine: ir.Value, theirs: ir.Value) -> Iterator[Region]:
        """Yield what may be the region above two values, the likeliest first."""
        first, second = _path(self.original, mine), _path(self.folded, theirs)
        ends = (len(first.nodes), len(second.nodes))
        cuts: dict[tuple[int, int], None] = {}
        if first.linear is not None and second.linear is not None:
            cuts[first.linear, second.linear] = None
        elif first.linear is None and second.linear is None:
            cuts[ends] = None
        for total in range(1, sum(ends) + 1):
            for one in range(max(0, total - ends[1]), min(total, ends[0]) + 1):
                if first.cuts[one].name == second.cuts[total - one].name:
                    cuts[one, total - one] = None
        others = [first.linear, ends[0]], [second.linear, ends[1]]
        cuts.update(((i, j), None) for i in others[0] for j in others[1] if i is not None and j is not None)
        for one, two in cuts:
            region = self._between(first, second, one, two) if one else None
            if region is not None:
                yield region

    def _between(self, first: _Path, second: _Path, one: int, two: int) -> Region | None:
        inside = {*first.nodes[:one]}, {*second.nodes[:two]}
        try:
            nodes, entering = self._cone(first.cuts[0], self.original, inside[0].__contains__)
            others, needed = self._cone(second.cuts[0], self.folded, inside[1].__contains__)
        except Mismatch:
            return None
        if [*entering] != [first.cuts[one]] or [*needed] != [second.cuts[two]]:
            return None
        pair = first.cuts[one], second.cuts[two]
        return Region((first.cuts[0], second.cuts[0]), (nodes, others), [pair], len(self._proofs))


def _is_likely(region: Region) -> bool:
    """Whether both parts have a linear operator, or neither has: what was folded stays in its place."""
    one, two = (any(node.op_type in _LINEAR for node in nodes) for nodes in region.nodes)
    return one == two


def _same_operators(region: Region) -> bool:
    """Whether only constants differ: another model, not a fold."""
    one, two = (sorted(node.op_type for node in nodes) for nodes in region.nodes)
    return one == two


def _path(side: Side, value: ir.Value) -> _Path:
    """Follow a value upwards through operators with one value, and at most one linear operator."""
    cuts, nodes, linear = [value], list[ir.Node](), None
    while len(nodes) < _LONGEST:
        node = value.producer()
        if node is None or node.graph is not cuts[0].graph or node.domain != "" or value is not node.outputs[0]:
            break
        is_linear = node.op_type in _LINEAR
        data = [operand for index, operand in side.data(node) if index not in SIZES.get(node.op_type, ())]
        if len(data) != 1 or (is_linear and linear is not None) or not (is_linear or node.op_type in _PASSED):
            break
        nodes.append(node)
        linear = len(nodes) if is_linear else linear
        value = data[0]
        cuts.append(value)
    while linear is not None and linear < len(nodes) and nodes[linear].op_type == "Cast":
        linear += 1  # the operator computes in another type than its data has
    return _Path(tuple(cuts), tuple(nodes), linear)


def _behind_copies(side: Side, value: ir.Value) -> ir.Value:
    """Return what the Identity operators above a value copy."""
    while (node := value.producer()) is not None and node.domain == "" and node.graph is value.graph:
        source = node.inputs[0] if node.inputs else None
        if source is None or not _is_copy(side, node, value, source):
            break
        value = source
    return value


def _is_copy(side: Side, node: ir.Node, value: ir.Value, source: ir.Value) -> bool:
    if value is not node.outputs[0]:
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


def _kernel(side: Side, node: ir.Node) -> tuple[int, ...] | None:
    """Return the spatial sizes of a stored weight."""
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    leaf = None if weight is None else side.constants.leaf(weight)
    return None if leaf is None else tuple(leaf.shape.numpy()[2:])


def _operands(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None and value.name]


def _missing(node: ir.Node) -> list[int]:
    """Return the places of absent inputs in front of others."""
    present = [index for index, value in enumerate(node.inputs) if value is not None and value.name]
    return sorted({*range(present[-1] + 1 if present else 0)} - {*present})


def _site(region: Region) -> str:
    """Name the batch norms of a region, or else its last node."""
    norms = [node for node in region.nodes[0] if node.op_type == "BatchNormalization"]
    return " + ".join(printable(name_of(node)) for node in norms or region.nodes[0][-1:])
