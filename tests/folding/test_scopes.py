"""Batch norms inside bodies and functions; captured and shadowed names."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.support.onnx_text import (
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


def test_body_of_a_scan() -> None:
    """The body sees one step of the sequence; its state goes on to the next."""
    body = """g (float[N,4] h, float[5,N,6] x) => (float[N,4] last, float[5,N,4] all) {
        last, all = Scan <num_scan_inputs = 1, body = b (float[N,4] s, float[N,6] i) => (float[N,4] o, float[N,4] p) {
            z = Gemm (i, w, c)
            n = BatchNormalization (z, p_s, p_b, p_m, p_v)
            a = Add (n, s)
            o = Tanh (a)
            p = Identity (o)
        }> (h, x) }"""
    proto = model(body, {"w": (6, 4), "c": (4,), **batch_norm("p", 4)})
    result = fold(proto)
    folded = to_proto(result.model)
    assert batch_norms(folded) == 0
    inputs = make_inputs(proto)
    for got, expected in zip(run(folded, inputs), run(proto, inputs), strict=True):
        assert_near(got, expected)


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
    body = "g (float[N,2,H,W] x) => (float[N,2,H,W] y) { t = local.block (x)\n y = local.block (t) }"
    folded, result = fold_and_check(functions(model(body, header=HEADER), FUNCTION))
    assert [node.op_type for node in folded.functions[0].node] == ["Constant", "Constant", "Conv"]
    assert result.report.sites[0].graph == "function block"


def functions(proto: onnx.ModelProto, *texts: str) -> onnx.ModelProto:
    for text in texts:
        proto.functions.append(onnx.parser.parse_function(text))
    return proto


@pytest.mark.parametrize(("given", "left"), [("", ["Conv"]), (", float[8] p_s", ["block"])])
def test_parameters_from_the_caller_of_a_function(given: str, left: list[str]) -> None:
    """Also those that the caller does not fix."""
    text = """<domain: "local", opset_import: ["": 17]>
    block (x, w, s, b, m, v) => (y) { z = Conv (x, w)\n y = BatchNormalization (z, s, b, m, v) }"""
    body = f"g ({X4}{given}) => (float[N,8,A,B] y) {{ y = local.block (x, w, p_s, p_b, p_m, p_v) }}"
    shapes = {name: shape for name, shape in SHAPES.items() if not given or name != "p_s"}
    result = fold(functions(model(body, shapes, header=HEADER), text))
    assert operators(to_proto(result.model)) == left
    if given:
        assert [refusal.code for refusal in result.report.sites[0].refusals] == ["not-constant"]


def with_epsilon_of_the_caller() -> onnx.ModelProto:
    text = FUNCTION.replace("block (x)", "block <eps> (x)").replace("tion (z", "tion <epsilon: float = @eps> (z")
    body = "g (float[N,2,H,W] x) => (float[N,2,H,W] y) { y = local.block <eps=0.5> (x) }"
    return functions(model(body, header=HEADER), text)


def test_epsilon_from_the_caller_of_a_function() -> None:
    folded, _ = fold_and_check(with_epsilon_of_the_caller())
    assert "BatchNormalization" not in operators(folded)
    assert not folded.functions


def test_only_does_not_inline_and_skip_takes_the_labels_of_inlined_nodes() -> None:
    result = fold(with_epsilon_of_the_caller(), only=["BatchNormalization -> y"])
    assert [refusal.code for refusal in result.report.sites[0].refusals] == ["reference-attribute"]
    (site,) = fold(with_epsilon_of_the_caller(), verify=False).report.folded
    assert not fold(with_epsilon_of_the_caller(), verify=False, skip=site.nodes).report.folded


CONV2D = '<domain: "local", opset_import: ["": 17]> conv2d <strides> (x, w) => (y) { y = Conv <strides: ints = @strides> (x, w) }'
NORM2D = """<domain: "local", opset_import: ["": 17]>
    norm2d <eps> (x, s, b, m, v) => (y) {
        k = Identity (s)
        y = BatchNormalization <epsilon: float = @eps> (x, k, b, m, v) }"""
BLOCK = """<domain: "local", opset_import: ["": 17, "local": 1]>
    block (x, w, s, b, m, v) => (y) {
        z = local.conv2d <strides = [2, 2]> (x, w)
        n = local.norm2d <eps = 0.25> (z, s, b, m, v)
        y = Relu (n) }"""


def test_a_function_for_every_module() -> None:
    """Weights and attributes come in from the main graph, through two levels."""
    body = f"""g ({X4}) => (float[N,8,A,B] y, float[N,8,A,B] q) {{
        y = local.block (x, w, p_s, p_b, p_m, p_v)
        q = local.block (x, w2, p_s, p_b, p_m, p_v) }}"""
    proto = functions(model(body, SHAPES, header=HEADER), CONV2D, NORM2D, BLOCK)
    folded, result = fold_and_check(proto)
    assert operators(folded) == ["Conv", "Relu", "Conv", "Relu"]
    assert not folded.functions
    assert len(result.report.folded) == 2
    names = [node.name for node in folded.graph.node] + [name for node in folded.graph.node for name in node.output]
    assert len(names) == len(set(names))


def test_other_callers_are_untouched() -> None:
    """One call gives constants, the other statistics that are computed: that one stays a call."""
    body = f"""g ({X4}, float[8] m) => (float[N,8,A,B] y, float[N,8,A,B] q) {{
        z = Conv (x, w)
        y = local.norm2d <eps = 0.25> (z, p_s, p_b, p_m, p_v)
        u = Conv (x, w2)
        q = local.norm2d <eps = 0.5> (u, p_s, p_b, m, p_v) }}"""
    proto = functions(model(body, SHAPES, header=HEADER), NORM2D)
    folded, result = fold_and_check(proto, left=1)
    assert operators(folded) == ["Conv", "Conv", "norm2d"]
    assert [node.op_type for node in folded.functions[0].node] == ["Identity", "BatchNormalization"]
    assert [site.outcome for site in result.report.sites] == ["folded", "kept"]


def test_a_call_that_gains_nothing_stays() -> None:
    body = f"g ({X4}) => (float[N,6,A,B] y) {{ r = Relu (x)\n t = local.norm2d <eps = 0.5> (r, p_s, p_b, p_m, p_v)\n y = Relu (t) }}"
    proto = functions(model(body, batch_norm("p", 6), header=HEADER), NORM2D)
    result = fold(proto)
    assert not result.report.changed
    assert operators(to_proto(result.model)) == ["Relu", "norm2d", "Relu"]


def test_a_call_between_batch_norms_that_merge_is_inlined() -> None:
    nodes = "r = Relu (x)\n t = local.norm2d <eps = 0.5> (r, p_s, p_b, p_m, p_v)\n u = BatchNormalization (t, q_s, q_b, q_m, q_v)"
    shapes = {**batch_norm("p", 6), **batch_norm("q", 6)}
    proto = model(f"g ({X4}) => (float[N,6,A,B] y) {{ {nodes}\n y = Relu (u) }}", shapes, header=HEADER)
    folded, _ = fold_and_check(functions(proto, NORM2D), left=1)
    assert operators(folded) == ["Relu", "BatchNormalization", "Relu"]


@pytest.mark.parametrize("opset", [16, 17])
def test_a_function_of_another_opset_stays(opset: int) -> None:
    body = (
        f"g ({X4}) => (float[N,8,A,B] y) {{ z = Conv (x, w)\n y = local.norm2d <eps = 0.5> (z, p_s, p_b, p_m, p_v) }}"
    )
    text = NORM2D.replace('"": 17', f'"": {opset}')
    result = fold(functions(model(body, SHAPES, header=HEADER), text))
    assert bool(result.report.folded) == (opset == 17)


def test_names_of_the_caller_are_not_captured() -> None:
    """The body's own names, also those inside its If, are fresh."""
    text = """<domain: "local", opset_import: ["": 17]>
    twice (x, c, s, b, m, v) => (y, q, r) {
        n = BatchNormalization (x, s, b, m, v)
        z = If (c) <
            then_branch = t () => (o) { w = Constant <value_float = 2.0> ()
                o = Mul (n, w) },
            else_branch = e () => (w) { w = Identity (n) }
        >
        y = Identity (z)
        q = Identity (y)
        r = Identity (x) }"""
    body = f"""g ({X4}, bool c) => (float[N,8,A,B] y, float[N,8,A,B] n, float[N,8,A,B] k) {{
        z = Conv (x, w)
        u = Neg (z)
        y, n, k = local.twice (u, c, p_s, p_b, p_m, p_v) }}"""
    proto = functions(model(body, SHAPES, header=HEADER), text)
    from bnexport.graph.functions import inline_calls
    from bnexport.model_io.read import open_source

    opened = open_source(proto).model
    assert inline_calls(opened)
    inlined = to_proto(opened)
    onnx.checker.check_model(inlined)
    assert not inlined.functions
    for condition in (True, False):
        inputs = {**make_inputs(proto), "c": np.asarray(condition)}
        for got, expected in zip(run(inlined, inputs), run(proto, inputs), strict=True):
            assert_near(got, expected)


def test_shapes_inside_a_function() -> None:
    """A Transpose without perm, and a constant of rank 3: both need the rank of what the calls give."""
    text = """<domain: "local", opset_import: ["": 17]>
    head (x) => (y) {
        w = Constant <value = float[2,2,1] {1.0, 2.0, -1.0, 0.5}> ()
        s = Constant <value_floats = [2.0, -0.5]> ()
        b = Constant <value_floats = [0.25, 1.0]> ()
        m = Constant <value_floats = [0.5, -1.0]> ()
        v = Constant <value_floats = [4.0, 0.5]> ()
        c = Constant <value = float[2,1] {3.0, 4.0}> ()
        z = Conv (x, w)
        a = Add (z, c)
        t = Transpose (a)
        u = Transpose (t)
        y = BatchNormalization (u, s, b, m, v) }"""
    body = "g (float[N,2,L] x) => (float[N,2,L] y) { t = local.head (x)\n y = local.head (t) }"
    folded, _ = fold_and_check(functions(model(body, header=HEADER), text))
    assert [node.op_type for node in folded.functions[0].node if node.op_type != "Constant"] == [
        "Conv",
        "Transpose",
        "Transpose",
    ]


@pytest.mark.parametrize("depth", [3, 40])
def test_functions_that_double_are_not_expanded(depth: int) -> None:
    """Each calls the next twice: three levels are eight batch norms, forty would be a million million."""
    texts = [
        f'<domain: "local", opset_import: ["": 17, "local": 1]> f{level} (x, s, b, m, v) => (y) {{ {body} }}'
        for level in range(depth)
        for body in [
            f"t = local.f{level + 1} (x, s, b, m, v)\n y = local.f{level + 1} (t, s, b, m, v)"
            if level < depth - 1
            else "y = BatchNormalization (x, s, b, m, v)"
        ]
    ]
    # The Transpose asks for shapes.
    body = f"""g ({X4}) => (float[N,8,A,B] y) {{
        z = Conv (x, w)
        t = Transpose (z)
        u = Transpose (t)
        y = local.f0 (u, p_s, p_b, p_m, p_v) }}"""
    result = fold(functions(model(body, SHAPES, header=HEADER), *texts), verify=False)
    assert bool(result.report.folded) == (depth == 3)
    assert result.report.after.nodes < 100
