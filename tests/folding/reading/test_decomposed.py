"""Batch norms that an exporter wrote out as arithmetic with per-channel constants."""

from __future__ import annotations

import pytest

from bnexport.folding import fold
from tests.support.onnx_text import batch_norm, fold_and_check, model, operators

X4 = "float[N,6,H,W] x"
CONV = "z = Conv <pads=[1,1,1,1]> (x, w)"

CASES = {
    "mul-add": "t = Mul (z, a_s)\n y = Add (t, b)",
    "mul-add-constants-first": "t = Mul (a_s, z)\n y = Add (b, t)",
    "sub-div-mul-add": "t = Sub (z, m)\n u = Div (t, a_s)\n v = Mul (u, c_s)\n y = Add (v, b)",
    "sub-of-a-negative": "t = Mul (z, a_s)\n y = Sub (b, t)",
    "computed-standard-deviation": (
        "e = Constant <value_float = 0.001> ()\n q = Add (k_v, e)\n d = Sqrt (q)\n t = Sub (z, m)\n u = Div (t, d)\n"
        " v = Mul (u, c_s)\n y = Add (v, b)"
    ),
    "reciprocal": "r = Reciprocal (a_s)\n t = Mul (z, r)\n y = Add (t, b)",
    "vector-through-unsqueeze": (
        "i = Constant <value_ints = [1, 2]> ()\n g = Unsqueeze (o_s, i)\n t = Mul (z, g)\n y = Add (t, b)"
    ),
}
SHAPES = {"w": (8, 6, 3, 3), **dict.fromkeys(("a_s", "c_s", "b", "m", "k_v"), (1, 8, 1, 1)), "o_s": (8,)}


@pytest.mark.parametrize("case", CASES)
def test_written_out(case: str) -> None:
    body = f"g ({X4}) => (float[N,8,A,B] y) {{ {CONV}\n {CASES[case]} }}"
    words = set(body.replace(",", " ").replace("(", " ").replace(")", " ").split())
    folded, result = fold_and_check(model(body, {name: shape for name, shape in SHAPES.items() if name in words}))
    assert operators(folded) == ["Conv"]
    assert result.report.folded[0].op_type in ("Mul", "Sub")
    assert len(folded.graph.initializer) == 2


def test_along_the_last_axis() -> None:
    body = "g (float[N,L,6] x) => (float[N,L,8] y) { z = MatMul (x, w)\n t = Mul (z, a_s)\n y = Add (t, b) }"
    folded, _ = fold_and_check(model(body, {"w": (6, 8), "a_s": (8,), "b": (8,)}))
    assert operators(folded) == ["MatMul", "Add"]


NO_BATCH_NORMS = {
    "layer-norm": "m = ReduceMean <axes=[-1]> (z)",
    "instance-norm": "m = ReduceMean <axes=[2,3]> (z)",
    "mean-of-everything": "m = ReduceMean <axes=[0,1,2,3]> (z)",
    "mean-of-the-batch-only": "m = ReduceMean <axes=[0]> (z)",
    "mean-of-another-value": "m = ReduceMean <axes=[0,2,3]> (x)",
}


@pytest.mark.parametrize("case", NO_BATCH_NORMS)
def test_other_means_are_not_reported(case: str) -> None:
    body = f"g ({X4}) => (float[N,6,A,B] y) {{ z = Relu (x)\n {NO_BATCH_NORMS[case]}\n y = Sub (z, m) }}"
    assert not fold(model(body, {}, opset=13), verify=False).report.sites


def test_layer_norm_stays() -> None:
    """Its scale and shift look like a batch norm's, but what they follow is not linear."""
    body = """g (float[N,L,8] x) => (float[N,L,8] y) {
        m = ReduceMean <axes=[-1]> (x)
        d = Sub (x, m)
        q = Mul (d, d)
        v = ReduceMean <axes=[-1]> (q)
        e = Sqrt (v)
        n = Div (d, e)
        t = Mul (n, a_s)
        y = Add (t, b) }"""
    result = fold(model(body, {"a_s": (8,), "b": (8,)}))
    assert not result.report.folded


def test_batch_norm_through_a_reshape_into_another() -> None:
    body = f"""g ({X4}) => (float[N,6,A] y) {{
        r = Relu (x)
        t = BatchNormalization (r, p_s, p_b, p_m, p_v)
        s = Constant <value_ints = [0, 6, -1]> ()
        z = Reshape (t, s)
        y = BatchNormalization (z, q_s, q_b, q_m, q_v) }}"""
    folded, _ = fold_and_check(model(body, {**batch_norm("p", 6), **batch_norm("q", 6)}), left=1)
    assert operators(folded) == ["Relu", "BatchNormalization", "Constant", "Reshape"]


def operators_of(result: object) -> list[str]:
    from bnexport.model_io import to_proto

    return operators(to_proto(result.model))  # type: ignore[attr-defined]
