"""The verdict of the local proof: pair the models, prove each region, give one mark a site."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from bnexport.errors import BnexportError
from bnexport.model_io.collection import paused_collection
from bnexport.model_io.validate import printable
from bnexport.verification.local.pairing import Mismatch, Pairing
from bnexport.verification.local.prover import Prover, worse
from bnexport.verification.local.regions import Region, Side, name_of
from bnexport.verification.verdict import Claim, SiteProof, Verification

ENGINE = "local proof in float64"
# Characters of a name out of a report that a message repeats.
_SHOWN = 200


@paused_collection()
def prove(original: ir.Model, folded: ir.Model, claims: Sequence[Claim]) -> Verification:
    """Prove that `folded` computes what `original` does, for every input, up to the rounding of its weights.

    Both models are only read. "passed": everything outside the claims is the same, and each region is proved or, as its
    mark says, compared. "failed": something differs. "not_verified": a region could not be evaluated.
    """
    try:
        return _Check(original, folded, claims).run()
    except BnexportError as error:
        return Verification("not_verified", str(error), engine=ENGINE, method="local")


class _Check:
    def __init__(self, original: ir.Model, folded: ir.Model, claims: Sequence[Claim]) -> None:
        self._sides = Side(original), Side(folded)
        self._claims = claims
        self._prover = Prover(self._sides)
        # The claims of each node of the original.
        self._owners: dict[ir.Node, list[int]] = {}

    def run(self) -> Verification:
        missing = self._find_nodes()
        if missing:
            return self._verdict([], missing)
        pairing = Pairing(*self._sides, self._numbers())
        mismatch = ""
        try:
            pairing.run()
        except Mismatch as difference:
            mismatch = str(difference)
        return self._verdict(
            [(region, self._prover.prove(self._name(region), region)) for region in pairing.regions], mismatch
        )

    def _find_nodes(self) -> str:
        """Fills `_owners`; which claim names a node that is not there."""
        named: dict[tuple[str, str], list[ir.Node]] = {}
        original = self._sides[0]
        for graph, scope in original.scopes.items():
            for node in graph:
                named.setdefault((scope, printable(name_of(node))), []).append(node)
        for index, claim in enumerate(self._claims):
            for name in claim.nodes:
                nodes = named.get((claim.scope, printable(name)))
                if nodes is None:
                    site, text, scope = (printable(each)[:_SHOWN] for each in (claim.site, name, claim.scope))
                    return f"the report's site {site} names {text!r}, which is no node of the original's {scope}"
                for node in filter(original.order.__contains__, nodes):
                    self._owners.setdefault(node, []).append(index)
        return ""

    def _numbers(self) -> dict[ir.Node, int]:
        """Assign a number to the region of each claimed node; claims that share a node share a region."""
        parents = list(range(len(self._claims)))

        def root(index: int) -> int:
            while parents[index] != index:
                parents[index] = parents[parents[index]]
                index = parents[index]
            return index

        for owners in self._owners.values():
            for other in owners[1:]:
                parents[root(other)] = root(owners[0])
        return {node: root(owners[0]) for node, owners in self._owners.items()}

    def _name(self, region: Region) -> str:
        return ", ".join(self._claims[index].site for index in self._sites_of(region))

    def _sites_of(self, region: Region) -> Iterable[int]:
        return dict.fromkeys(index for node in region.nodes[0] for index in self._owners.get(node, ()))

    def _verdict(self, done: list[tuple[Region, SiteProof]], mismatch: str) -> Verification:
        marks: dict[int, SiteProof] = {}
        for region, proof in done:
            for index in self._sites_of(region):
                own = dataclasses.replace(proof, site=self._claims[index].site)
                marks[index] = own if index not in marks else worse(marks[index], own)
        rest = SiteProof("", "not_run", reason=mismatch or "nothing that an output needs")
        proofs = tuple(
            marks.get(index, dataclasses.replace(rest, site=claim.site)) for index, claim in enumerate(self._claims)
        )
        failed = next((proof for _, proof in done if proof.method == "failed"), None)
        left = next((proof for _, proof in done if proof.method == "not_run"), None)
        status, reason = "passed", ""
        if failed is not None:
            status, reason = "failed", f"site {failed.site}: {failed.reason}"
        elif mismatch:
            status, reason = "failed", mismatch
        elif left is not None:
            status, reason = "not_verified", f"site {left.site}: {left.reason}"
        return Verification(status, reason, engine=ENGINE, sites=proofs, method="local")  # type: ignore[arg-type]
