"""Batch norms inside bodies and functions; captured and shadowed names."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.folding.helpers import (
    assert_near,
    batch_norm,
    batch_norms,
    exact,
    fold_and_check,
    make_inputs,
    model,
    operators,
    parameters,
    run,
)

X4 = "float[N,6,H,W] x"
SHAPES = {"w": (8, 6, 1, 1), "w2": (8, 6, 1, 1), **batch_norm("p", 8)}


def test_branches_of_an_if() -> None:
    """Both branches capture the outer weight and statistics; each gets a weight of its own."""
    body = f"""g ({X4}, bool c) => (float[N,8,A,B] y) {{
        y = If (c) <
            then_branch = t () => (float[N,8,A,B] o) {{
                z = Conv (x, w)
                o = BatchNormalization (z, p_s, p_b, p_m, p_v) }},
            else_branch = e () => (float[N,8,A,B] q) {{
                u = Conv (x, w)
                q = Relu (u) }}
        > }}"""
    proto = model(body, SHAPES)
    for condition in (True, False):
        result = fold(proto)
        folded = to_proto(result.model)
        assert batch_norms(folded) == 0
        inputs = {**make_inputs(proto), "c": np.asarray(condition)}
        assert_near(run(folded, inputs)[0], run(proto, inputs)[0])
    # The outer weight is still what the other branch reads.
    kept = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in folded.graph.initializer}
    np.testing.assert_array_equal(kept["w"], parameters(SHAPES)["w"])


def test_body_of_a_loop() -> None:
    body = """g (int64 n, bool c, float[N,8,H,W] x) => (float[N,8,H,W] y) {
        y = Loop (n, c, x) <
            body = b (int64 i, bool k, float[N,8,H,W] a) => (bool k2, float[N,8,H,W] o) {
                k2 = Identity (k)
                z = Conv (a, w)
                s = BatchNormalization (z, p_s, p_b, p_m, p_v)
                o = Tanh (s) }
        > }"""
    proto = model(body, {"w": (8, 8, 1, 1), **batch_norm("p", 8)})
    result = fold(proto)
    folded = to_proto(result.model)
    assert batch_norms(folded) == 0
    inputs = {
        "n": np.asarray(3),
        "c": np.asarray(True),
        "x": np.random.default_rng(1).standard_normal((2, 8, 3, 3)).astype(np.float32),
    }
    assert_near(run(folded, inputs)[0], run(proto, inputs)[0])


def test_conv_outside_batch_norm_inside() -> None:
    """The Conv runs once for both branches; only one of them normalises."""
    body = f"""g ({X4}, bool c) => (float[N,8,A,B] y) {{
        z = Conv (x, w)
        y = If (c) <
            then_branch = t () => (float[N,8,A,B] o) {{ o = BatchNormalization (z, p_s, p_b, p_m, p_v) }},
            else_branch = e () => (float[N,8,A,B] q) {{ q = Identity (z) }}
        > }}"""
    result = fold(model(body, SHAPES), verify=False)
    assert not result.report.folded
    assert batch_norms(to_proto(result.model)) == 1


def test_shadowed_weight() -> None:
    """Inside the branch, w is the branch's own."""
    body = f"""g ({X4}, bool c) => (float[N,8,A,B] y) {{
        y = If (c) <
            then_branch = t () => (float[N,8,A,B] o) {{
                z = Conv (x, w)
                o = BatchNormalization (z, p_s, p_b, p_m, p_v) }},
            else_branch = e () => (float[N,8,A,B] q) {{ q = Conv (x, w) }}
        > }}"""
    proto = model(body, SHAPES)
    own = parameters({"w": (8, 6, 1, 1)}, seed=99)["w"]
    proto.graph.node[0].attribute[0].g.initializer.append(onnx.numpy_helper.from_array(own, "w"))
    folded = to_proto(fold(proto, verify=False).model)
    plain = model(f"g ({X4}) => (float[N,8,A,B] y) {{ z = Conv (x, w)\n y = BatchNormalization (z, p_s, p_b, p_m, p_v) }}",
                  {name: shape for name, shape in SHAPES.items() if name != "w"}, values={"w": own})  # fmt: skip
    # The statistics' seed order differs without w, so they are taken from the folded model's source.
    for tensor in proto.graph.initializer:
        for target in plain.graph.initializer:
            if target.name == tensor.name != "w":
                target.CopyFrom(tensor)
    branch = folded.graph.node[0].attribute[0].g
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in branch.initializer}
    conv = branch.node[0]
    inputs = make_inputs(plain)
    import torch

    got = torch.conv2d(
        *(torch.tensor(array) for array in (inputs["x"], weights[conv.input[1]], weights[conv.input[2]]))
    )
    assert_near(got.numpy(), exact(plain, inputs)[0])


FUNCTION = """
<domain: "local", opset_import: ["": 17]>
block (x) => (y)
{
    w = Constant <value = float[2,2,1,1] {1.0, 2.0, -1.0, 0.5}> ()
    s = Constant <value_floats = [2.0, -0.5]> ()
    b = Constant <value_floats = [0.25, 1.0]> ()
    m = Constant <value_floats = [0.5, -1.0]> ()
    v = Constant <value_floats = [4.0, 0.5]> ()
    z = Conv (x, w)
    y = BatchNormalization (z, s, b, m, v)
}
"""
HEADER = '<ir_version: 8, opset_import: ["": 17, "local": 1]>'


def test_inside_a_function() -> None:
    proto = model(
        "g (float[N,2,H,W] x) => (float[N,2,H,W] y) { t = local.block (x)\n y = local.block (t) }", header=HEADER
    )
    proto.functions.append(onnx.parser.parse_function(FUNCTION))
    folded, result = fold_and_check(proto)
    assert [node.op_type for node in folded.functions[0].node] == ["Constant", "Constant", "Conv"]
    assert result.report.sites[0].graph == "function block"


def test_parameters_from_the_caller_of_a_function() -> None:
    text = """<domain: "local", opset_import: ["": 17]>
    block (x, w, s, b, m, v) => (y) { z = Conv (x, w)\n y = BatchNormalization (z, s, b, m, v) }"""
    body = f"g ({X4}) => (float[N,8,A,B] y) {{ y = local.block (x, w, p_s, p_b, p_m, p_v) }}"
    proto = model(body, SHAPES, header=HEADER)
    proto.functions.append(onnx.parser.parse_function(text))
    result = fold(proto)
    assert [refusal.code for refusal in result.report.sites[0].refusals] == ["not-constant"]
    assert operators(to_proto(result.model)) == ["block"]


def test_epsilon_from_the_caller_of_a_function() -> None:
    text = FUNCTION.replace("block (x)", "block <eps> (x)").replace(
        "BatchNormalization (z", "BatchNormalization <epsilon: float = @eps> (z"
    )
    proto = model("g (float[N,2,H,W] x) => (float[N,2,H,W] y) { y = local.block <eps=0.5> (x) }", header=HEADER)
    proto.functions.append(onnx.parser.parse_function(text))
    result = fold(proto, verify=False)
    assert [refusal.code for refusal in result.report.sites[0].refusals] == ["reference-attribute"]


@pytest.mark.parametrize("rule", ["conv", "matmul"])
def test_only_some_rules(rule: str) -> None:
    body = f"g ({X4}) => (float[N,8,A,B] y) {{ z = Conv (x, w)\n y = BatchNormalization (z, p_s, p_b, p_m, p_v) }}"
    result = fold(model(body, SHAPES), rules=[rule])
    assert bool(result.report.folded) == (rule == "conv")
