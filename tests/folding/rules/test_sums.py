"""Sum of any number of operands, and Neg: whatever holds for an Add, and a sign that maps pass."""

from __future__ import annotations

from typing import Any

import onnx
import pytest

from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.support.onnx_text import batch_norm, fold_and_check, model, operators

WEIGHTS = {"w": (4, 3, 1, 1), "v": (4, 3, 1, 1), "u": (5, 4, 1, 1), "c": (4, 1, 1), "d": (1, 4, 1, 1), "m": (6, 4)}
NORM = "BatchNormalization (z, p_s, p_b, p_m, p_v)"


def net(nodes: str, output: str = "float[N,4,A,B] y", **options: Any) -> onnx.ModelProto:
    words = set(nodes.replace("(", " ").replace(")", " ").replace(",", " ").split())
    shapes = {name: shape for name, shape in WEIGHTS.items() if name in words}
    return model(f"g (float[N,3,H,W] x) => ({output}) {{ {nodes} }}", {**shapes, **batch_norm("p", 4)}, **options)


# What a batch norm folds through or into, and the operators that are left.
FOLDED = {
    "two constants behind a convolution": (f"a = Conv (x, w)\n z = Sum (c, a, d)\n y = {NORM}", ["Conv"]),
    "constants behind a batch norm": (f"z = Conv (x, w)\n n = {NORM}\n y = Sum (n, c, d)", ["Conv"]),
    "a sum of one": (f"a = Conv (x, w)\n z = Sum (a)\n y = {NORM}", ["Conv"]),
    "branches": (f"a = Conv (x, w)\n r = Relu (x)\n b = Conv (r, v)\n z = Sum (a, b, c)\n y = {NORM}",
        ["Conv", "Relu", "Conv", "Sum"]),
    "constants between a batch norm and its reader": (
        f"r = Relu (x)\n q = Conv (r, w)\n z = Tanh (q)\n n = {NORM}\n s = Sum (c, n, d)\n y = Conv (s, u)",
        ["Relu", "Conv", "Tanh", "Conv"],
    ),
    "negated behind": (f"z = Conv (x, w)\n n = {NORM}\n y = Neg (n)", ["Conv"]),
    "negated before": (f"a = Conv (x, w)\n z = Neg (a)\n y = {NORM}", ["Conv"]),
    "negated before, behind another operator": (f"a = Conv (x, w)\n b = Neg (a)\n z = AveragePool <kernel_shape = [2, 2]> (b)\n y = {NORM}",
        ["Conv", "Neg", "AveragePool"]),
    "negated in front of a reader": (f"r = Relu (x)\n q = Conv (r, w)\n z = Tanh (q)\n n = {NORM}\n"
        " s = AveragePool <kernel_shape = [2, 2]> (n)\n e = Neg (s)\n y = Conv (e, u)",
        ["Relu", "Conv", "Tanh", "AveragePool", "Neg", "Conv"]),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDED)
def test_folds(case: str) -> None:
    nodes, left = FOLDED[case]
    output = "float[N,5,A,B] y" if "y = Conv (" in nodes else "float[N,4,A,B] y"
    folded, _ = fold_and_check(net(nodes, output), verify="whole" if "Sum" in nodes else True)
    assert operators(folded) == left


def test_a_maximum_in_front_of_a_sign_takes_no_map() -> None:
    """The batch norm absorbs the Neg, and stays."""
    nodes = f"a = Conv (x, w)\n r = Relu (a)\n z = Neg (r)\n y = {NORM}"
    folded, result = fold_and_check(net(nodes), left=1)
    assert operators(folded) == ["Conv", "Relu", "BatchNormalization"]
    assert [refusal.code for refusal in result.report.sites[0].refusals] == ["order", "graph-output"]


def test_a_maximum_behind_a_sign_takes_no_negative_scale() -> None:
    nodes = f"r = Relu (x)\n q = Conv (r, w)\n z = Tanh (q)\n n = {NORM}\n e = Neg (n)\n s = Relu (e)\n y = Conv (s, u)"
    folded, _ = fold_and_check(net(nodes, "float[N,5,A,B] y"), left=1)
    assert operators(folded) == ["Relu", "Conv", "Tanh", "BatchNormalization", "Relu", "Conv"]


def test_matmul_gives_its_shift_to_a_sum() -> None:
    proto = model(
        f"""g (float[N,L,4] x) => (float[N,L,6] y) {{
            t = Transpose <perm = [0, 2, 1]> (x)
            z = Tanh (t)
            n = {NORM}
            s = Transpose <perm = [0, 2, 1]> (n)
            q = MatMul (s, m)
            y = Sum (e, q) }}""",
        {"m": (4, 6), "e": (6,), **batch_norm("p", 4)},
    )
    folded, _ = fold_and_check(proto, verify="whole")
    assert operators(folded) == ["Transpose", "Tanh", "Transpose", "MatMul", "Sum"]


def test_sums_before_opset_8_do_not_broadcast() -> None:
    """Their operands have one shape, so that a sum of branches is the only form."""
    norm = "BatchNormalization <is_test = 1> (z, p_s, p_b, p_m, p_v)"
    nodes = f"a = Conv (x, w)\n r = Relu (x)\n b = Conv (r, v)\n z = Sum (a, b)\n y = {norm}"
    folded = to_proto(fold(net(nodes, opset=6), verify="whole").model)
    assert operators(folded) == ["Conv", "Relu", "Conv", "Sum"]
