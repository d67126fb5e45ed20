"""A shape that the model declares for a value is a claim: what inference does not confirm decides nothing."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from bnexport.folding import FoldResult, fold
from bnexport.graph.shapes import Shapes
from bnexport.model_io import to_proto
from bnexport.model_io.read import as_model
from tests.support.onnx_text import batch_norm, model, run

X = np.random.default_rng(0)
NOTE = "declared shapes that contradict the inputs and operators were left out: 1, of 'z'"


def assert_equal(source: onnx.ModelProto, result: FoldResult, **feeds: np.ndarray) -> None:
    for want, got in zip(run(source, feeds), run(result.model, feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def declared(proto: onnx.ModelProto) -> set[str]:
    return {value.name for value in proto.graph.value_info if value.type.tensor_type.HasField("shape")}


@pytest.mark.parametrize("length", ["3", "K"])
def test_a_rank_that_only_the_file_declares(length: str) -> None:
    """A product over the last axis normalised along axis 1: the same only in data of rank 2."""
    body = f"""g (float[P] x, int64[{length}] s) => (float[] y) <float[a,6] z, float[a,5] m> {{
        z = Reshape (x, s)
        m = MatMul (z, w)
        y = BatchNormalization (m, p_s, p_b, p_m, p_v) }}"""
    source = model(body, {"w": (6, 5), **batch_norm("p", 5)})
    result = fold(source, verify=False)
    assert [site.outcome for site in result.report.sites] == ["kept"]
    assert_equal(source, result, x=X.standard_normal(60, np.float32), s=np.array([2, 5, 6]))


@pytest.mark.parametrize("claim", ["1,8,6,6", "1,8,6"], ids=["sizes", "rank"])
@pytest.mark.parametrize("simplify", [False, True])
def test_a_shape_from_before_the_input_became_dynamic(claim: str, simplify: bool) -> None:
    body = f"""g (float[N,3,H,W] x) => (float[N,8,A,B] y) <float[{claim}] z> {{
        z = Conv (x, w)
        s = Shape (z)
        e = Expand (k, s)
        u = Mul (z, e)
        y = BatchNormalization (u, p_s, p_b, p_m, p_v) }}"""
    source = model(body, {"w": (8, 3, 3, 3), "k": (1, 1, 1, 1), **batch_norm("p", 8)})
    result = fold(source, simplify=simplify)
    assert result.report.verification.passed
    assert NOTE in result.report.notes
    assert simplify or "z" not in declared(result.model)
    assert_equal(source, result, x=X.standard_normal((2, 3, 9, 11), np.float32))


def test_a_declared_rank_below_the_real_one() -> None:
    body = """g (float[N,L,6] x) => (float[] y) <float[N,5] m> {
        m = MatMul (x, w)
        t = Transpose <perm = [0, 2, 1]> (m)
        n = BatchNormalization (t, p_s, p_b, p_m, p_v)
        y = Relu (n) }"""
    source = model(body, {"w": (6, 5), **batch_norm("p", 5)})
    result = fold(source)
    assert [site.outcome for site in result.report.sites] == ["folded"]
    assert result.report.verification.passed


def test_channels_that_only_the_file_declares() -> None:
    """z has one channel, and the Add gives it eight."""
    body = """g (float[N,3,H,W] x, float[] t) => (float[] y) <float[N,8,A,B] z, float[N,8,A,B] u> {
        z = Conv (x, w)
        u = Add (z, t)
        y = BatchNormalization (u, p_s, p_b, p_m, p_v) }"""
    source = model(body, {"w": (1, 3, 3, 3), **batch_norm("p", 8)})
    result = fold(source, verify=False)
    x, t = X.standard_normal((1, 3, 8, 8), np.float32), X.standard_normal((1, 8, 6, 6), np.float32)
    assert_equal(source, result, x=x, t=t)


def folded(body: str, header: str, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    result = fold(model(body, shapes, header=header), verify=False)
    return [site.outcome for site in result.report.sites]


CUSTOM = '<ir_version: 8, opset_import: ["": 18, "custom": 1, "local": 1]>'
AFFINE = """{
    z = %s (x)
    n = Mul (z, k)
    a = Add (n, t)
    y = Conv (a, w) }"""
AFFINE_SHAPES = {"k": (4, 1, 1), "t": (4, 1, 1), "w": (5, 4, 1, 1)}
CALL = (
    AFFINE % "local.f"
    + """
    <opset_import: ["": 18, "custom": 1], domain: "local"> f (i) => (o) { h = custom.Op (i) o = Relu (h) }"""
)


@pytest.mark.parametrize("body", [AFFINE % "custom.Op", CALL], ids=["operator", "function that holds one"])
def test_of_an_unknown_operator_the_declared_shape_counts(body: str) -> None:
    """Nobody but the file says anything about it; without its claim nothing folds."""
    with_claim = f"g (float[N,4,H,W] x) => (float[] y) <float[N,4,A,B] z> {body}"
    assert folded(with_claim, CUSTOM, AFFINE_SHAPES) == ["folded"]
    without = f"g (float[N,4,H,W] x) => (float[] y) {body}"
    assert folded(without, CUSTOM, AFFINE_SHAPES) == []


@pytest.mark.parametrize(
    ("claim", "update", "expected"),
    [
        ("[]", "o = Conv (a, w)", (None, 4, None, None)),
        ("[N,C,L]", "o = Conv (a, w)", (None, 4, None, None)),
        ("[N,4,H,W]", "o = Unsqueeze (a, axes)", None),
        ("[N,4,H,W]", "o = Concat <axis = 1> (a, a)", (None, None, None, None)),
    ],
    ids=["not declared", "declared wrongly", "the rank grows", "the channels grow"],
)
def test_states_of_loops(claim: str, update: str, expected: tuple[int | None, ...] | None) -> None:
    """They have what is common to what enters and what the body returns, whatever the body declares."""
    body = f"""g (float[N,4,H,W] x, int64 n, bool c) => (float[] y) {{
        y = Loop (n, c, x) <body = b (int64 i, bool d, float{claim} s) => (bool e, float[] o) {{
            e = Identity (d)
            a = Relu (s)
            {update} }}> }}"""
    graph = as_model(model(body, {"w": (4, 4, 1, 1)}, values={"axes": np.array([0])}, opset=18))
    loop = graph.graph.node(0)
    inner = loop.attributes["body"].as_graph()
    shapes = Shapes(graph)
    for value in (inner.inputs[2], inner[1].outputs[0], loop.outputs[0]):
        shape = shapes.of(value)
        got = None if shape is None else tuple(size if isinstance(size, int) else None for size in shape)
        assert got == expected, value


def test_a_wrong_shape_that_another_one_hides() -> None:
    """An engine takes the rank of r from its declaration; without it, the length of c would show, which is wrong, too."""
    body = """g (float[N,4,6,6] x) => (float[N,4,6,6] y) <float[64] c, float[K,1] r, float[1,1,1,J] t> {
        s = Shape (x)
        n = Gather (s, three)
        i = Range (zero, n, one)
        c = Cast <to = 1> (i)
        r = Cos (c)
        t = Reshape (r, rows)
        a = Add (x, t)
        y = Relu (a) }"""
    numbers = {name: np.int64(value) for name, value in (("zero", 0), ("one", 1), ("three", 3))}
    source = model(body, values={**numbers, "rows": np.array([1, 1, 1, -1])})
    opened = as_model(source)
    shapes = Shapes(opened)
    shapes.of(opened.graph.outputs[0])
    assert shapes.drop_stale() == (NOTE.replace("'z'", "'r'"),)
    x = X.standard_normal((2, 4, 6, 6), np.float32)
    np.testing.assert_array_equal(run(to_proto(opened), {"x": x})[0], run(source, {"x": x})[0])
