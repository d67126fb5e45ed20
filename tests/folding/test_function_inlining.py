"""Model-local functions become nodes: the same outputs without functions, or a refusal that says why."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from bnexport import schema
from bnexport.errors import UnsafeModelError, UnsupportedModelError, VerificationError
from bnexport.exporting.finish import portable_body
from bnexport.folding import api
from bnexport.folding.api import inline
from bnexport.graph.functions import inline_functions
from bnexport.model_io import load, to_proto
from bnexport.model_io.read import as_model
from tests.support.onnx_text import make_inputs, model, operators, run

HEADER = '<ir_version: 8, opset_import: ["": 18, "local": 1, "mmcv": 1]>'
ATTRIBUTES = {attribute.name: attribute.default for attribute in schema.SYNC_BATCH_NORM.attributes}


def kept(training: int, *, group_size: int = 1, body: bool = True) -> onnx.ModelProto:
    """Conv, sync batch norm and Relu, with all of the node's outputs."""
    text = """g (float[N,3,H,W] x) => (float[N,4,H,W] y, float[4] mean_new, float[4] var_new) {
        z = Conv <pads = [1, 1, 1, 1]> (x, w)
        n, mean_new, var_new = mmcv.MMCVSyncBatchNorm (z, p_m, p_v, p_s, p_b)
        y = Relu (n) }"""
    shapes = {"w": (4, 3, 3, 3), **{f"p_{name}": (4,) for name in "mvsb"}}
    proto = model(text, shapes, header=HEADER)
    values = ATTRIBUTES | {"training_mode": training, "group_size": group_size}
    proto.graph.node[1].attribute.extend(onnx.helper.make_attribute(name, value) for name, value in values.items())
    if body:
        proto.functions.append(portable_body(18))
        proto.graph.node[1].output.extend(["", ""])
    return proto


def with_functions(graph: str, *functions: str, opset: int = 18) -> onnx.ModelProto:
    texts = (f'<opset_import: ["": {opset}, "local": 1], domain: "local"> {each}' for each in functions)
    return model(f"g ({graph} {' '.join(texts)}", header=HEADER)


TANH = "f (x) => (y) { y = Tanh (x) }"
ROW = "float[N,4] x) => (float[N,4] y) {{ {} }}"


def check(proto: onnx.ModelProto, **inputs: np.ndarray) -> onnx.ModelProto:
    """Inline; the result is a valid model without functions and has the same outputs."""
    result = inline(proto)
    assert result.verification is not None and result.verification.passed, result.verification
    onnx.checker.check_model(result.model, full_check=True)
    assert not result.model.functions
    feeds = {**make_inputs(proto), **inputs}
    for got, expected in zip(run(result.model, feeds), run(proto, feeds), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    return result.model


def test_inference_becomes_batch_normalization() -> None:
    made = check(kept(0))
    assert [name for name in operators(made) if name != "Identity"] == ["Conv", "BatchNormalization", "Relu"]


def test_training_becomes_its_body() -> None:
    """The statistics are those of the batch, and the new ones are still outputs."""
    made = check(kept(1))
    assert not {"If", "CastLike", "MMCVSyncBatchNorm"} & set(operators(made))
    assert [each.domain for each in made.opset_import] == [""]


def test_verification_compares_what_trains(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """The reference still trains: a candidate in inference is another model."""
    original = api._inline

    def in_inference(opened):
        for node in opened.graph:
            if "training_mode" in node.attributes:
                node.attributes.pop("training_mode")
                node.attributes.add(api.ir.AttrInt64("training_mode", 0))
        return original(opened)

    monkeypatch.setattr(api, "_inline", in_inference)
    with pytest.raises(VerificationError, match=r"the inlined model differs from the original.*nothing was written"):
        inline(kept(1), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("condition", [True, False])
def test_any_function(condition: bool) -> None:
    """Calls in calls and in branches; defaults and given attributes; an input returned; names that clash."""
    proto = with_functions(
        """float[N,4] x, bool c) => (float[N,4] y, float[N,4] same, float[N,4] z) {
            z, same = local.twice (x, c)
            y = If (c) <then_branch = t () => (float[N,4] a) { a, b = local.twice (z, c) },
                        else_branch = e () => (float[N,4] o) { o = local.scaled (z) }> }""",
        "scaled <alpha: float = 0.5> (x) => (y) { y = LeakyRelu <alpha: float = @alpha> (x) }",
        """twice (x, c) => (y, w) {
            w = Identity (x) z = local.scaled (x)
            y = If (c) <then_branch = t () => (o) { o = local.scaled <alpha = 0.25> (z) },
                        else_branch = e () => (q) { q = Neg (z) }> }""",
    )
    check(proto, c=np.asarray(condition))


def test_a_function_that_returns_its_input() -> None:
    """ONNX Runtime takes no such function; the nodes it takes."""
    graph = "float[N,4] x) => (float[N,4] y, float[N,4] z) { y, z = local.f (x) }"
    x = np.ones((2, 4), np.float32)
    for value in run(inline(with_functions(graph, "f (x) => (x, x) { n = Neg (x) }"), verify=False).model, {"x": x}):
        np.testing.assert_array_equal(value, x)


def test_nothing_to_inline_is_a_copy(tmp_path) -> None:
    proto = model("g (float[N,4] x) => (float[N,4] y) { y = Relu (x) }")
    result = inline(proto, tmp_path / "m.onnx")
    assert not result.changed and result.verification is None
    assert to_proto(load(tmp_path / "m.onnx")).graph.node[0].op_type == "Relu"


@pytest.mark.parametrize(
    ("proto", "error", "message"),
    [
        (lambda: kept(1, body=False), UnsupportedModelError, "trains and has no body of standard operators"),
        (lambda: kept(1, group_size=2, body=False), UnsupportedModelError, "needs the custom-op library"),
        (lambda: with_functions("float[N,4] x) => (float[N] y) { y = local.f (x) }",
            "f (x) => (y) { y = ReduceSum <axes = [1], keepdims = 0> (x) }", opset=11), UnsupportedModelError,
            "it is for opset 11 of ONNX, the model for 18, and ReduceSum differs between them"),
        *((lambda call=call: with_functions(ROW.format(call), TANH), UnsupportedModelError, said) for call, said in (
            ("y = local.f (x, x)", "got 2 inputs and 1 outputs, expected at most 1 and 1"), ("y, z = local.f (x)", "and 2 outputs"),
            ("y = local.f <g = t () => (float[1] o) { o = Identity (x) }> (x)", "it gives a graph as an attribute"))),
        (lambda: doubling(30), UnsafeModelError, "would have more than 262144 nodes"),
    ],
    ids=["no body", "group", "opset", "inputs", "outputs", "a graph", "doubling"],
)  # fmt: skip
def test_refusals(proto, error, message, tmp_path) -> None:
    with pytest.raises(error, match=message):
        inline(proto(), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_a_group_in_inference_needs_no_body() -> None:
    assert not inline_functions(as_model(doubling(30)), keep=lambda _: True)
    made = inline(kept(0, group_size=2, body=False)).model
    assert "BatchNormalization" in operators(made) and "MMCVSyncBatchNorm" not in operators(made)


def test_an_older_opset_with_the_same_operators() -> None:
    check(with_functions(ROW.format("y = local.f (x)"), TANH, opset=17))


def test_what_other_domains_remain() -> None:
    proto = with_functions(ROW.format("a = local.f (x) y = other.Op (a)"), TANH)
    proto.opset_import.append(onnx.helper.make_opsetid("other", 1))
    result = inline(proto, verify=False)
    assert (result.foreign, result.calls) == (("other:Op",), {"local:f": 1})


def doubling(depth: int) -> onnx.ModelProto:
    """Functions that call the next one twice."""
    calls = [f"f{i} (x) => (y) {{ a = local.f{i + 1} (x) y = local.f{i + 1} (a) }}" for i in range(depth)]
    return with_functions(ROW.format("y = local.f0 (x)"), *calls, f"f{depth} (x) => (y) {{ y = Relu (x) }}")
