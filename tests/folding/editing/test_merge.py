"""Runs of per-channel maps that find no place become one batch norm."""

from __future__ import annotations

import pytest

from bnexport.folding import fold
from tests.support.onnx_text import batch_norm, fold_and_check, model, operators

X4 = "float[N,6,H,W] x"
CASES = {
    "two-batch-norms": "t = BatchNormalization (x, p_s, p_b, p_m, p_v)\n y = BatchNormalization (t, q_s, q_b, q_m, q_v)",
    "behind": "t = BatchNormalization (x, p_s, p_b, p_m, p_v)\n u = Mul (t, k_s)\n y = Add (u, k)",
    "before": "t = Sub (x, k)\n u = Div (t, k_s)\n y = BatchNormalization (u, p_s, p_b, p_m, p_v)",
    "around": "t = Add (k, x)\n u = BatchNormalization (t, p_s, p_b, p_m, p_v)\n v = Sub (k, u)\n y = Mul (v, two)",
}


@pytest.mark.parametrize("tail", ["", "Relu", "output-is-read-too"])
@pytest.mark.parametrize("case", CASES)
def test_one_batch_norm_is_left(case: str, tail: str) -> None:
    shapes = {**batch_norm("p", 6), **batch_norm("q", 6), "k_s": (6, 1, 1), "k": (6, 1, 1), "two": (1,)}
    used = {
        name: shape
        for name, shape in shapes.items()
        if name in CASES[case].replace(",", " ").replace(")", " ").replace("(", " ").split()
    }
    outputs, nodes = "float[N,6,A,B] y", CASES[case]
    if tail:
        outputs = "float[N,6,A,B] r" + (", float[N,6,A,B] y" if tail != "Relu" else "")
        nodes += "\n r = Relu (y)"
    folded, result = fold_and_check(model(f"g ({X4}) => ({outputs}) {{ {nodes} }}", used), left=1)
    assert operators(folded) == ["BatchNormalization"] + (["Relu"] if tail else [])
    assert [site.outcome for site in result.report.sites] == ["merged"]
    assert len(folded.graph.initializer) == 4


WRITTEN_OUT = {
    "mul-add": "t = Mul (r, k_s)\n y = Add (t, k)",
    "sub-div-mul-add": "t = Sub (r, k)\n u = Div (t, k_s)\n v = Mul (u, k_s)\n y = Add (v, k)",
    "negated": "t = Mul (k_s, r)\n y = Sub (k, t)",
}


@pytest.mark.parametrize("tail", ["", "s = Sigmoid (y)"])
@pytest.mark.parametrize("case", WRITTEN_OUT)
def test_arithmetic_stays_arithmetic(case: str, tail: str) -> None:
    """It finds no place behind a Relu, and a model without batch norms gets none."""
    body = f"g ({X4}) => (float[N,6,A,B] {'s' if tail else 'y'}) {{ r = Relu (x)\n {WRITTEN_OUT[case]}\n {tail} }}"
    proto = model(body, {"k_s": (6, 1, 1), "k": (1, 6, 1, 1)})
    folded, result = fold_and_check(proto)
    assert operators(folded) == operators(proto)
    assert [site.outcome for site in result.report.sites] == ["kept"]
    assert not result.report.changed


def test_along_the_last_axis_it_stays_arithmetic() -> None:
    body = "g (float[N,L,6] x) => (float[N,L,6] y) { r = Relu (x)\n t = Mul (r, k_s)\n y = Add (t, k) }"
    folded, _ = fold_and_check(model(body, {"k_s": (6,), "k": (6,)}))
    assert operators(folded) == ["Relu", "Mul", "Add"]


def test_half_precision_stays_arithmetic() -> None:
    """ONNX Runtime has no such batch norm on CPUs."""
    body = "g (float16[N,6,H,W] x) => (float16[N,6,A,B] y) { r = Relu (x)\n t = Mul (r, k_s)\n y = Add (t, k) }"
    proto = model(body, {"k_s": (6, 1, 1), "k": (6, 1, 1)}, dtype="float16")
    assert not fold(proto).report.changed


def test_what_broadcasts_is_not_merged() -> None:
    """The Add makes six channels out of one."""
    body = (
        "g (float[N,1,H,W] x) => (float[N,6,A,B] y) { t = Add (x, k)\n y = BatchNormalization (t, p_s, p_b, p_m, p_v) }"
    )
    folded, _ = fold_and_check(model(body, {"k": (6, 1, 1), **batch_norm("p", 6)}), left=1)
    assert operators(folded) == ["Add", "BatchNormalization"]
