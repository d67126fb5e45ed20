"""Runs of per-channel maps that find no place become one batch norm."""

from __future__ import annotations

import pytest

from tests.folding.helpers import batch_norm, fold_and_check, model, operators

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


def test_what_broadcasts_is_not_merged() -> None:
    """The Add makes six channels out of one."""
    body = (
        "g (float[N,1,H,W] x) => (float[N,6,A,B] y) { t = Add (x, k)\n y = BatchNormalization (t, p_s, p_b, p_m, p_v) }"
    )
    folded, _ = fold_and_check(model(body, {"k": (6, 1, 1), **batch_norm("p", 6)}), left=1)
    assert operators(folded) == ["Add", "BatchNormalization"]
