"""The certificate in a folded file: the sites of the fold, as JSON in the model's metadata.

    {"version":1,"sites":[{"rules":["conv"],"nodes":["bn1"],"with":["conv1"]}]}

nodes: names of the original's nodes that are gone; with: the other nodes whose values may differ. "graph" is there where
the site is not in the main graph, "inlined" where calls were inlined before the fold.

A certificate is a hint: it says where a proof has to look, and nothing about the result. A reader takes it for
hostile.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir

from bnexport.errors import MalformedModelError
from bnexport.graph.nodes import label
from bnexport.verification.verdict import Claim

KEY = "bnexport.sites"
VERSION = 1
MAIN = "main graph"
# Characters of a certificate: some 40,000 sites. Hostile JSON takes 25 bytes of memory for each.
LARGEST = 1 << 22
# Nodes of the original in one region, with all sites that share a node: what a proof may take is bounded by it.
LARGEST_REGION = 512
# Digits of a number; versions are the only ones.
_DIGITS = 9

# A graph, and the name of a node in it.
_Key = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class CertifiedSite:
    """One fold. nodes, others: names of the original's nodes, see above. graph: as reports name it."""

    nodes: tuple[str, ...]
    others: tuple[str, ...] = ()
    graph: str = MAIN
    rules: tuple[str, ...] = ()

    @property
    def claim(self) -> Claim:
        """The claims to prove."""
        return Claim(" + ".join(self.nodes), self.graph, (*self.nodes, *self.others))


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The folds of one model. inlined: calls of the original were replaced by their functions' bodies first."""

    sites: tuple[CertifiedSite, ...]
    inlined: bool = False

    def encode(self) -> str:
        """Return the JSON: ASCII, the same for equal certificates."""
        sites = [
            {
                **({} if site.graph == MAIN else {"graph": site.graph}),
                "rules": site.rules,
                "nodes": site.nodes,
                **({"with": sorted(site.others)} if site.others else {}),
            }
            for site in self.sites
        ]
        inlined = {"inlined": True} if self.inlined else {}
        return json.dumps({"version": VERSION, **inlined, "sites": sites}, separators=(",", ":"))


def decode(text: str) -> Certificate:
    """Read a certificate. Raises MalformedModelError, whose message quotes nothing of it."""
    if len(text) > LARGEST:
        raise MalformedModelError(f"it has {len(text):,} characters, the limit is {LARGEST:,}")
    try:
        data = json.loads(
            text, object_pairs_hook=_object, parse_int=_integer, parse_float=_no_number, parse_constant=_no_number
        )
    except (ValueError, RecursionError) as error:
        reason = str(error) if type(error) is ValueError else type(error).__name__
        raise MalformedModelError(f"it is no JSON of a certificate: {reason}") from error
    version = data.get("version") if type(data) is dict else None
    if type(version) is not int or version != VERSION:
        raise MalformedModelError(f"its version is not {VERSION}, the only one that is known here")
    fields = _fields(data, "it", {"version", "sites"}, {"inlined"})
    inlined = fields.get("inlined", False)
    if type(inlined) is not bool:
        raise MalformedModelError("its field 'inlined' is neither true nor false")
    sites = fields["sites"]
    if type(sites) is not list or not sites:
        raise MalformedModelError("its field 'sites' is no list with a site in it")
    return Certificate(tuple(map(_site, sites)), inlined)


def changes(certificate: Certificate, original: ir.Model, folded: ir.Model) -> list[CertifiedSite]:
    """Return the sites whose nodes are not all in the folded model, which therefore tell of a change.

    original: with its calls inlined and its sync batch norms converted. Raises MalformedModelError where a site names a
    node that is not there, or a region is too large.
    """
    counts = collections.Counter(_keys(original))
    left = set(_keys(folded))
    parents: dict[_Key, _Key] = {}

    def root(key: _Key) -> _Key:
        while (parent := parents.setdefault(key, key)) != key:
            parents[key] = key = parents.setdefault(parent, parent)
        return key

    found = []
    for number, site in enumerate(certificate.sites):
        keys = [(site.graph, name) for name in site.claim.nodes]
        if not all(key in counts for key in keys):
            raise MalformedModelError(f"its site {number} names a node that the original does not have")
        for key in keys:
            parents[root(key)] = root(keys[0])
        if not left.issuperset(keys[: len(site.nodes)]):
            found.append(site)
    sizes: collections.Counter[_Key] = collections.Counter()
    for key in list(parents):
        sizes[root(key)] += counts[key]
    if max(sizes.values(), default=0) > LARGEST_REGION:
        raise MalformedModelError(f"a region has {max(sizes.values()):,} nodes, the limit is {LARGEST_REGION}")
    return found


def _keys(model: ir.Model) -> Iterator[_Key]:
    """Yield the graph and the name of each node, as reports write them."""
    functions = ((f"function {each.name}", each.graph) for each in model.functions.values())
    for scope, graph in ((MAIN, model.graph), *functions):
        for node in graph.all_nodes():
            yield scope, label(node)


def _site(data: Any) -> CertifiedSite:
    fields = _fields(data, "a site", {"rules", "nodes"}, {"with", "graph"})
    graph = fields.get("graph", MAIN)
    nodes = _names(fields, "nodes")
    if type(graph) is not str or not nodes:
        raise MalformedModelError("a site has no node, or a graph that is no name")
    return CertifiedSite(nodes, _names(fields, "with"), graph, _names(fields, "rules"))


def _names(fields: dict[str, Any], key: str) -> tuple[str, ...]:
    names = fields.get(key, [])
    if type(names) is not list or any(type(name) is not str for name in names):
        raise MalformedModelError(f"the field {key!r} of a site is no list of names")
    return tuple(names)


def _fields(data: Any, what: str, needed: set[str], others: set[str]) -> dict[str, Any]:
    if type(data) is not dict:
        raise MalformedModelError(f"{what} is no object")
    if not needed <= data.keys() <= needed | others:
        raise MalformedModelError(f"{what} lacks a field, or has one that is not known")
    return data


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key is there twice")
    return made


def _integer(text: str) -> int:
    return int(text) if len(text) <= _DIGITS else _no_number(text)


def _no_number(text: str) -> int:
    raise ValueError("it has a number that no certificate has")
