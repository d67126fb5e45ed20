"""Expressions of initializers that count as constants: weight norm left in a file, and their attributes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper
import onnx.reference
import pytest

from bnexport.graph.constants import Constants
from bnexport.graph.nodes import Refused
from bnexport.graph.shapes import Shapes
from bnexport.model_io import from_proto
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


@pytest.mark.parametrize("norm", NORMS)
def test_weight_norm_folds(norm: str) -> None:
    text = NORMS[norm]
    shapes = {
        name: shape for name, shape in {"v": (4, 3, 2, 2), "g": (4, 1, 1, 1)}.items() if f"{name}" in _words(text)
    }
    proto = model(
        f"g (float[N,3,H,W] x) => (float[N,4,A,B] y) {{ {text}\n"
        " z = Conv (x, w)\n y = BatchNormalization (z, p_s, p_b, p_m, p_v) }",
        {**shapes, **batch_norm("p", 4)},
        values={name: value for name, value in GIVEN.items() if name in _words(text)},
    )
    folded, result = fold_and_check(proto)
    assert operators(folded) == ["Conv"]
    assert [proof.method for proof in result.report.verification.sites] == ["proved"]


def _words(text: str) -> list[str]:
    return text.replace("(", " ").replace(")", " ").replace(",", " ").split()


def test_a_scale_that_is_computed() -> None:
    proto = model(
        """g (float[N,3,H,W] x) => (float[N,4,A,B] y) {
            z = Conv (x, w)
            n = ReduceL2 <axes = [1], keepdims = 0> (v)
            k = Sum (n, g, g)
            n4 = BatchNormalization (z, k, p_b, p_m, p_v)
            y = Relu (n4) }""",
        {"w": (4, 3, 1, 1), "v": (4, 5), "g": (4,), **batch_norm("p", 4)},
    )
    del proto.graph.initializer[[tensor.name for tensor in proto.graph.initializer].index("p_s")]
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
    proto = _alone(node, values, opset=18)
    got = _value(proto)
    expected = onnx.reference.ReferenceEvaluator(proto).run(None, {})[0]
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-5)


UNREADABLE = {
    "an output type": (
        "DequantizeLinear",
        {"output_dtype": 10},
        {"q": np.ones(3, np.int8), "s": np.ones((), np.float32)},
    ),
    "an attribute of Reshape": ("Reshape", {"mode": 1}, {"d": np.ones(4, np.float32), "s": np.array([2, 2])}),
    "an attribute of Cast": ("Cast", {"to": 1, "more": 1}, {"d": np.ones(4, np.float32)}),
    "an attribute of Gather": ("Gather", {"more": 1}, {"d": np.ones(4, np.float32), "i": np.array([0])}),
    "no axes, no reduction": ("ReduceSum", {"noop_with_empty_axes": 1}, {"d": np.ones(4, np.float32)}),
    "a sum of integers": ("ReduceSum", {}, {"d": np.ones(4, np.int32)}),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_would_be_a_guess_is_refused(case: str) -> None:
    operator, attributes, values = UNREADABLE[case]
    with pytest.raises(Refused) as caught:
        _value(_alone(onnx.helper.make_node(operator, list(values), ["y"], **attributes), values, opset=23))
    assert caught.value.code in ("unknown-attribute", "bad-attribute", "type")


def _alone(node: onnx.NodeProto, values: dict[str, np.ndarray], opset: int) -> onnx.ModelProto:
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    tensors = [onnx.numpy_helper.from_array(value, name) for name, value in values.items()]
    graph = onnx.helper.make_graph([node], "g", [], [output], tensors)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8)


def _value(proto: onnx.ModelProto) -> np.ndarray:
    made = from_proto(proto)
    return Constants(made, Shapes(made)).array(made.graph.outputs[0], "value")
