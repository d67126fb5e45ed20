"""A folded file proves its folds with the original alone, by the certificate that the fold wrote into it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from bnexport import verify
from bnexport.folding import FoldReport, fold
from bnexport.model_io import load, to_bytes, to_proto
from bnexport.model_io.read import from_proto
from bnexport.verification.certificate import KEY, Certificate, decode
from tests.support.onnx_text import batch_norm, model

BODY = """g (float[N,6,H,W] x) => (float[N,8,A,B] y) {
    z = Conv (x, w)
    n = BatchNormalization (z, p_s, p_b, p_m, p_v)
    r = Relu (n)
    t = Conv (r, v)
    y = BatchNormalization (t, q_s, q_b, q_m, q_v)
}"""
SHAPES = {"w": (8, 6, 3, 3), "v": (8, 8, 1, 1), **batch_norm("p", 8), **batch_norm("q", 8)}
NOTHING = "g (float[N,4] x) => (float[N,4] y) { y = Relu (x) }"
# A function that holds the batch norm of a convolution outside.
CALLED = """g (float[N,6,H,W] x) => (float[N,8,A,B] y) {{ z = Conv (x, w)  y = own.Norm (z, p_s, p_b, p_m, p_v) }}
    <opset_import: ["": 17], domain: "own"> Norm (x, s, b, m, v) => (y) {{ y = {operator} (x, s, b, m, v) }}"""


def source(body: str = BODY, **options: str) -> onnx.ModelProto:
    return model(body, SHAPES, **options)


def certificate_of(proto: onnx.ModelProto) -> Certificate | None:
    texts = [entry.value for entry in proto.metadata_props if entry.key == KEY]
    return decode(*texts) if texts else None


def folded(proto: onnx.ModelProto, **options: object) -> tuple[onnx.ModelProto, FoldReport]:
    result = fold(proto, verify=False, **options)  # type: ignore[arg-type]
    return to_proto(result.model), result.report


def test_the_sites_of_the_report() -> None:
    result, report = folded(source())
    made = certificate_of(result)
    assert made is not None
    assert report.certificate
    assert [(site.nodes, site.rules, set(site.claim.nodes)) for site in made.sites] == [
        (site.nodes, site.rules, set(site.region)) for site in report.sites
    ]


def test_verify_proves_with_nothing_else_at_hand(tmp_path: Path) -> None:
    onnx.save(source(), tmp_path / "original.onnx")
    fold(tmp_path / "original.onnx", tmp_path / "folded.onnx", verify=False)
    verdict = verify(tmp_path / "original.onnx", tmp_path / "folded.onnx", method="local")
    assert (verdict.status, verdict.certificate) == ("passed", "used")
    assert [proof.method for proof in verdict.sites] == ["proved", "proved"]
    assert [proof.site for proof in verdict.sites] == ["BatchNormalization -> n", "BatchNormalization -> y"]
    both = verify(tmp_path / "original.onnx", tmp_path / "folded.onnx")
    assert (both.method, both.certificate, both.to_dict()["certificate"]) == ("both", "used", "used")
    whole = verify(tmp_path / "original.onnx", tmp_path / "folded.onnx", method="whole")
    assert (whole.status, whole.certificate) == ("passed", "")


def test_without_a_certificate_the_folds_are_found() -> None:
    result, report = folded(source(), certificate=False)
    assert certificate_of(result) is None
    assert not report.certificate
    verdict = verify(source(), result, method="local")
    assert (verdict.status, verdict.certificate, len(verdict.sites)) == ("passed", "", 2)


@pytest.mark.parametrize("header", ['<ir_version: 8, opset_import: ["": 17, "mmcv": 1, "own": 1]>'])
@pytest.mark.parametrize("operator", ["BatchNormalization", "mmcv.MMCVSyncBatchNorm <training_mode=0>"])
def test_functions_that_were_inlined(operator: str, header: str) -> None:
    """What the fold did first is done again: inlining, and the conversion of sync batch norm."""
    order = "s, b, m, v" if operator == "BatchNormalization" else "m, v, s, b"
    body = CALLED.format(operator=operator).replace(f"{operator} (x, s, b, m, v)", f"{operator} (x, {order})")
    if operator != "BatchNormalization":
        body = body.replace('["": 17]', '["": 17, "mmcv": 1]')
    proto = source(body, header=header)
    result, report = folded(proto)
    made = certificate_of(result)
    assert made is not None
    assert (made.inlined, report.inlined) == (True, True)
    verdict = verify(proto, result, method="local")
    assert (verdict.status, verdict.certificate) == ("passed", "used")
    assert [proof.method for proof in verdict.sites] == ["proved"]
    assert verdict.reference == ("original" if operator == "BatchNormalization" else "converted")


def test_an_unchanged_copy_gets_none() -> None:
    result, report = folded(model(NOTHING))
    assert not report.certificate
    assert list(result.metadata_props) == []


def test_other_metadata_stays() -> None:
    proto = source()
    proto.metadata_props.add(key="author", value="them")
    for wanted in (True, False):
        result, _ = folded(proto, certificate=wanted)
        assert result.metadata_props[0] == proto.metadata_props[0]
        assert len(result.metadata_props) == 1 + wanted


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    onnx.save(source(), tmp_path / "original.onnx")
    written = []
    for name in ("one.onnx", "two.onnx"):
        fold(tmp_path / "original.onnx", tmp_path / name, verify=False)
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]
    assert KEY.encode() in written[0]


class TestFoldedAgain:
    """The certificate of the first fold is about another original."""

    def test_it_is_replaced(self) -> None:
        first, _ = folded(source(), only=["BatchNormalization -> n"])
        second, report = folded(first)
        assert [len(made.sites) for made in map(certificate_of, (first, second)) if made] == [1, 1]
        assert certificate_of(first) != certificate_of(second)
        assert [note for note in report.notes if "earlier fold" in note]
        assert verify(first, second, method="local").certificate == "used"
        # It tells of one fold of two: the search proves both.
        verdict = verify(source(), second, method="local")
        assert verdict.passed
        assert verdict.certificate.startswith("not used")
        assert [proof.method for proof in verdict.sites] == ["proved", "proved"]

    def test_it_is_removed(self) -> None:
        first, _ = folded(source())
        for again in (first, folded(source(), only=["BatchNormalization -> n"])[0]):
            second, report = folded(again, certificate=False)
            assert certificate_of(second) is None
            assert [note for note in report.notes if "earlier fold" in note]

    def test_a_copy_keeps_it(self) -> None:
        first, _ = folded(source())
        second, report = folded(first)
        assert second == first
        assert report.notes == ()
        assert verify(source(), second, method="local").certificate == "used"


def test_training_that_became_inference_has_none() -> None:
    """No proof makes the two equal."""
    proto = source(BODY.replace("BatchNormalization (z", "BatchNormalization <training_mode=1> (z"))
    result, report = folded(proto, training_to_inference=True)
    assert certificate_of(result) is None
    assert "training became inference" in report.uncertified


def test_the_file_loads_as_before(tmp_path: Path) -> None:
    fold(source(), tmp_path / "folded.onnx", verify=False)
    onnx.checker.check_model(str(tmp_path / "folded.onnx"), full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "folded.onnx", providers=["CPUExecutionProvider"])
    assert decode(session.get_modelmeta().custom_metadata_map[KEY]).sites
    again = from_proto(onnx.ModelProto.FromString(to_bytes(load(tmp_path / "folded.onnx"))))
    assert decode(again.metadata_props[KEY]).sites


def test_a_fold_that_keeps_the_bits_of_the_weights() -> None:
    """1 / sqrt(1 + 1e-5) rounds to 1 in float16, as in every batch norm that was just made."""
    ones = {f"p_{name}": np.full(8, value, np.float16) for name, value in (("s", 1), ("b", 0), ("m", 0), ("v", 1))}
    weight = np.random.default_rng(0).standard_normal((8, 6, 3, 3)).astype(np.float16)
    body = """g (float16[N,6,H,W] x) => (float16[N,8,A,B] y) {
        z = Conv (x, w)
        y = BatchNormalization (z, p_s, p_b, p_m, p_v)
    }"""
    original = model(body, values={"w": weight, **ones})
    result = fold(original)
    verdict = result.report.verification
    assert verdict is not None and verdict.passed, verdict
    assert [proof.method for proof in verdict.sites] == ["proved"]
    assert verify(original, result.model, method="local").certificate == "used"
    ones["p_s"] = np.full(8, 1.02, np.float16)
    wrong = result.model
    assert not verify(model(body, values={"w": weight, **ones}), wrong, method="local").passed
