"""An operator that became another one in front of what hides its result: no run of outputs tells, and none passes."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest

from bnexport import verify
from tests.support.onnx_text import model

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
