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


# What is refused by each reason. Each is "not used" by a verification, which tests/malicious/test_certificates.py shows of some.
REFUSED = {
    "no JSON": ["", "\x00", "\ud800", TEXT[:-1], TEXT + TEXT],
    "RecursionError": ["[" * 100_000, '{"version":1,"sites":' * 100_000],
    "number": ["1" * 100_000, *(changed(version=number) for number in (1.0, 1e999)), changed(sites=float("nan"))],
    "version": ["null", "[]", '{"sites":[]}', *(changed(version=each) for each in (0, 2, "1", True)),
        changed(version=2, anything=[])],
    "lacks": ['{"version":1}', changed(more=1), changed(sites=[{}])],
    "not known": [changed(training=True), site(training=True), site(method="proved")],
    "inlined": [changed(inlined=1), changed(inlined="true")],
    "sites": [changed(sites=each) for each in ([], {}, "bn")],
    "no object": [changed(sites=[["bn"]]), changed(sites=["bn"])],
    "no node": [site(nodes=[])],
    "'nodes'": [site(nodes=each) for each in ("bn", [1], [None], [["bn"]])],
    "'rules'": [site(rules=None)],
    "no name": [site(graph=None), site(graph=["main graph"])],
    "twice": [TEXT.replace('"rules"', '"nodes":["x"],"rules"'), TEXT.replace('"sites"', '"version":1,"sites"')],
}  # fmt: skip


@pytest.mark.parametrize(("reason", "place"), [(key, place) for key in REFUSED for place in range(len(REFUSED[key]))])
def test_what_is_refused(reason: str, place: int) -> None:
    with pytest.raises(MalformedModelError, match=reason):
        decode(REFUSED[reason][place])


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


def gone(*sites: CertifiedSite, left: str = NET) -> list[CertifiedSite]:
    """Sites are compared with the two models, by names alone."""
    return changes(Certificate(sites), ir.from_onnx_text(NET), ir.from_onnx_text(left))


def test_what_is_gone() -> None:
    first, stays = CertifiedSite(("Neg -> c",), ("Abs -> y",)), CertifiedSite(("Neg -> a",), ("Neg -> c",))
    inside = CertifiedSite(("Neg -> y",), (), "function Pair")
    assert gone(first, stays, inside, left=NET.replace("c = Neg (b)  y = Abs (c)", "y = Abs (b)")) == [first]
    assert gone(first, stays, inside) == []
    assert gone(inside, left=NET.replace("y = Neg (a) }", "y = Abs (a) }")) == [inside]


OTHERS = {
    "node": CertifiedSite(("Neg -> z",)),
    "other": CertifiedSite(("Neg -> a",), ("",)),
    "graph of the node": CertifiedSite(("Neg -> c",), (), "function Pair"),
    "graph": CertifiedSite(("Neg -> c",), (), "main"),
    "long": CertifiedSite(("x" * 100_000,)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_original_does_not_have(name: str) -> None:
    with pytest.raises(MalformedModelError, match="its site 1 names a node that the original does not have"):
        gone(CertifiedSite(("Neg -> a",)), OTHERS[name])


def test_regions_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites that share a node are one region."""
    chain = [("Neg -> a", "Pair -> b"), ("Neg -> c", "Abs -> y"), ("Pair -> b", "Neg -> c")]
    sites = [CertifiedSite(names[:1], names[1:]) for names in chain]
    monkeypatch.setattr(certificate, "LARGEST_REGION", 4)
    assert gone(*sites) == []
    monkeypatch.setattr(certificate, "LARGEST_REGION", 3)
    with pytest.raises(MalformedModelError, match="a region has 4 nodes, the limit is 3"):
        gone(*sites)
    # Nodes of one name count each.
    model = ir.from_onnx_text(NET)
    for node in model.graph:
        node.name = "same"
    with pytest.raises(MalformedModelError, match="a region has 4 nodes"):
        changes(Certificate((CertifiedSite(("same",)),)), model, model)
