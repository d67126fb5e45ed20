"""Operators that onnx.reference gets wrong, and those in their place, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.reference
import pytest

from bnexport.graph.evaluate import ANSWERED
from bnexport.graph.onnx_reference import MENDED, MendedEvaluator
from bnexport.runtime.engine import Serialised, open_as_written
from tests.support.onnx_text import batch_norm, model

ALONG = "g (float[3,4,5] x) => (float[3,4,5] y) {{ y = {} {} (x) }}"
FUNCTION = """<ir_version: 8, opset_import: ["": 11, "f": 1]>
    g (float[3,4,5] x) => (float[3,4,5] y) { y = f.soft (x) }
    <domain: "f", opset_import: ["": 11]> soft (a) => (b) { b = Softmax (a) }"""
NORM = "g (float[3,4,5] x) => (float[3,4,5] y) {{ y = BatchNormalization {} (x, p_s, p_b, p_m, p_v) }}"
# What onnx 1.23 gets wrong: operator, opset, attributes. tests/forms/evaluated.py compares the others of ours.
WRONG = [
    *((name, opset, "") for name in ("Softmax", "LogSoftmax", "Hardmax") for opset in (7, 11, 12)),
    *((name, 11, "<axis = 0>") for name in ("Softmax", "LogSoftmax", "Hardmax")),
    *(("BatchNormalization", opset, "") for opset in (9, 11, 13)),
    ("GlobalMaxPool", 17, ""),
]
RIGHT = [
    *((name, 13, axis) for name in ("Softmax", "LogSoftmax", "Hardmax") for axis in ("", "<axis = 1>")),
    *((name, 11, "<axis = -1>") for name in ("Softmax", "LogSoftmax", "Hardmax")),
    *(("BatchNormalization", opset, "<epsilon = 0.1>") for opset in (7, 14, 17)),
]
X = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)


def example(name: str, opset: int, attributes: str) -> onnx.ModelProto:
    if name == "BatchNormalization":
        return model(NORM.format(attributes), batch_norm("p", 4), opset=opset)
    return model(ALONG.format(name, attributes), opset=opset)


def in_onnxruntime(proto: onnx.ModelProto) -> np.ndarray:
    return open_as_written(Serialised(proto.SerializeToString())).run({"x": X}, ["y"])[0]


@pytest.mark.parametrize(("name", "opset", "attributes"), [*WRONG, *RIGHT])
def test_ours_are_right(name: str, opset: int, attributes: str) -> None:
    proto = example(name, opset, attributes)
    np.testing.assert_allclose(MendedEvaluator(proto).run(None, {"x": X})[0], in_onnxruntime(proto), atol=2e-6)


@pytest.mark.parametrize(("name", "opset", "attributes"), WRONG)
def test_onnx_has_not_mended_them(name: str, opset: int, attributes: str) -> None:
    proto = example(name, opset, attributes)
    got = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": X})[0]
    right = in_onnxruntime(proto)
    assert got.shape != right.shape or np.abs(got - right).max() > 1e-2, (
        f"onnx has mended {name}: take it out of MENDED"
    )


def test_functions_and_subgraphs_have_them() -> None:
    proto = onnx.parser.parse_model(FUNCTION)
    np.testing.assert_allclose(MendedEvaluator(proto).run(None, {"x": X})[0], in_onnxruntime(proto), atol=1e-6)
    wrong = {name for name, _, _ in WRONG}
    names = {each.__name__ for each in MENDED}
    assert wrong <= names
    assert names - wrong <= set(ANSWERED)


def test_training_of_opset_14() -> None:
    body = (
        NORM.format("<training_mode = 1>")
        .replace("y =", "y, m, v =")
        .replace("(float[3,4,5] y)", "(float[3,4,5] y, float[4] m, float[4] v)")
    )
    proto = model(body, batch_norm("p", 4), opset=15)
    expected = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": X})
    for ours, theirs in zip(MendedEvaluator(proto).run(None, {"x": X}), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
