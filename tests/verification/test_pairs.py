"""Pairs of models get their verdicts, also where they differ in a constant or an operator that no run of outputs shows."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from bnexport import verify
from bnexport.folding import fold
from bnexport.verification.api import _described, match
from tests.support.claims import outcome
from tests.support.onnx_text import batch_norm, model
from tests.verification.pairs import PAIRS


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_gets_its_verdict(name: str) -> None:
    pair = PAIRS[name]
    first, second = pair.models()
    for method, status in pair.says.items():
        for source, other in ((first, second), (second, first))[: 1 + pair.turned]:
            verdict = verify(source, other, method=method)  # type: ignore[arg-type]
            assert "proved" not in {proof.method for proof in verdict.sites}
            if status == "another":
                assert verdict.status != "passed"
                assert verify(source, other, method="local").another
            else:
                assert verdict.status == status, verdict
    method = next(iter(pair.says))
    assert verify(first, first, method=method).passed  # type: ignore[arg-type]


_RNG = np.random.default_rng(0)
TABLE = _RNG.standard_normal((600, 8)).astype(np.float32)
OTHER = np.where(np.arange(600)[:, None] < 300, TABLE, 0).astype(np.float32)


def test_what_differs_is_named() -> None:
    body = "g (float[N,8] x) => (float[N,8] y) { a = Mul (x, c)\n b = Elu <alpha = 1.0> (a)\n y = Add (b, x) }"
    source = model(body, values={"c": np.full(8, 1e-30, np.float32)})
    verdict = verify(source, model(body, values={"c": np.full(8, 2e-30, np.float32)}))
    assert verdict.status == "not_verified"
    assert "the constant 'c' differs by 1e-30" in verdict.reason
    changed = model(body.replace("alpha = 1.0", "alpha = 1.5"), values={"c": np.full(8, 1e-30, np.float32)})
    assert "the attribute 'alpha' changed" in verify(source, changed, method="local").another


def test_beside_a_fold_that_is_proved() -> None:
    body = """g (float[N,3,8,8] x, int64[N] t) => (float[N,4,6,6] y, float[N,8] z) { a = Conv (x, w:4.3.3.3) y = Norm (a, p:4)
        v = Cast <to = 1> (c) k = Identity (v) o = Gather (k, t) z = Relu (o) }"""
    first, second = (model(body, values={"c": each.astype(np.float16)}) for each in (TABLE, OTHER))
    folded = fold(second, verify=False, certificate=False).model
    status, marks = outcome(verify(first, folded))
    assert status != "passed" and marks == ["proved"]
    assert verify(second, folded)


@pytest.mark.parametrize("shape", [(8,), (1, 8), (1, 1, 8)])
def test_rounding_and_ones_in_front_are_no_difference(shape: tuple[int, ...]) -> None:
    body = "g (float[N,4,8] x) => (float[N,4,8] y) { a = Sin (x)\n b = Max (a, c)\n y = Cos (b) }"
    constant = 0.1 * TABLE[0]
    other = np.nextafter(constant, np.float32(1)).reshape(shape)
    assert verify(model(body, values={"c": constant}), model(body, values={"c": other}))


BODY = "g (float[N,8] {0}, float[N,4] {1}) => (float[N,8] {2}) {{ a = Sin ({0})\n s = ReduceSum ({1})\n {2} = Add (a, s) }}"


def test_other_names_are_matched_by_position() -> None:
    first, second = (model(BODY.format(*names)) for names in ("xvy", "xuz"))
    verdict = verify(first, second)
    assert verdict.passed and verdict.reason == "matched by position: u as v, z as y"
    assert verdict.summary().endswith("matched by position: u as v, z as y; 0 folds proved, 0 compared only")
    assert verify(first, model(BODY.format(*"xuz").replace("Sin", "Cos"))).status == "failed"
    # Another order is no match.
    assert "inputs differ" in verify(first, model(BODY.format(*"vxy"))).reason
    assert _described([ir.val(f"v{index}") for index in range(9)]).count("v") == 8


def test_another_type_is_no_match() -> None:
    first = ir.from_proto(model(BODY.format(*"xvy")))
    for kind in ("float[N,4]", "float[N,4,1]", "float[N,5]", "double[N,4]", "seq(float[N,4])"):
        other = ir.from_proto(model(BODY.format(*"xwy").replace("float[N,4]", kind)))
        assert match(first, other)[2] == "matched by position: w as v" * (kind == "float[N,4]")


def test_it_is_said_where_the_reference_was_converted() -> None:
    nodes = ("Norm (x, p)", "mmcv.MMCVSyncBatchNorm <training_mode=0, eps=1e-5> (x, p_m, p_v, p_s, p_b)")
    texts, header = (
        [f"g (float[N,4] x) => (y) {{ y = {each} }}" for each in nodes],
        '<ir_version: 8, opset_import: ["": 17, "mmcv": 1]>',
    )
    plain, sync = (model(each, batch_norm("p", 4), header=header) for each in texts)
    verdicts = [verify(*pair, method="local") for pair in ((plain, plain), (sync, sync), (sync, plain))]
    assert all(verdicts) and [each.reference for each in verdicts] == ["original", "original", "converted"]


UNARY = "Relu Sigmoid, Relu LeakyRelu, Tanh Sigmoid, Tanh Erf, Floor Ceil, Elu Selu, Exp Softplus, HardSigmoid Sigmoid"
# Nodes that make t, and operators of which one takes the other's place.
WAYS = {
    "t = OP (s)": UNARY,
    "s_ = Mul (s, steep) t = OP (s_)": "Tanh Sigmoid, Tanh Erf",
    "t = OP (s, r)": "Add Mul, Add Mean, Max Min, Sub Div",
    "k = OP (s) t = Add (k, s)": "ReduceMean ReduceMax, ReduceMin ReduceSum",
}
# What follows, which type its result has, and which shape.
HIDING = {
    "Greater": ("y = Greater (t, half)", "bool[N,6] y"),
    "Less": ("y = Less (t, many)", "bool[N,6] y"),
    "ArgMax": ("y = ArgMax <axis = 1, keepdims = 0> (t)", "int64[N] y"),
    "Cast": ("y = Cast <to = 7> (t)", "int64[N,6] y"),
    "Sign": ("y = Sign (t)", "float[N,6] y"),
    "If": (
        """m = ReduceMax <keepdims = 0> (t) g = Greater (m, half)
        y = If (g) <then_branch = a () => (float[N,6] p) { p = Neg (x) }, else_branch = b () => (float[N,6] q) { q = Relu (x) }>""",
        "float[N,6] y",
    ),
}
NUMBERS = {"steep": 1e5, "half": 0.5, "many": 5, "zero": 0, "two": 2}
VALUES = {name: np.float32(number) for name, number in NUMBERS.items()}


def used(nodes: str) -> dict[str, np.float32]:
    """Return the constants that nodes name."""
    return {name: value for name, value in VALUES.items() if re.search(rf"\b{name}\b", nodes)}


def made(nodes: str, hiding: str) -> onnx.ModelProto:
    """Build a model in which nodes make t of s and r, and t is hidden."""
    text, output = HIDING[hiding]
    body = f"g (float[N,6] x, float[N,6] v) => ({output}) {{ s = Sin (x) r = Cos (v) {nodes} {text} }}"
    return model(body, values=used(body))


@pytest.mark.parametrize("hiding", HIDING)
def test_no_exchange_passes(hiding: str) -> None:
    passed = []
    for nodes, kinds in WAYS.items():
        for pair in kinds.split(", "):
            first, second = (made(nodes.replace("OP", kind), hiding) for kind in pair.split())
            passed += [pair for each in ((first, second), (second, first)) if verify(*each).passed]
    assert passed == []


RIGHT = {
    "Max for Relu": ("t = Relu (s)", "t = Max (s, zero)"),
    "merged transpositions": (
        "a = Transpose <perm = [1, 0]> (s) b = Transpose <perm = [1, 0]> (a) t = Tanh (b)",
        "t = Tanh (s)",
    ),
    "parts of HardSwish": ("a = HardSigmoid <alpha = 0.16666667> (s) t = Mul (s, a)", "t = HardSwish (s)"),
    "a reciprocal": ("a = Exp (s) t = Div (a, two)", "a = Exp (s) t = Mul (a, half)"),
    "Pow for Mul": ("t = Mul (s, s)", "t = Pow (s, two)"),
    "exchanged operands": ("k = Less (s, r) t = Cast <to = 1> (k)", "k = Greater (r, s) t = Cast <to = 1> (k)"),
}


@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("hiding", ["Greater", "ArgMax", "If"])
def test_right_rewrites_pass(kind: str, hiding: str) -> None:
    first, second = (made(nodes, hiding) for nodes in RIGHT[kind])
    assert verify(first, second).passed


def test_what_became_what_is_told() -> None:
    first, second = made("t = Relu (s)", "Less"), made("t = Sigmoid (s)", "Less")
    verdict = verify(first, second)
    assert verdict.status == "not_verified"
    assert "t (Relu) became t (Sigmoid): it differs by" in verdict.reason
    # A run alone is asked for.
    assert verify(first, second, method="whole").passed


# Where no run sees the value itself: in the body of a node, and where it is no float.
UNSEEN = {
    ("Tanh", "Sigmoid"): """c = Equal (one, one)
        y = If (c) <then_branch = a () => (float[N,6] p) { e = OP (x) f = Greater (e, many) p = Where (f, v, x) },
            else_branch = b () => (float[N,6] q) { q = Neg (x) }>""",
    ("Less", "LessOrEqual"): "c = OP (x, many) y = Where (c, x, x)",
}


@pytest.mark.parametrize(("first", "second"), UNSEEN)
@pytest.mark.parametrize("beside", ["z = Relu (v)", "z = Max (v, zero)"])
def test_an_exchange_that_no_run_sees(first: str, second: str, beside: str) -> None:
    """Also beside a right rewrite, which is compared."""

    def built(kind: str, last: str) -> onnx.ModelProto:
        nodes = UNSEEN[first, second].replace("OP", kind)
        return model(
            f"g (float[N,6] x, float[N,6] v, float one) => (float[N,6] y, float[N,6] z) {{ {nodes} {last} }}",
            values=used(nodes + last),
        )

    source = built(first, "z = Relu (v)")
    verdict = verify(source, built(second, beside))
    assert verdict.status == "not_verified"
    assert f"({first}) became {second}" in verdict.reason
    assert verify(source, built(first, beside)).passed
