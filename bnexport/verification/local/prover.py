"""Prove one region: as a chain where it is one, else by its affine forms."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from bnexport.errors import BnexportError, UnsupportedModelError
from bnexport.graph.evaluate import Misfit
from bnexport.model_io.validate import printable
from bnexport.verification.local import chains, evaluation, sizes
from bnexport.verification.local.chains import NotAChain, OtherShape, Proof, Violation
from bnexport.verification.local.constants import ROUNDING
from bnexport.verification.local.forms import TooLarge
from bnexport.verification.local.layouts import Layouts
from bnexport.verification.local.regions import Region, Side, is_training, name_of
from bnexport.verification.local.relation import NotRelated
from bnexport.verification.verdict import SiteProof

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
            return SiteProof(name, "failed" if is_seen else "not_run", reason=f"{_where(region)}: {error}")
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
        return SiteProof(name, "compared", proof.error, proof.bound, reason)

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
            return _doubted(evaluated(name, region))
        if layouts.differ or depends:
            return self._everywhere(name, region)
        return self._at_small_sizes(name, region)

    def _at_small_sizes(self, name: str, region: Region) -> SiteProof:
        """Evaluate at the smallest sizes that fit. Raises Violation."""
        reason: Exception | str | None = None
        wanted = 2 if sizes.depends_on_sizes(region) else 1
        marks: list[SiteProof] = []
        differs = unrelated = False
        for chosen in sizes.candidates(region, self._sides[0], self._shapes):
            declared = sizes.keeps_declared(chosen, region, self._shapes)
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
        if sizes.depends_on_sizes(region):
            self._check_ones(name, region)
        return functools.reduce(worse, marks)

    def _screen(self, region: Region, chosen: list[tuple[int, ...]]) -> None:
        """Raise Violation or NotRelated where a guess fails in one direction already: most guesses do."""
        if self._claimed:
            return
        try:
            evaluation.evaluate(region, self._sides, chosen, directions=1, unchanged=False)
        except NotRelated:
            raise
        except BnexportError:
            return

    def _everywhere(self, name: str, region: Region) -> SiteProof:
        """Evaluate at each size that may matter. Raises Violation, or what cannot be run."""
        tried = sizes.residues(region, self._sides, self._shapes)
        if not tried:
            raise UnsupportedModelError(
                "the two parts move over their data in different ways, at too many sizes to try"
            )
        self._screen(region, tried[0])
        marks = self._shrunk(name, region) if sizes.total(tried[0]) > sizes.MOST_VARIABLES else []
        reason: Misfit | None = None
        for chosen in () if marks else tried:
            try:
                marks.append(self._at(name, region, chosen))
            except Misfit as error:  # of the original, which does not run at these sizes
                reason = error
        if not marks and reason is not None:
            raise reason
        if sizes.depends_on_sizes(region):
            self._check_ones(name, region)
        return functools.reduce(worse, marks)

    def _shrunk(self, name: str, region: Region) -> list[SiteProof]:
        """Prove at sizes below the declared ones, which are too many variables. Empty where that is not possible."""
        tried = sizes.residues(region, self._sides, self._shapes, shrink=True)
        try:
            marks = [self._at(name, region, chosen) for chosen in tried]
        except (Violation, NotRelated, BnexportError):
            return []
        return marks if all(mark.method == "proved" for mark in marks) else []

    def _check_ones(self, name: str, region: Region) -> None:
        """Compare where sizes that may be anything are 1: such axes are squeezed and broadcast. Raises Violation."""
        for several in sizes.ones(region, self._sides[0], self._shapes):
            for chosen in several:
                try:
                    self._at(name, region, chosen)
                except BnexportError:
                    continue
                except Violation:
                    if sizes.keeps_declared(chosen, region, self._shapes):
                        raise
                    continue
                break

    def _at(self, name: str, region: Region, chosen: list[tuple[int, ...]]) -> SiteProof:
        """Evaluate at these sizes, in directions where variables are too many. Raises Violation, or what cannot be run."""
        try:
            if sizes.total(chosen) <= sizes.MOST_VARIABLES:
                with contextlib.suppress(TooLarge):
                    return self._mark(name, region, self._equal(region, chosen, None))
            return _compared(name, self._equal(region, chosen, evaluation.DIRECTIONS), chosen)
        except Misfit as error:
            if self._original_runs(region, chosen):
                raise Violation(f"the original can be evaluated, the folded model cannot: {error}") from error
            raise

    def _equal(self, region: Region, chosen: list[tuple[int, ...]], directions: int | None) -> Proof:
        """Compare the region, first with numbers that are the original's as exact ones.

        They may have been changed all the same, by less than rounding shows.
        """
        try:
            return evaluation.evaluate(region, self._sides, chosen, directions=directions)
        except (Violation, NotRelated) as error:
            with contextlib.suppress(Violation, NotRelated):
                return evaluation.evaluate(region, self._sides, chosen, directions=directions, unchanged=False)
            raise error

    def _original_runs(self, region: Region, chosen: list[tuple[int, ...]]) -> bool:
        """Whether the original's region equals itself when it is evaluated."""
        entering = [(value, value) for value, _ in region.entering]
        same = Region((region.output[0],) * 2, (region.nodes[0], region.nodes[0]), list(entering), region.number)
        try:
            evaluation.evaluate(same, (self._sides[0], self._sides[0]), chosen)
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


def _doubted(proof: SiteProof) -> SiteProof:
    """Return the mark of a region that was evaluated at sizes beside which others may matter."""
    reason = "it depends on sizes that the graph computes: compared at small ones"
    return dataclasses.replace(proof, method="compared", reason=reason) if proof.method == "proved" else proof


def _compared(name: str, proof: Proof, chosen: Sequence[tuple[int, ...]]) -> SiteProof:
    elements = sizes.total(chosen)
    reason = (
        f"{elements:,} elements enter, too many for a variable each; compared in {evaluation.DIRECTIONS} directions"
    )
    return SiteProof(name, "compared", proof.error, proof.bound, reason)
