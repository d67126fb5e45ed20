"""What a report or a certificate tells of: which nodes of the original belong to one fold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir

from bnexport.model_io.validate import printable
from bnexport.verification.local.prover import worse
from bnexport.verification.local.regions import Region, Side, name_of
from bnexport.verification.verdict import Claim, SiteProof

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
