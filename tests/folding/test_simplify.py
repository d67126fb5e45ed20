"""fold(simplify=True): the folds are proved, then what deployment does not need leaves, and whole models are compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from bnexport import verify
from bnexport.cli import main
from bnexport.errors import VerificationError
from bnexport.folding import fold
from bnexport.graph import simplify
from bnexport.model_io.read import as_model
from tests.support.onnx_text import model, operators_of, run

SOURCE = model("""g (float[N,6,8,8] x) => (float[N,C,A,B] y) {
    i = Identity (x) z = Conv (i, w:8.6.3.3) n = Norm (z, p:8)
    s = Shape (n) k = Constant <value_ints = [0]> () b = Gather <axis = 0> (s, k) m = Constant <value_ints = [8, -1]> ()
    t = Concat <axis = 0> (b, m) f = Reshape (n, t) d = Dropout (f) r = Relu (d) e = Constant <value_ints = [0, 8, 6, 6]> ()
    y = Reshape (r, e) }""")


def test_folded_and_simplified() -> None:
    plain, result = fold(SOURCE), fold(SOURCE, simplify=True)
    assert result.report.after.nodes == len(operators_of(result)) < plain.report.after.nodes
    assert not {"Identity", "Dropout", "BatchNormalization"} & {*operators_of(result)}
    verdict = result.report.verification
    assert (verdict.status, verdict.method) == ("passed", "both")
    assert {proof.method for proof in verdict.sites} == {"proved"}
    assert verify(SOURCE, result.model).passed
    assert result.report.certificate != bool(result.report.uncertified)


def test_sums_of_constants_are_rounded_once() -> None:
    """The mean of a filter that hardly varies: an error of its last bits is one of the filter's first."""
    body = """g (float[N,6,8,8] x) => (float[N,C,A,B] y) { m = ReduceMean <axes = [1, 2, 3], keepdims = 1> (w)
        v = Sub (w, m)\n y = Conv (x, v) }"""
    weight = (2 + np.random.default_rng(0).standard_normal((8, 6, 3, 3)) / 1024).astype(np.float32)
    mean = weight.astype(np.float64).mean((1, 2, 3), keepdims=True).astype(np.float32)
    result = fold(model(body, values={"w": weight}), simplify=True)
    assert operators_of(result) == ["Conv"]
    (stored,) = (onnx.numpy_helper.to_array(each) for each in result.model.graph.initializer)
    np.testing.assert_array_equal(stored, weight - mean)


@pytest.mark.parametrize(
    ("node", "opset", "left"),
    [("Softmax (e:2.3.4)", 13, "Add"), ("Norm (e:2.3.4, p:3)", 13, "BatchNormalization Add")]
    + [(f"{name} (e:2.3.4)", 12, f"{name} Add") for name in ("Softmax", "LogSoftmax", "Hardmax", "GlobalMaxPool")],
)
def test_constants_that_onnx_reference_computes_wrongly_stay(node: str, opset: int, left: str) -> None:
    source = model(f"g (float[2,3,4] x) => (y) {{ s = {node} y = Add (x, s) }}", opset=opset)
    result = fold(source, simplify=True)
    assert operators_of(result) == left.split()
    assert not result.report.changed or result.report.verification.passed


def test_outputs_that_a_pass_made_one_value() -> None:
    graph = as_model(model("g (float[N,4] x) => (float[N,4] t) { t = Relu (x) }")).graph
    graph.outputs[:] = [graph.outputs[0], graph.outputs[0], graph.inputs[0]]
    simplify._restore_outputs(graph, ["y", "z", "w"])
    assert [output.name for output in graph.outputs] == ["y", "z", "w"]
    assert [node.op_type for node in graph] == ["Relu", "Identity", "Identity"] and graph.inputs[0].name == "x"


def test_whole_models_are_compared_whatever_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = simplify.simplify

    def wrong(graph) -> None:
        real(graph)
        for name, value in graph.graph.initializers.items():
            if len(value.shape) == 4:
                value.const_value = ir.tensor(value.const_value.numpy() * np.float32(1.5), name=name)

    monkeypatch.setattr(simplify, "simplify", wrong)
    for method in ("local", "both", True):
        with pytest.raises(VerificationError):
            fold(SOURCE, tmp_path / "out.onnx", simplify=True, verify=method)
    assert not (tmp_path / "out.onnx").exists()


def test_in_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(SOURCE, tmp_path / "in.onnx")
    assert main(["fold", str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx"), "--simplify"]) == 0
    assert " nodes before, " in "".join(capsys.readouterr())
    assert len(onnx.load(tmp_path / "out.onnx").graph.node) < 10


# y of the main graph is an If; `t` is computed outside of its branches.
BRANCHES = {
    "one branch returns an outer value": ("a = Identity (t)", "b = Neg (t)"),
    "both return the same outer value": ("a = Identity (t)", "b = Identity (t)"),
    "an addition of nothing": ("a = Add (t, zero)", "b = Mul (t, one)"),
    "an initializer": ("a = Identity (q)", "b = Neg (t)"),
    "two levels": (
        "i = If (c) <then_branch = g () => (float[N,4,4,4] n) { m = Neg (t) n = Identity (m) },"
        " else_branch = g () => (float[N,4,4,4] k) { k = Identity (t) }> a = Identity (i)",
        "b = Abs (t)",
    ),
}


def branching(then: str, otherwise: str, *, condition: str = "c", results: str = "") -> onnx.ModelProto:
    body = f"""g (float[N,3,6,6] x, bool c) => (float[N,4,4,4] y{results}) {{
        z = Conv (x, w)
        t = Relu (z)
        y = If ({condition}) <then_branch = g () => (float[N,4,4,4] a) {{ {then} }},
                              else_branch = g () => (float[N,4,4,4] b) {{ {otherwise} }}> }}"""
    # The text knows no literal of type bool.
    values = {"always": np.ones((), np.bool_), "zero": np.zeros((), np.float32), "one": np.ones((), np.float32)}
    return model(body, {"w": (4, 3, 3, 3), "q": (1, 4, 4, 4)}, values=values)


@pytest.mark.parametrize("results", ["", ", float[N,4,4,4] t"], ids=["", "t is an output, too"])
@pytest.mark.parametrize(("then", "otherwise"), BRANCHES.values(), ids=BRANCHES)
def test_branches_that_return_an_outer_value_stay_valid(then: str, otherwise: str, results: str) -> None:
    source = branching(then, otherwise, results=results)
    result = fold(source, simplify=True)
    assert result.report.verification.passed
    assert [output.name for output in result.model.graph.output] == [output.name for output in source.graph.output]
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 6), np.float32)
    for condition in (True, False):
        feeds = {"x": x, "c": np.asarray(condition)}
        for want, got in zip(run(source, feeds), run(result.model, feeds), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_branch_of_a_constant_condition_is_inlined() -> None:
    result = fold(branching(*BRANCHES["two levels"], condition="always", results=", float[N,4,4,4] t"), simplify=True)
    assert result.report.verification.passed
    assert operators_of(result) == ["Conv", "Relu", "If"]
