"""A shape that the model declares for a value is a claim: what inference does not confirm decides nothing."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from bnexport.folding import fold
from bnexport.graph.shapes import Shapes
from bnexport.model_io import to_proto
from bnexport.model_io.read import as_model
from tests.support.onnx_text import model, run

X = np.random.default_rng(0)
NOTE = "declared shapes that contradict the inputs and operators were left out: 1, of 'z'"


def declared(proto: onnx.ModelProto) -> set[str]:
    return {value.name for value in proto.graph.value_info if value.type.tensor_type.HasField("shape")}


# (inputs, values with the shapes that the file declares for them, nodes, feeds, outcome)
CLAIMS: dict[str, tuple[str, str, str, dict[str, np.ndarray], str]] = {
    # A product over the last axis normalised along axis 1: the same only in data of rank 2.
    **{f"a-rank-that-only-the-file-declares-{length}": (f"float[P] x, int64[{length}] s", "float[a,6] z, float[a,5] m",
        "z = Reshape (x, s) m = MatMul (z, w:6.5) y = Norm (m, p:5)",
        {"x": X.standard_normal(60, np.float32), "s": np.array([2, 5, 6])}, "kept") for length in ("3", "K")},
    "a-rank-below-the-real-one": ("float[N,L,6] x", "float[N,5] m",
        "m = MatMul (x, w:6.5) t = Transpose <perm = [0, 2, 1]> (m) n = Norm (t, p:5) y = Relu (n)",
        {"x": X.standard_normal((2, 3, 6), np.float32)}, "folded"),
    # z has one channel, and the Add gives it eight.
    "channels-that-only-the-file-declares": ("float[N,3,H,W] x, float[] t", "float[N,8,A,B] z, float[N,8,A,B] u",
        "z = Conv (x, w:1.3.3.3) u = Add (z, t) y = Norm (u, p:8)",
        {"x": X.standard_normal((1, 3, 8, 8), np.float32), "t": X.standard_normal((1, 8, 6, 6), np.float32)}, "kept"),
    **{f"a-shape-from-before-the-input-became-dynamic-{claim}": ("float[N,3,H,W] x", f"float[{claim}] z",
        "z = Conv (x, w:8.3.3.3) s = Shape (z) e = Expand (k:1.1.1.1, s) u = Mul (z, e) y = Norm (u, p:8)",
        {"x": X.standard_normal((2, 3, 9, 11), np.float32)}, "") for claim in ("1,8,6,6", "1,8,6")},
}  # fmt: skip


@pytest.mark.parametrize("simplify", [False, True])
@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_that_is_wrong(name: str, simplify: bool) -> None:
    inputs, claims, nodes, feeds, outcome = CLAIMS[name]
    source = model(f"g ({inputs}) => (float[] y) <{claims}> {{ {nodes} }}")
    result = fold(source, simplify=simplify, verify=not outcome or outcome == "folded")
    assert result.report.sites[0].outcome == outcome or not outcome
    assert result.report.verification is None or result.report.verification.passed
    if not outcome:
        assert NOTE in result.report.notes
        assert simplify or "z" not in declared(result.model)
    for want, got in zip(run(source, feeds), run(result.model, feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


CALL = '} <opset_import: ["": 18, "custom": 1], domain: "local"> f (i) => (o) { h = custom.Op (i) o = Relu (h)'


@pytest.mark.parametrize(
    ("operator", "more"), [("custom.Op", ""), ("local.f", CALL)], ids=["operator", "function that holds one"]
)
@pytest.mark.parametrize(("claim", "outcomes"), [("<float[N,4,A,B] z>", ["folded"]), ("", [])])
def test_of_an_unknown_operator_the_declared_shape_counts(
    operator: str, more: str, claim: str, outcomes: list[str]
) -> None:
    """Nobody but the file says anything about it; without its claim nothing folds."""
    nodes = f"z = {operator} (x) n = Mul (z, k:4.1.1) a = Add (n, t:4.1.1) y = Conv (a, w:5.4.1.1)"
    header = '<ir_version: 8, opset_import: ["": 18, "custom": 1, "local": 1]>'
    source = model(f"g (float[N,4,H,W] x) => (float[] y) {claim} {{ {nodes} {more} }}", header=header)
    assert [site.outcome for site in fold(source, verify=False).report.sites] == outcomes


def test_inference_runs_only_where_the_file_declares_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "g (float[N,3,H,W] x) => (float[] y) <float[{}] z> {{ z = Conv (x, w:8.3.3.3) y = Norm (z, p:8) }}"
    assert fold(model(text.format("8")), verify=False).report.folded
    monkeypatch.setattr("bnexport.graph.shapes._Inferred", None)
    assert fold(model(text.format("N,8,A,B")), verify=False).report.folded


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
    assert opened.graph.outputs[0].shape == ir.Shape(["N", 4, 6, 6])
    x = X.standard_normal((2, 4, 6, 6), np.float32)
    np.testing.assert_array_equal(run(to_proto(opened), {"x": x})[0], run(source, {"x": x})[0])
