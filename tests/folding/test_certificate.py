"""A folded file proves its folds with the original alone, by the certificate that the fold wrote into it."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime
import pytest

from bnexport import verify
from bnexport.folding import FoldReport, fold
from bnexport.model_io import load, to_bytes, to_proto
from bnexport.model_io.read import from_proto
from bnexport.verification.certificate import KEY, Certificate, decode
from tests.support.onnx_text import batch_norm, model

SOURCE = model(
    "g (float[N,6,H,W] x) => (float[N,8,A,B] y) { z = Conv (x, w:8.6.3.3) n = Norm (z, p:8) r = Relu (n) "
    "t = Conv (r, v:8.8.1.1) y = Norm (t, q:8) }"
)
FIRST = "BatchNormalization -> n"
# A function that holds the batch norm of a convolution outside.
CALLED = """g (float[N,6,H,W] x) => (float[N,8,A,B] y) {{ z = Conv (x, w)  y = own.Norm (z, p_s, p_b, p_m, p_v) }}
    <opset_import: ["": 17, "mmcv": 1], domain: "own"> Norm (x, s, b, m, v) => (y) {{ y = {operator} }}"""


def certificate_of(proto: onnx.ModelProto) -> Certificate | None:
    texts = [entry.value for entry in proto.metadata_props if entry.key == KEY]
    return decode(*texts) if texts else None


def folded(proto: onnx.ModelProto, **options: object) -> tuple[onnx.ModelProto, FoldReport]:
    result = fold(proto, verify=False, **options)  # type: ignore[arg-type]
    return to_proto(result.model), result.report


def local(source: onnx.ModelProto, candidate: onnx.ModelProto) -> tuple[str, str, list[str]]:
    verdict = verify(source, candidate, method="local")
    return verdict.status, verdict.certificate, [proof.method for proof in verdict.sites]


def test_verify_proves_with_nothing_else_at_hand(tmp_path: Path) -> None:
    onnx.save(SOURCE, tmp_path / "original.onnx")
    for name in ("one.onnx", "two.onnx"):
        report = fold(tmp_path / "original.onnx", tmp_path / name, verify=False).report
    # Equal inputs give equal bytes, which load as before.
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()
    onnx.checker.check_model(str(tmp_path / "one.onnx"), full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "one.onnx", providers=["CPUExecutionProvider"])
    again = from_proto(onnx.ModelProto.FromString(to_bytes(load(tmp_path / "one.onnx"))))
    for text in (session.get_modelmeta().custom_metadata_map[KEY], again.metadata_props[KEY]):
        made = [(site.nodes, site.rules, set(site.claim.nodes)) for site in decode(text).sites]
        assert made == [(site.nodes, site.rules, set(site.region)) for site in report.sites]
    both, whole = (verify(tmp_path / "original.onnx", tmp_path / "one.onnx", method=way) for way in ("both", "whole"))
    assert (both.method, both.certificate, both.to_dict()["certificate"]) == ("both", "used", "used")
    assert [proof.site for proof in both.sites] == [FIRST, "BatchNormalization -> y"]
    assert [proof.method for proof in both.sites] == ["proved", "proved"]
    assert (whole.status, whole.certificate) == ("passed", "")


def test_without_a_certificate_the_folds_are_found() -> None:
    result, report = folded(SOURCE, certificate=False)
    assert (certificate_of(result), bool(report.certificate)) == (None, False)
    assert local(SOURCE, result) == ("passed", "", ["proved", "proved"])


@pytest.mark.parametrize(
    ("operator", "reference"),
    [
        ("BatchNormalization (x, s, b, m, v)", "original"),
        ("mmcv.MMCVSyncBatchNorm <training_mode=0> (x, m, v, s, b)", "converted"),
    ],
)
def test_functions_that_were_inlined(operator: str, reference: str) -> None:
    """What the fold did first is done again: inlining, and the conversion of sync batch norm."""
    header = '<ir_version: 8, opset_import: ["": 17, "mmcv": 1, "own": 1]>'
    proto = model(CALLED.format(operator=operator), {"w": (8, 6, 3, 3), **batch_norm("p", 8)}, header=header)
    result, report = folded(proto)
    assert certificate_of(result).inlined and report.inlined
    assert local(proto, result) == ("passed", "used", ["proved"])
    assert verify(proto, result, method="local").reference == reference


def test_other_metadata_stays_and_an_unchanged_copy_gets_none() -> None:
    result, report = folded(model("g (float[N,4] x) => (float[N,4] y) { y = Relu (x) }"))
    assert (bool(report.certificate), list(result.metadata_props)) == (False, [])
    proto = onnx.ModelProto.FromString(SOURCE.SerializeToString())
    proto.metadata_props.add(key="author", value="them")
    for wanted in (True, False):
        result, _ = folded(proto, certificate=wanted)
        assert (result.metadata_props[0], len(result.metadata_props)) == (proto.metadata_props[0], 1 + wanted)


def test_the_certificate_of_an_earlier_fold() -> None:
    """It is about another original: replaced, or removed where the fold writes none; a copy keeps it."""
    first, everything = folded(SOURCE, only=[FIRST])[0], folded(SOURCE)[0]
    second, report = folded(first)
    assert [len(certificate_of(each).sites) for each in (first, second)] == [1, 1]
    assert certificate_of(first) != certificate_of(second)
    assert [note for note in report.notes if "earlier fold" in note]
    assert local(first, second)[1] == "used"
    # It tells of one fold of two: the search proves both.
    status, certificate, proofs = local(SOURCE, second)
    assert (status, certificate[:8], proofs) == ("passed", "not used", ["proved", "proved"])
    for again in (first, everything):
        bare, report = folded(again, certificate=False)
        assert certificate_of(bare) is None
        assert [note for note in report.notes if "earlier fold" in note]
    copy, report = folded(everything)
    assert (copy, report.notes) == (everything, ())
    assert local(SOURCE, copy)[1] == "used"


def test_training_that_became_inference_has_none() -> None:
    """No proof makes the two equal."""
    proto = onnx.ModelProto.FromString(SOURCE.SerializeToString())
    proto.graph.node[1].attribute.append(onnx.helper.make_attribute("training_mode", 1))
    result, report = folded(proto, training_to_inference=True)
    assert certificate_of(result) is None
    assert "training became inference" in report.uncertified
