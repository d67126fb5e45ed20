"""The certificate as text: what is written is read, the same bytes for the same folds, and nothing else is read."""

from __future__ import annotations

import json
import tracemalloc

import onnx_ir as ir
import pytest

from bnexport.errors import MalformedModelError
from bnexport.verification import certificate
from bnexport.verification.certificate import Certificate, CertifiedSite, changes, decode

SITE = CertifiedSite(("bn",), ("conv",), rules=("conv",))
SITES = (SITE, CertifiedSite(("größe", "b\x07"), (), "function f", ("pooling", "conv")))
TEXT = '{"version":1,"sites":[{"rules":["conv"],"nodes":["bn"],"with":["conv"]}]}'

NET = """<ir_version: 8, opset_import: ["": 17, "own": 1]>
    net (float[N] x) => (float[N] y) { a = Neg (x)  b = own.Pair (a)  c = Neg (b)  y = Abs (c) }
    <opset_import: ["": 17], domain: "own"> Pair (x) => (y) { a = Neg (x)  y = Neg (a) }"""


def test_the_form() -> None:
    assert Certificate((SITE,)).encode() == TEXT


@pytest.mark.parametrize("inlined", [False, True])
@pytest.mark.parametrize("sites", [SITES[:1], SITES], ids=len)
def test_what_is_written_is_read(sites: tuple[CertifiedSite, ...], inlined: bool) -> None:
    made = Certificate(sites, inlined)
    assert made.encode().isascii()
    assert decode(made.encode()) == made


def test_the_rest_of_a_region_has_no_order() -> None:
    one, two = (Certificate((CertifiedSite(("n",), others),)).encode() for others in (("a", "b"), ("b", "a")))
    assert one == two


def changed(**fields: object) -> str:
    return json.dumps({**json.loads(TEXT), **fields})


def site(**fields: object) -> str:
    return changed(sites=[{**json.loads(TEXT)["sites"][0], **fields}])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no JSON"),
        ("null", "version"),
        ("[]", "version"),
        ("\x00", "no JSON"),
        ("\ud800", "no JSON"),
        (TEXT[:-1], "no JSON"),
        (TEXT + TEXT, "no JSON"),
        ("[" * 100_000, "RecursionError"),
        ('{"version":1,"sites":' * 100_000, "RecursionError"),
        ("1" * 100_000, "number"),
        (changed(version=0), "version"),
        (changed(version=2, anything=[]), "version"),
        (changed(version="1"), "version"),
        (changed(version=True), "version"),
        (changed(version=1.0), "number"),
        (changed(version=1e999), "number"),
        (changed(sites=float("nan")), "number"),
        ('{"sites":[]}', "version"),
        ('{"version":1}', "lacks"),
        (changed(more=1), "lacks"),
        (changed(training=True), "not known"),
        (changed(inlined=1), "inlined"),
        (changed(inlined="true"), "inlined"),
        (changed(sites=[]), "sites"),
        (changed(sites={}), "sites"),
        (changed(sites="bn"), "sites"),
        (changed(sites=[["bn"]]), "no object"),
        (changed(sites=[{}]), "lacks"),
        (site(nodes=[]), "no node"),
        (site(nodes="bn"), "'nodes'"),
        (site(nodes=[1]), "'nodes'"),
        (site(nodes=[None]), "'nodes'"),
        (site(nodes=[["bn"]]), "'nodes'"),
        (site(rules=None), "'rules'"),
        (site(graph=None), "no name"),
        (site(graph=["main graph"]), "no name"),
        (site(training=True), "not known"),
        (TEXT.replace('"rules"', '"nodes":["x"],"rules"'), "twice"),
        (TEXT.replace('"sites"', '"version":1,"sites"'), "twice"),
    ],
    ids=range(39),
)
def test_what_is_refused(text: str, reason: str) -> None:
    with pytest.raises(MalformedModelError, match=reason):
        decode(text)


def test_a_site_may_lack_its_rest() -> None:
    assert decode(site(graph="function f")).sites[0].graph == "function f"
    assert decode(TEXT.replace(',"with":["conv"]', "")).sites[0].claim.nodes == ("bn",)


def test_what_is_too_long_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", pytest.fail)
    with pytest.raises(MalformedModelError, match="120,000,004 characters"):
        decode("[" + "[]," * 40_000_000 + "[]]")


def test_json_takes_a_hundred_megabytes_at_most() -> None:
    """A sixteenth of the longest text, as its memory is watched."""
    text = "[" + "{}," * (certificate.LARGEST // 48 - 1) + "{}]"
    tracemalloc.start()
    with pytest.raises(MalformedModelError):
        decode(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 16 * peak < 1 << 27


class TestChanges:
    """Sites are compared with the two models, by names alone."""

    @staticmethod
    def of(*sites: CertifiedSite, left: str = NET) -> list[CertifiedSite]:
        return changes(Certificate(sites), ir.from_onnx_text(NET), ir.from_onnx_text(left))

    def test_what_is_gone(self) -> None:
        gone = CertifiedSite(("Neg -> c",), ("Abs -> y",))
        stays = CertifiedSite(("Neg -> a",), ("Neg -> c",))
        inside = CertifiedSite(("Neg -> y",), (), "function Pair")
        left = NET.replace("c = Neg (b)  y = Abs (c)", "y = Abs (b)")
        assert self.of(gone, stays, inside, left=left) == [gone]
        assert self.of(gone, stays, inside) == []
        assert self.of(inside, left=NET.replace("y = Neg (a) }", "y = Abs (a) }")) == [inside]

    @pytest.mark.parametrize(
        "other",
        [
            CertifiedSite(("Neg -> z",)),
            CertifiedSite(("Neg -> a",), ("",)),
            CertifiedSite(("Neg -> c",), (), "function Pair"),
            CertifiedSite(("Neg -> c",), (), "main"),
            CertifiedSite(("x" * 100_000,)),
        ],
        ids=["node", "other", "graph of the node", "graph", "long"],
    )
    def test_what_the_original_does_not_have(self, other: CertifiedSite) -> None:
        with pytest.raises(MalformedModelError, match="its site 1 names a node that the original does not have"):
            self.of(CertifiedSite(("Neg -> a",)), other)

    @pytest.mark.parametrize("most", [3, 4])
    def test_regions_that_are_too_large(self, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        """Sites that share a node are one region."""
        monkeypatch.setattr(certificate, "LARGEST_REGION", most)
        chain = [("Neg -> a", "Pair -> b"), ("Neg -> c", "Abs -> y"), ("Pair -> b", "Neg -> c")]
        sites = [CertifiedSite(names[:1], names[1:]) for names in chain]
        if most == 4:
            assert self.of(*sites) == []
        else:
            with pytest.raises(MalformedModelError, match="a region has 4 nodes, the limit is 3"):
                self.of(*sites)

    def test_nodes_of_one_name_count_each(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(certificate, "LARGEST_REGION", 1)
        model = ir.from_onnx_text(NET)
        for node in model.graph:
            node.name = "same"
        with pytest.raises(MalformedModelError, match="a region has 4 nodes"):
            changes(Certificate((CertifiedSite(("same",)),)), model, model)
