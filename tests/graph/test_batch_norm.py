"""The mode of BatchNormalization by opset, compared with ONNX Runtime, and what fold and verify make of it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from bnexport import verify
from bnexport.folding import fold
from bnexport.graph.nodes import is_training
from bnexport.model_io import to_proto
from bnexport.verification.verdict import Method
from tests.support.onnx_text import array_of, assert_near, assert_refused, batch_norm, exact, make_inputs, model, run

FIVE = "y, a, b, c, d"


def norm(outputs: str = "y", attributes: str = "", data: str = "x") -> str:
    return f"{outputs} = BatchNormalization {attributes} ({data}, p_s, p_b, p_m, p_v)"


def conv_bn(norm: str = norm(data="z"), opset: int = 17, output: str = "float[N,8,A,B] y") -> onnx.ModelProto:
    body = f"g (float[N,6,H,W] x) => ({output}) {{ z = Conv (x, w)\n {norm} }}"
    return model(body, {"w": (8, 6, 1, 1), **batch_norm("p", 8)}, opset=opset)


def alone(opset: int, outputs: str, attributes: str) -> onnx.ModelProto:
    text = f"g (float[4,3,5] x) => (float[4,3,5] y) {{ {norm(outputs, attributes)} }}"
    return model(text, batch_norm("p", 3), opset=opset)


def mode(opset: int, outputs: str, attributes: str = "") -> bool:
    return is_training(ir.from_proto(alone(opset, outputs, attributes)).graph[0], opset)


@pytest.mark.parametrize(
    ("opset", "outputs", "attributes"),
    [
        *((opset, outputs, "") for opset in range(7, 14) for outputs in ("y", FIVE)),
        *((opset, "y", attributes) for opset in (14, 15) for attributes in ("", "<training_mode=0>")),
        *((opset, "y, a, b", "<training_mode=1>") for opset in (14, 15)),
    ],
)
def test_the_mode_is_onnx_runtimes(opset: int, outputs: str, attributes: str) -> None:
    proto = alone(opset, outputs, attributes)
    inputs = make_inputs(proto)
    x = inputs["x"].astype(np.float64)
    scale, bias, mean, var = (array_of(proto, f"p_{name}").reshape(1, 3, 1) for name in "sbmv")
    if mode(opset, outputs, attributes):
        mean, var = x.mean((0, 2), keepdims=True), x.var((0, 2), keepdims=True)
    assert_near(run(proto, inputs)[0], (scale * (x - mean) / np.sqrt(var + 1e-5) + bias).astype(np.float32))


def test_is_test_decides_below_opset_7_and_outputs_with_a_name_behind_it() -> None:
    for opset, outputs in ((1, "y"), (1, FIVE), (6, "y"), (6, FIVE)):
        modes = [mode(opset, outputs, attribute) for attribute in ("", "<is_test=0>", "<is_test=1>")]
        assert modes == [True, True, False], (opset, outputs)
    assert [mode(9, outputs) for outputs in ("y, , , , ", "y, , , , d")] == [False, True]


@pytest.mark.parametrize("opset", [7, 9, 13, 17])
def test_a_fold_keeps_training_unless_asked(opset: int) -> None:
    """Updated statistics become the old ones."""
    training = norm(FIVE, data="z") if opset < 14 else norm("y, a, b", "<training_mode=1>", data="z")
    proto = conv_bn(norm=training, opset=opset, output="float[N,8,A,B] y, float[8] a, float[8] b")
    assert_refused(proto, "training")
    result = fold(proto, training_to_inference=True)
    assert result.report.meaning_changed and result.report.verification.passed and not result.report.after.batch_norm
    inputs = make_inputs(proto)
    y, *statistics = run(to_proto(result.model), inputs)
    assert_near(y, exact(conv_bn(), inputs)[0])
    np.testing.assert_array_equal(statistics, [array_of(proto, name) for name in ("p_m", "p_v")])


@pytest.mark.parametrize("method", ["local", "whole", "both"])
def test_a_fold_of_training_statistics_never_passes(method: Method) -> None:
    folded = to_proto(fold(conv_bn(opset=9)).model)
    verdict = verify(conv_bn(norm=norm(FIVE, data="z"), opset=9), folded, method=method)
    assert not verdict
    assert method == "whole" or verdict.status == "failed"
