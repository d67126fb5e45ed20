"""Functions beyond the corpus: names that are chosen, names that must not be captured, and how far calls are expanded."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from bnexport.folding import fold
from bnexport.graph.functions import inline_calls
from bnexport.model_io import to_proto
from bnexport.model_io.read import open_source
from tests.folding.corpus import CORPUS
from tests.folding.corpus.scopes import LOCAL
from tests.support.onnx_text import assert_near, make_inputs, model, run


def arrays(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}


def test_a_shadowed_weight() -> None:
    """Inside the branch, w is the branch's own."""
    source = CORPUS["scope-branch-1"].model()
    own, values = np.full((8, 6, 1, 1), 0.5, np.float32), arrays(source.graph)
    source.graph.node[1].attribute[0].g.initializer.append(onnx.numpy_helper.from_array(own, "w"))
    branch = to_proto(fold(source, verify=False).model).graph.node[1].attribute[0].g
    scale = values["p_s"] / np.sqrt(values["p_v"].astype(np.float64) + np.float32(1e-5))
    expected = (own * scale.reshape(8, 1, 1, 1)).astype(np.float32)
    np.testing.assert_array_equal(arrays(branch)[branch.node[0].input[1]], expected)


def test_a_fold_inside_a_function_is_reported() -> None:
    result = fold(CORPUS["scope-function"].model())
    assert [node.op_type for node in result.model.functions[0].node] == ["Constant", "Constant", "Conv"]
    assert result.report.sites[0].graph == "function block"


def test_only_does_not_inline_and_skip_takes_the_labels_of_inlined_nodes() -> None:
    source = CORPUS["scope-epsilon-of-the-caller"].model()
    result = fold(source, only=["BatchNormalization -> y"])
    assert [refusal.code for refusal in result.report.sites[0].refusals] == ["reference-attribute"]
    (site,) = fold(source, verify=False).report.folded
    assert not fold(source, verify=False, skip=site.nodes).report.folded


@pytest.mark.parametrize("condition", [True, False])
def test_names_of_the_caller_are_not_captured(condition: bool) -> None:
    """The body's own names, also those inside its If, are fresh."""
    proto = model(
        """g (float[N,6,H,W] x, bool c) => (float[N,8,A,B] y, float[N,8,A,B] n, float[N,8,A,B] k) {
            z = Conv (x, w:8.6.1.1) u = Neg (z) y, n, k = local.twice (u, c, p_s:8, p_b:8, p_m:8, p_v:8) }
        <opset_import: ["": 17], domain: "local"> twice (x, c, s, b, m, v) => (y, q, r) {
            n = BatchNormalization (x, s, b, m, v)
            z = If (c) <then_branch = t () => (o) { w = Constant <value_float = 2.0> () o = Mul (n, w) },
                        else_branch = e () => (w) { w = Identity (n) }>
            y = Identity (z) q = Identity (y) r = Identity (x) }""",
        header=LOCAL,
    )
    opened = open_source(proto).model
    assert inline_calls(opened)
    inlined = to_proto(opened)
    onnx.checker.check_model(inlined)
    assert not inlined.functions
    inputs = {**make_inputs(proto), "c": np.asarray(condition)}
    for got, expected in zip(run(inlined, inputs), run(proto, inputs), strict=True):
        assert_near(got, expected)


@pytest.mark.parametrize("depth", [3, 40])
def test_functions_that_double_are_not_expanded(depth: int) -> None:
    """Each calls the next twice: three levels are eight batch norms, forty would be a million million."""
    bodies = [f"t = local.f{level} (x, s, b, m, v) y = local.f{level} (t, s, b, m, v)" for level in range(1, depth)]
    bodies.append("y = BatchNormalization (x, s, b, m, v)")
    functions = [
        f'<opset_import: ["": 17, "local": 1], domain: "local"> f{level} (x, s, b, m, v) => (y) {{ {body} }}'
        for level, body in enumerate(bodies)
    ]
    # The Transpose asks for shapes.
    nodes = "z = Conv (x, w:8.6.1.1) t = Transpose (z) u = Transpose (t) y = local.f0 (u, p_s:8, p_b:8, p_m:8, p_v:8)"
    text = f"g (float[N,6,H,W] x) => (float[N,8,A,B] y) {{ {nodes} }} {' '.join(functions)}"
    result = fold(model(text, header=LOCAL), verify=False)
    assert bool(result.report.folded) == (depth == 3)
    assert result.report.after.nodes < 100
