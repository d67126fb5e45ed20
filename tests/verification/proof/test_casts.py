"""Casts inside a fold: exact where they only widen, or round to what the values are of anyway."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper

from bnexport import verify
from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.support.claims import prove_claims
from tests.support.onnx_text import batch_norm, model
from tests.verification.proof.test_differences import array_of

BODY = """g (float[N,6,H,W] x) => (float[N,8,A,B] y) {
    z = Conv (x, w)
    y = BatchNormalization (z, p_s, p_b, p_m, p_v)
}"""
SHAPES = {"w": (8, 6, 3, 3), **batch_norm("p", 8)}


def with_casts(proto: onnx.ModelProto, dtype: int) -> onnx.ModelProto:
    """The Conv's data rounded to another type on its way."""
    wrong = copy.deepcopy(proto)
    (conv,) = [node for node in wrong.graph.node if node.op_type == "Conv"]
    conv.input[0] = "wide"
    casts = [
        onnx.helper.make_node("Cast", ["x"], ["narrow"], "narrow", to=dtype),
        onnx.helper.make_node("Cast", ["narrow"], ["wide"], "wide", to=onnx.TensorProto.FLOAT),
    ]
    nodes = [*casts, *wrong.graph.node]
    del wrong.graph.node[:]
    wrong.graph.node.extend(nodes)
    return wrong


def test_a_cast_that_rounds_is_not_proved() -> None:
    source = model(BODY, SHAPES)
    result = fold(source, verify=False)
    report = result.report
    folded = to_proto(result.model)
    for dtype, proved in ((onnx.TensorProto.DOUBLE, True), (onnx.TensorProto.FLOAT16, False)):
        wrong = with_casts(folded, dtype)
        for verdict in (prove_claims(source, wrong, report), verify(source, wrong, method="local")):
            assert verdict.passed == proved, (dtype, verdict)
            assert ("proved" in {proof.method for proof in verdict.sites}) == proved


def test_of_two_casts_none_is_lost() -> None:
    """What is rounded in between is no candidate for what is not, though both are read by a Cast."""
    body = BODY.replace("y = Batch", "n = Batch").rstrip("}")
    rounded = f"{body} h = Cast <to = 10> (n) f = Cast <to = 1> (h) y = Relu (f) }}"
    source, wrong = (
        model(text, SHAPES) for text in (rounded, rounded.replace("h = Cast <to = 10> (n)", "h = Cast <to = 1> (n)"))
    )
    assert verify(source, wrong, method="local").status == "not_verified"
    result = fold(source, verify="local")
    assert result.report.verification is not None
    assert (len(result.report.folded), result.report.verification.status) == (1, "passed")


def test_a_half_model_computed_in_single() -> None:
    """As ONNX Runtime writes it: wide weights, and the values rounded to the model's type behind them."""
    text = BODY.replace("float[", "float16[")
    source = model(text, SHAPES, dtype="float16")
    scale, bias, mean, var, weight = (
        array_of(source, f"{name}").astype(np.float32) for name in ("p_s", "p_b", "p_m", "p_v", "w")
    )
    factor = scale / np.sqrt(var + np.float32(1e-5))
    wide = {"w": weight * factor[:, None, None, None], "b": bias - mean * factor}
    body = """g (float16[N,6,H,W] x) => (float16[N,8,A,B] y) {
        i = Cast <to = 1> (x)
        z = Conv (i, w, b)
        y = Cast <to = 10> (z)
    }"""
    other = model(body, values=wide)
    verdict = verify(source, other, method="local")
    assert (verdict.status, [proof.method for proof in verdict.sites]) == ("passed", ["proved"]), verdict
    other.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(wide["w"] * np.float32(1.01), "w"))
    assert verify(source, other, method="local").status == "failed"


def test_channels_that_do_not_fit_are_no_proof() -> None:
    """A batch of one would make BatchNormalization's channels broadcast; the declared sizes are taken instead."""
    body = """g (float[8,6] x) => (float[8,8] y) {
        t = MatMul (x, w)
        z = Transpose <perm=[1,0]> (t)
        y = BatchNormalization (z, p_s, p_b, p_m, p_v)
    }"""
    source = model(body, {"w": (6, 8), **batch_norm("p", 8)})
    other = model(
        "g (float[8,6] x) => (float[8,8] y) { t = MatMul (x, w)\n y = Transpose <perm=[1,0]> (t) }", {"w": (6, 8)}
    )
    verdict = verify(source, other, method="local")
    assert verdict.status == "failed"
    assert "shape" not in verdict.reason
