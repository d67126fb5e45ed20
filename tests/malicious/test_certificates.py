"""Forged certificates: a hint at most. The verdict is that of the search without one, and never rests on their word."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from bnexport import verify
from bnexport.errors import UnsafeModelError
from bnexport.folding import fold
from bnexport.model_io import from_proto, to_proto
from bnexport.verification import api
from bnexport.verification.api import Pair
from bnexport.verification.certificate import KEY
from bnexport.verification.verdict import Verification
from tests.support.claims import outcome
from tests.support.onnx_text import array_of, model, with_arrays
from tests.support.work import counted
from tests.verification.test_certificate import REFUSED

# Few channels: regions that are far too large are evaluated, too.
BODY = """g (float[N,2,H,W] x) => (float[N,3,A,B] y) {
    a = Conv <pads=[1,1,1,1]> (x, u:2.2.3.3) r = Relu (a) z = Conv (r, w:3.2.3.3) n = Norm (z, p:3) s = Sigmoid (n)
    y = Conv (s, v:3.3.1.1) }"""
# As certificates name them: by the operator and its first output.
NAMES = ["Conv -> a", "Relu -> r", "Conv -> z", "BatchNormalization -> n", "Sigmoid -> s", "Conv -> y"]
CONV, NORM = NAMES[2:4]
PLAIN = {"rules": ["conv"], "nodes": [NORM], "with": [CONV]}


def changed(proto: onnx.ModelProto, name: str, by: float = 1e-3) -> onnx.ModelProto:
    """One number of one initializer."""
    array = array_of(proto, name)
    array.flat[0] += np.float32(by)
    return with_arrays(proto, {name: array})


def text_of(*sites: dict[str, Any], **fields: Any) -> str:
    return json.dumps({"version": 1, "sites": sites, **fields})


def region(*names: str, **fields: Any) -> dict[str, Any]:
    return {"rules": ["conv"], "nodes": [NORM], "with": list(names), **fields}


# Each is about no fold, or about more or less than the one there is. What cannot be read is in
# tests/verification/test_certificate.py.
FORGED = {
    **{reason: texts[0] for reason, texts in REFUSED.items()},
    "no such node": text_of(region("no such node")),
    "an escape": text_of(region("\x1b]0;owned\x07")),
    "a long name": text_of(region("x" * 1_000_000)),
    "another graph": text_of(region(CONV, graph="function f")),
    "no graph": text_of(region(CONV, graph="")),
    "inlined here": text_of({**PLAIN, "with": []}, inlined=True),
    "too small": text_of(region()),
    "another node": text_of({**PLAIN, "nodes": [CONV], "with": []}),
    "too large below": text_of(region(*NAMES[2:])),
    "too large above": text_of(region(*NAMES[:3])),
    "the whole network": text_of(region(*NAMES)),
    "everything, site by site": text_of(*({"rules": [], "nodes": [name]} for name in NAMES)),
    "overlapping": text_of(*({"rules": [], "nodes": NAMES[i : i + 3]} for i in range(4))),
    "one site often": text_of(*[PLAIN] * 1000),
}


def with_certificate(proto: onnx.ModelProto, text: str) -> onnx.ModelProto:
    made = copy.deepcopy(proto)
    del made.metadata_props[:]
    made.metadata_props.add(key=KEY, value=text)
    return made


@pytest.fixture(scope="module")
def source() -> onnx.ModelProto:
    return model(BODY)


@pytest.fixture(scope="module")
def result(source: onnx.ModelProto) -> onnx.ModelProto:
    return to_proto(fold(source, verify=False, certificate=False).model)


def local(source: onnx.ModelProto, candidate: onnx.ModelProto) -> Verification:
    return verify(source, candidate, method="local")


@pytest.mark.parametrize("name", FORGED)
def test_the_verdict_is_that_without_a_forgery(source: onnx.ModelProto, result: onnx.ModelProto, name: str) -> None:
    """Of a right fold, a wrong one, a copy of the original, and another model."""
    verdict = local(source, with_certificate(result, FORGED[name]))
    status, marks = outcome(verdict)
    assert (status, set(marks)) == ("passed", {"proved"})
    if verdict.certificate != "used":
        assert marks == ["proved"] and verdict.certificate.startswith("not used: ")
        assert len(verdict.certificate) < 1000 and verdict.certificate.isprintable()
    wrong = changed(result, "v")
    verdict, without = local(source, with_certificate(wrong, FORGED[name])), local(source, wrong)
    assert verdict.certificate.startswith("not used: ") and not verdict.passed
    assert (verdict.reason, outcome(verdict)) == (without.reason, outcome(without))
    copied = with_certificate(source, FORGED[name])
    assert outcome(local(source, copied)) == ("passed", [])
    other = with_certificate(model("g (float[N,4] x) => (float[N,4] y) { y = Relu (x) }"), FORGED[name])
    assert not local(source, other).passed and not local(other, copied).passed


@pytest.mark.parametrize("tensor", ["u", "w", "v", "Conv -> z.bias"])
def test_no_forgery_proves_a_wrong_fold(source: onnx.ModelProto, result: onnx.ModelProto, tensor: str) -> None:
    """Before the search is asked."""
    wrong = result if tensor == "w" else changed(result, tensor)
    original = changed(source, "w") if tensor == "w" else source
    for name, text in FORGED.items():
        claimed = api.prove_certified(Pair(from_proto(original), from_proto(with_certificate(wrong, text))))
        assert claimed is not None
        assert not claimed.passed, name


def test_the_certificate_of_the_original_is_not_read(source: onnx.ModelProto, result: onnx.ModelProto) -> None:
    assert local(with_certificate(source, text_of(PLAIN)), result).certificate == ""


def test_training_is_never_taken_from_it() -> None:
    """A training batch norm that became inference is refuted, with and without the certificate of an honest fold."""
    trains = model(BODY.replace("Norm (z", "Norm <training_mode=1> (z"))
    wrong = to_proto(fold(trains, verify=False, training_to_inference=True).model)
    verdict, without = local(trains, with_certificate(wrong, text_of(PLAIN))), local(trains, wrong)
    assert verdict.status == without.status != "passed"


def test_a_region_of_two_folds_is_proved_as_one() -> None:
    """A certificate may name a region that is larger than it has to be."""
    proto = model("""g (float[N,64,H,W] x) => (float[N,64,A,B] y) {
        a = Conv (x, u:64.64.3.3) n = Norm (a, p:64) z = Conv (n, w:64.64.3.3) y = Norm (z, p) }""")
    made = to_proto(fold(proto, verify=False).model)
    nodes = ["BatchNormalization -> n", "BatchNormalization -> y"]
    text = text_of({"rules": ["conv"], "nodes": nodes, "with": ["Conv -> a", "Conv -> z"]})
    verdict = local(proto, with_certificate(made, text))
    assert (verdict.certificate, outcome(verdict)) == ("used", ("passed", ["proved"]))
    assert not local(proto, with_certificate(changed(made, "u", 0.01), text)).passed


def test_regions_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of regions that share nodes is one, whatever each of them has."""
    nodes = " ".join(f"v{i + 1} = Neg (v{i})" for i in range(2000))
    proto = model(f"g (float[N,4] v0) => (float[N,4] y) {{ {nodes} y = Norm (v2000, p:4) }}")
    names = [*(f"Neg -> v{i + 1}" for i in range(2000)), "BatchNormalization -> y"]
    other = copy.deepcopy(proto)
    other.graph.node[-1].name = "another"
    for sites in (
        [{"rules": [], "nodes": names}],
        [{"rules": [], "nodes": [names[i], names[i + 1]]} for i in range(2000)],
    ):
        work, verdict = counted(lambda sites=sites: local(proto, with_certificate(other, text_of(*sites))))
        assert verdict.passed
        assert verdict.certificate == "not used: a region has 2,001 nodes, the limit is 512"
        assert work < 2_000_000


@pytest.mark.parametrize("name", ["u", "w", "p_s", "p_v", "v"])
def test_another_source(source: onnx.ModelProto, result: onnx.ModelProto, name: str) -> None:
    assert not local(changed(source, name), with_certificate(result, text_of(PLAIN))).passed


def test_many_sites_take_no_time(source: onnx.ModelProto, result: onnx.ModelProto) -> None:
    wrong = with_certificate(changed(result, "v"), text_of(*[{"rules": [], "nodes": [NORM]}] * 100_000))
    work, verdict = counted(lambda: local(source, wrong))
    assert not verdict.passed
    assert work < 1_000_000


def test_a_hundred_megabytes(source: onnx.ModelProto, result: onnx.ModelProto, tmp_path: Path) -> None:
    """In memory a note; the door refuses a file of so much structure, as it does without a certificate's name."""
    huge = with_certificate(result, "[" + "[]," * 33_000_000 + "[]]")
    work, verdict = counted(lambda: local(source, from_proto(huge)))
    assert outcome(verdict) == ("passed", ["proved"])
    assert verdict.certificate == "not used: it has 99,000,004 characters, the limit is 4,194,304"
    assert work < 1_000_000
    onnx.save(huge, tmp_path / "huge.onnx")
    with pytest.raises(UnsafeModelError, match="structure"):
        verify(source, tmp_path / "huge.onnx", method="local")
