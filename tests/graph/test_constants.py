"""Expressions of initializers that count as constants, and operators that onnx.reference gets wrong, against ONNX Runtime."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx.helper
import onnx.reference
import onnx_ir as ir
import pytest

from bnexport.errors import MalformedModelError
from bnexport.graph import evaluate
from bnexport.graph.constants import Constants
from bnexport.graph.nodes import Refused
from bnexport.graph.onnx_reference import MENDED, MendedEvaluator
from bnexport.graph.shapes import Shapes
from bnexport.model_io import from_proto
from bnexport.runtime.engine import Serialised, open_as_written
from tests.support.onnx_text import batch_norm, fold_and_check, model, operators

# As torch writes it, as its parametrization, and by hand; over other axes, and all.
NORMS = {
    "torch": "n = ReduceL2 <axes = [1, 2, 3]> (v)\n u = Div (v, n)\n w = Mul (u, g)",
    "parametrized": "q = Mul (v, v)\n s = ReduceSum (q, axes)\n n = Sqrt (s)\n f = Div (g, n)\n w = Mul (v, f)",
    "powers": "q = Pow (v, two)\n s = ReduceSum (q, axes)\n n = Pow (s, half)\n u = Div (v, n)\n w = Mul (g, u)",
    "one norm": "a = Abs (v)\n n = ReduceSum (a, axes)\n u = Div (v, n)\n w = Mul (u, g)",
    "largest": "n = ReduceMax <axes = [1, 2, 3]> (v)\n e = Exp (n)\n w = Div (v, e)",
    "standardised": "m = ReduceMean <axes = [1, -2, -1]> (v)\n d = Sub (v, m)\n n = ReduceL2 <axes = [1, 2, 3]> (d)\n w = Div (d, n)",
}
GIVEN = {"axes": np.array([1, 2, 3]), "two": np.array(2, np.int64), "half": np.array(0.5, np.float32)}
CONV = "g (float[N,3,H,W] x) => (float[N,4,A,B] y) {{ {} }}"


@pytest.mark.parametrize("norm", NORMS)
def test_weight_norm_folds(norm: str) -> None:
    text = NORMS[norm].replace("(v", "(v:4.3.2.2", 1).replace("g)", "g:4.1.1.1)").replace("(g,", "(g:4.1.1.1,")
    given = {name: value for name, value in GIVEN.items() if re.search(rf"\b{name}\)", text)}
    folded, result = fold_and_check(model(CONV.format(f"{text} z = Conv (x, w) y = Norm (z, p:4)"), values=given))
    assert operators(folded) == ["Conv"]
    assert [proof.method for proof in result.report.verification.sites] == ["proved"]


def test_a_scale_that_is_computed() -> None:
    proto = model(
        CONV.format("""z = Conv (x, w:4.3.1.1) n = ReduceL2 <axes = [1], keepdims = 0> (v:4.5) k = Sum (n, g:4, g)
        n4 = BatchNormalization (z, k, p_b:4, p_m:4, p_v:4) y = Relu (n4)""")
    )
    assert operators(fold_and_check(proto)[0]) == ["Conv", "Relu"]


REDUCTIONS = ["L1", "L2", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"]


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [None, [], [0], [-1, 1]])
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_reductions(kind: str, axes: list[int] | None, keepdims: int) -> None:
    """As onnx.reference computes them, over given axes, or over all where none are."""
    node = onnx.helper.make_node(f"Reduce{kind}", ["v"] if axes is None else ["v", "axes"], ["y"], keepdims=keepdims)
    data = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    values = {"v": data} if axes is None else {"v": data, "axes": np.array(axes, np.int64)}
    (got,) = evaluate.rounded(ir.from_proto(node), [*values.values()], 18)
    expected = onnx.reference.ReferenceEvaluator(node).run(None, values)[0]
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-5)


FOUR = np.ones(4, np.float32)


def test_bounds_of_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number of steps and of elements; a value without numbers; a tensor of another shape than it says."""
    chain = "".join(f"c{index} = Neg (c{index - 1})\n" for index in range(1, 34))
    made = from_proto(model(f"g (float[N,4] x) => (float[N,4] y) {{ {chain} y = Add (x, c33) }}", values={"c0": FOUR}))
    read, steps = Constants(made, Shapes(made)), [node.outputs[0] for node in made.graph]
    assert read.array(steps[31], "c").tolist() == FOUR.tolist()
    assert not Constants(made, Shapes(made)).is_constant(steps[32])
    for ask in (read.array, read.describe, read.check):
        with pytest.raises(Refused, match="the c is missing"):
            ask(None, "c")
        with pytest.raises(Refused, match="the c 'x' is an input"):
            ask(made.graph.inputs[0], "c")
    monkeypatch.setattr("bnexport.graph.constants.ELEMENTS", 3)
    of_the_caller = ir.from_proto(onnx.parser.parse_node("y = Constant <value_float: float = @k> ()"))
    for call, error, said in (
        (lambda: Constants(made, Shapes(made)).array(steps[0], "c"), Refused, "too many elements"),
        (lambda: evaluate.constant_tensor(of_the_caller), Refused, "given by the function's caller"),
        (
            lambda: evaluate.expression(steps[0], {}, lambda _: None, lambda *_: []),
            evaluate.NotEvaluated,
            "has no numbers",
        ),
        (lambda: evaluate.read_tensor(ir.Tensor(FOUR, shape=ir.Shape([2]))), MalformedModelError, "its shape says"),
    ):
        with pytest.raises(error, match=said):
            call()


def test_before_version_4_of_the_format_no_caller_gives_an_initializer() -> None:
    text = "g (float[N,4] x, float[4] w) => (float[N,4] y) { y = Add (x, w) }"
    for version in (3, 4):
        made = from_proto(model(text, values={"w": FOUR}, header=f'<ir_version: {version}, opset_import: ["": 8]>'))
        assert Constants(made, Shapes(made)).is_constant(made.graph.inputs[1]) == (version == 3)


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
    assert names - wrong <= set(evaluate.ANSWERED)


def test_training_of_opset_14() -> None:
    body = NORM.format("<training_mode = 1>").replace("y =", "y, m, v =").replace(" y)", " y, float[4] m, float[4] v)")
    proto = model(body, batch_norm("p", 4), opset=15)
    expected = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": X})
    for ours, theirs in zip(MendedEvaluator(proto).run(None, {"x": X}), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
